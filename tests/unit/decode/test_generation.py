"""Caps, ends and edges that hold for every method, and that nothing is left behind."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from decoding_case import (
    answer_of,
    make_family,
    make_llama,
    noted,
    random_ids,
    transformers_greedy,
)
from method_case import LENGTH, METHODS, Case

from medusa_train.decode import Sampling, StopStrings, forward, generate, generate_batch
from medusa_train.errors import DataError

every_method = pytest.mark.parametrize("name", METHODS)


def latin(ids):
    """One character a token."""
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def case(tiny):
    return Case(tiny, random_ids(12, seed=3))


@every_method
@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, LENGTH])
def test_the_answer_has_exactly_as_many_tokens_as_asked_for(case, name, length):
    found = case.answer(name, length)
    assert found.ids == case.truth[:length]
    assert found.finish_reason == "length"
    assert found.steps == len(found.accepted)
    assert 1 + sum(found.accepted) + found.steps >= length
    if name in ("medusa", "lookup"):
        assert found.accepted == [4] * -(-(length - 1) // 5)


@every_method
def test_no_tokens_at_all(monkeypatch, case, name):
    """Nothing is computed for them; a prompt that could not be answered is refused even so."""
    method = case.method(name)
    forwards = noted(monkeypatch, case.backbone, "forward", lambda *_, **__: None)
    found = answer_of(method, case.prompt, 0)
    assert (found.ids, found.finish_reason, found.steps, forwards) == ([], "length", 0, [])
    with pytest.raises(DataError, match="the prompt has no tokens"):
        answer_of(method, [], 0)
    with pytest.raises(DataError, match="max_new_tokens must be a whole number, 0 or more, got -1"):
        answer_of(method, case.prompt, -1)


@every_method
def test_an_end_id_at_every_place_of_a_block(case, name):
    places = set()
    for token in dict.fromkeys(case.truth[:LENGTH]):
        end = case.truth.index(token)
        places.add((end - 1) % 5)
        found = case.answer(name, end_ids=[token])
        assert found.ids == case.truth[: end + 1]
        assert found.finish_reason == "stop"
    assert places == set(range(5))


@every_method
def test_the_first_of_several_end_ids_decides(case, name):
    ends = [case.truth[9], case.truth[4]]
    first = min(case.truth.index(token) for token in ends)
    found = case.answer(name, end_ids=ends).ids
    assert found == case.truth[: first + 1] == case.expected(end_ids=ends)


@every_method
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_a_stop_string_at_every_place_of_a_block(case, name, size):
    """Of as many tokens as that, so that longer ones begin in one block and end in another."""
    method = case.method(name)
    for begin in range(12):
        string = latin(case.truth[begin : begin + size])
        end = latin(case.truth).index(string) + size
        found = generate(
            method,
            case.prompt,
            max_new_tokens=LENGTH,
            end_ids=(),
            stop=StopStrings([string], latin),
        )
        assert found.ids == case.truth[:end]
        assert found.finish_reason == "stop"
        assert sum(found.accepted) + found.steps + 1 == end


@every_method
@pytest.mark.parametrize("length", [1, 300])
def test_short_and_long_prompts(tiny, name, length):
    case = Case(tiny, random_ids(length, seed=4))
    found = case.answer(name)
    assert found.ids == case.truth[:LENGTH]
    assert (sum(found.accepted) > 0) == (name != "plain")


@every_method
def test_positions_never_reach_where_longrope_would_turn_all_of_them_anew(name):
    """Beyond it, a block that reaches further or a longer row would change what is said."""
    rope = dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0] * 4,
        long_factor=[4.0] * 4,
        original_max_position_embeddings=32,
    )
    case = Case(
        make_llama(max_position_embeddings=128, rope_parameters=rope), random_ids(10), ahead=0
    )
    method = case.method(name)
    assert method.max_positions == 32
    found = answer_of(method, case.prompt, 100)
    assert found.ids == case.expected(32 - 10)


def test_numbers_of_numpy_are_numbers(case):
    method, sampling = case.method("plain"), Sampling(temperature=1.0)
    settings = dict(end_ids=(), sampling=sampling)
    found = generate_batch(
        method, [case.prompt], max_new_tokens=np.int64(5), seeds=np.array([3]), **settings
    )
    again = generate_batch(method, [case.prompt], max_new_tokens=5, seeds=[3], **settings)
    assert found[0].ids == again[0].ids


def test_end_ids_that_can_be_read_only_once_still_end_every_row(case):
    found = generate(
        case.method("plain"), case.prompt, max_new_tokens=9, end_ids=iter([case.truth[4]])
    )
    assert found.ids == case.truth[: case.truth.index(case.truth[4]) + 1]


def test_masks_are_made_once_while_the_room_does(monkeypatch, case):
    made = []
    real = forward.Block
    monkeypatch.setattr(forward, "Block", lambda *args: made.append(args) or real(*args))
    method = case.method("medusa")
    for length in (LENGTH, 4, LENGTH, LENGTH + 9, 5):
        answer_of(method, case.prompt, length)
    assert len(made) == 2


@every_method
def test_threads_that_share_a_method_get_right_answers_or_a_sentence(case, name):
    method, prompts = case.method(name), [case.prompt, random_ids(9, seed=8)]
    right = [answer_of(method, prompt, LENGTH).ids for prompt in prompts]

    def ask(turn):
        try:
            return answer_of(method, prompts[turn % 2], LENGTH).ids == right[turn % 2]
        except DataError as error:
            return "has begun another answer" in str(error)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(ask, range(40)))


@every_method
def test_end_ids_that_the_model_does_not_have(case, name):
    """As some configurations list; they are held back no less than others."""
    sampling = Sampling(min_new_tokens=5)
    ends = [case.truth[1], 320, 10**6, -1]
    found = generate(
        case.method(name), case.prompt, max_new_tokens=9, end_ids=ends, sampling=sampling
    )
    assert case.truth[1] not in found.ids[:5]
    assert found.ids[:1] == case.truth[:1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@every_method
def test_the_context_ends_the_answer(name, family):
    """All methods reach its very end, also where it has no rows for positions beyond."""
    case = Case(make_family(family, max_position_embeddings=64), random_ids(40), ahead=0)
    method = case.method(name)
    assert method.max_positions == 64
    found = answer_of(method, case.prompt, 1000)
    assert found.ids == case.truth == case.expected(64 - 40)
    assert found.finish_reason == "length"
    for length in range(60, 64):
        prompt = random_ids(length, seed=5)
        expected = transformers_greedy(case.backbone, prompt, 64 - length)
        assert answer_of(method, prompt, 9).ids == expected
    with pytest.raises(DataError, match="a prompt of 64 tokens leaves no room"):
        answer_of(method, random_ids(64), 9)


@every_method
def test_an_abandoned_answer_leaves_nothing_to_the_next(case, name):
    method = case.method(name)
    for steps in range(4):
        with torch.inference_mode():
            tokens = method.start([random_ids(30, seed=7)], room=40)
            for _ in range(steps):
                tokens = [block[-1] for block in method.step(tokens)]
        assert (
            generate(method, case.prompt, max_new_tokens=LENGTH, end_ids=()).ids
            == (case.truth[:LENGTH])
        )


def attributes(model):
    """Names of everything on the model and its parts, the settings and the weights' versions."""
    parts = {name: sorted(vars(part)) for name, part in model.named_modules()}
    hooks = {name: len(part._forward_hooks) for name, part in model.named_modules()}
    versions = {name: p._version for name, p in model.named_parameters()}
    return parts, hooks, versions, model.config.to_dict(), model.generation_config.to_dict()


@every_method
def test_nothing_is_left_on_the_model(name):
    case = Case(make_llama(), random_ids(12, seed=3))
    before = attributes(case.backbone.model)
    case.answer(name)
    assert attributes(case.backbone.model) == before
    assert case.expected() == case.truth[:LENGTH]


@every_method
def test_padding_rows_of_the_lm_head_are_never_chosen(name):
    backbone = make_llama()
    rows = backbone.lm_head.weight.data  # pyright: ignore
    rows[259:] = 20 * rows[:61]  # unless held back, these would win often
    case = Case(backbone, random_ids(12, seed=3))
    found = case.answer(name)
    assert found.ids == case.truth[:LENGTH]
    assert max(found.ids) < 259
    free = backbone.model.generate(  # pyright: ignore
        torch.tensor([case.prompt]), max_new_tokens=LENGTH, do_sample=False
    )
    assert int(free.max()) >= 259


@every_method
def test_the_clocks_run(case, name):
    found = case.answer(name)
    assert found.prefill_seconds > 0
    assert found.decode_seconds > 0
    assert found.seconds == found.prefill_seconds + found.decode_seconds
