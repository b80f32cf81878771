"""What cannot be answered is refused in words, by every method and before anything is computed."""

import pytest
import torch
from decoding_case import answer_of, make_llama, noted, random_ids
from method_case import METHODS, Case

from medusa_train.decode import Sampling, generate, generate_batch
from medusa_train.errors import DataError, ModelError

every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module")
def case(tiny):
    return Case(tiny, random_ids(12, seed=3))


@every_method
def test_an_empty_prompt_is_refused(case, name):
    with pytest.raises(DataError, match="the prompt has no tokens"):
        answer_of(case.method(name), [], 4)


REFUSED = {
    "an id without an embedding": (
        dict(prompt=[5, 320]),
        "prompt 0 has the id 320; the model read",
    ),
    "an id below 0": (dict(prompt=[-1]), "prompt 0 has the id -1; the model reads 0 to 319"),
    "nothing left to say": (
        dict(sampling=Sampling(banned_ids=tuple(range(259)))),
        "are all ids that the model can say",
    ),
    "nothing left to say but ends that are held back": (
        dict(
            sampling=Sampling(banned_ids=tuple(range(1, 259)), min_new_tokens=3),
            end_ids=[0, 10**6],
        ),
        "with the end ids that min_new_tokens holds back",
    ),
    "a batch in place of a prompt": (
        dict(prompt=torch.tensor([[5, 6]])),
        r"prompt 0 must be a list of token ids, got tensor\(\[\[5, 6\]\]\)",
    ),
    "text in place of ids": (
        dict(prompt="Why?"),
        "prompt 0 must be a list of token ids, got 'Why\\?'",
    ),
    "no end ids": (dict(end_ids=None), "end_ids must be a list of token ids, got None"),
    "half a token": (dict(max_new_tokens=2.5), "max_new_tokens must be a whole number"),
}


@pytest.mark.parametrize("fault", REFUSED)
@every_method
def test_what_would_fail_on_the_way_is_refused_before(monkeypatch, case, name, fault):
    settings, message = REFUSED[fault]
    method = case.method(name)
    forwards = noted(monkeypatch, case.backbone, "forward", lambda *_, **__: None)
    with pytest.raises(DataError, match=message):
        generate(method, **{"prompt": case.prompt, "max_new_tokens": 4, "end_ids": (), **settings})
    assert forwards == []


@every_method
def test_a_model_that_was_moved_behind_the_back_of_a_method_is_refused(name):
    case = Case(make_llama(), random_ids(9), ahead=0)
    method = case.method(name)
    case.backbone.model.bfloat16()
    with pytest.raises(ModelError, match=r"bfloat16 on cpu now, and was torch.float32 on cpu"):
        answer_of(method, case.prompt, 4)


@pytest.mark.parametrize("seeds", [[0, 2**64], [0, 1.5], [0, None]])
def test_a_seed_that_is_none_is_refused(case, seeds):
    with pytest.raises(DataError, match="a seed must be a whole number of 64 bits, got"):
        generate_batch(
            case.method("plain"), [case.prompt] * 2, max_new_tokens=2, end_ids=(), seeds=seeds
        )


def test_a_prompt_in_place_of_prompts_is_refused(case):
    with pytest.raises(DataError, match="prompt 0 must be a list of token ids, got 12"):
        generate_batch(case.method("plain"), [12, 13], max_new_tokens=2, end_ids=())
