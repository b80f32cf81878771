"""Encoder-decoder models: greedy answers are those of `transformers.generate`, in fp32."""

from functools import cache

import pytest
import torch
from decoding_case import make_tree, random_ids
from seq2seq_case import KIN, make_seq2seq, noisy, transformers_answer

from medusa_train.decode import (
    DraftModel,
    Lookup,
    Medusa,
    Plain,
    Sampling,
    generate,
    generate_batch,
)
from medusa_train.model.heads import untrained_heads

LENGTH = 40
PROMPTS = [random_ids(length, seed=length) for length in (9, 3, 17, 1)]

# name -> a method for a target and its draft
METHODS = {
    "plain": lambda target, draft: Plain(target),
    "draft": lambda target, draft: DraftModel(target, draft, gamma=3),
    "adaptive": lambda target, draft: DraftModel(target, draft, gamma=2, adaptive=True),
    "lookup": lambda target, draft: Lookup(target, gamma=4, longest_ngram=1),
}


@cache
def case(kin):
    """A target, a draft that is often right, and the true answers."""
    target = make_seq2seq(kin)
    return target, noisy(target, 0.01), [transformers_answer(target, p, LENGTH) for p in PROMPTS]


@pytest.mark.parametrize("kin", KIN)
def test_plain(kin):
    target, _, truths = case(kin)
    assert min(len(set(truth)) for truth in truths) > 10, "repetition would show little"
    for prompt, truth in zip(PROMPTS, truths, strict=True):
        found = generate(Plain(target), prompt, max_new_tokens=LENGTH, end_ids=())
        assert found.ids == truth


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kin", KIN)
def test_draft_model(kin, gamma):
    target, draft, truths = case(kin)
    method = DraftModel(target, draft, gamma=gamma)
    found = generate(method, PROMPTS[0], max_new_tokens=LENGTH, end_ids=())
    assert found.ids == truths[0]
    assert min(found.accepted) == 0
    assert 0 < max(found.accepted) <= gamma


def test_a_draft_that_is_the_target_is_always_right():
    target, _, truths = case("t5")
    found = generate(
        DraftModel(target, target, gamma=4), PROMPTS[0], max_new_tokens=LENGTH, end_ids=()
    )
    assert found.ids == truths[0]
    assert set(found.accepted) == {4}


def test_a_smaller_draft_with_more_padding_behind_its_vocabulary():
    target, _, truths = case("t5")
    draft = make_seq2seq(num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=300)
    for gamma in (1, 4):
        method = DraftModel(target, draft, gamma=gamma)
        found = generate(method, PROMPTS[0], max_new_tokens=LENGTH, end_ids=())
        assert found.ids == truths[0]


@pytest.fixture
def poisoned():
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kin", KIN)
@pytest.mark.usefixtures("poisoned")
def test_unequal_prompts_in_one_batch(kin, method):
    target, draft, truths = case(kin)
    found = generate_batch(
        METHODS[method](target, draft), PROMPTS, max_new_tokens=LENGTH, end_ids=()
    )
    assert [answer.ids for answer in found] == truths


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_end_leave_the_batch(method):
    target, draft, truths = case("t5")
    ends = [truths[1][9]]
    found = generate_batch(
        METHODS[method](target, draft), PROMPTS, max_new_tokens=LENGTH, end_ids=ends
    )
    expected = [transformers_answer(target, p, LENGTH, eos_token_id=ends) for p in PROMPTS]
    assert [answer.ids for answer in found] == expected
    assert len({len(ids) for ids in expected}) > 2, "all rows ended together"
    reasons = ["stop" if ids[-1] in ends else "length" for ids in expected]
    assert [answer.finish_reason for answer in found] == reasons


@pytest.mark.parametrize("method", METHODS)
def test_a_cap_cuts_blocks_to_the_token(method):
    target, draft, truths = case("t5")
    for cap in (0, 1, 2, 3, 4, 5, 9):
        found = generate(METHODS[method](target, draft), PROMPTS[0], max_new_tokens=cap, end_ids=())
        assert found.ids == truths[0][:cap]


@pytest.mark.parametrize("method", METHODS)
def test_processors_read_the_answer_and_the_start_token_alone(method):
    target, draft, _ = case("t5")
    banned = [3, 4]
    sampling = Sampling(repetition_penalty=1.7, banned_ids=tuple(banned))
    found = generate_batch(
        METHODS[method](target, draft), PROMPTS, max_new_tokens=20, end_ids=(), sampling=sampling
    )
    expected = [
        transformers_answer(
            target, prompt, 20, repetition_penalty=1.7, bad_words_ids=[[i] for i in banned]
        )
        for prompt in PROMPTS
    ]
    assert [answer.ids for answer in found] == expected


def test_a_tree_with_siblings():
    """The bias goes by depth, so candidates side by side lie at the same place."""
    target, _, truths = case("t5-v1.1")
    heads = untrained_heads(target.lm_head.weight, num_heads=3)  # pyright: ignore
    generator = torch.Generator().manual_seed(2)
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    wide = [(rank,) for rank in range(30)]
    tree = make_tree([*wide, *((0, rank) for rank in range(9)), (1, 0), (0, 0, 0)], num_heads=3)
    found = generate_batch(Medusa(target, heads, tree), PROMPTS, max_new_tokens=LENGTH, end_ids=())
    assert [answer.ids for answer in found] == truths
    assert sum(sum(answer.accepted) for answer in found) > 0


def test_a_decoder_deeper_than_the_encoder():
    """There transformers lacks room in its cache, so it has to read everything anew each time."""
    target = make_seq2seq(num_layers=1)
    draft = noisy(target, 0.01)
    for method in METHODS.values():
        found = generate(method(target, draft), PROMPTS[0], max_new_tokens=12, end_ids=())
        assert found.ids == transformers_answer(target, PROMPTS[0], 12, use_cache=False)
