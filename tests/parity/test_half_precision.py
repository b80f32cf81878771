"""In 16 bits the shape of a forward may change an answer, but only where two tokens nearly tie.

In fp32 no shape does (test_greedy_exactness).
"""

from functools import cache

import pytest
import torch
from decoding_case import (
    DEPTH,
    TREES,
    answer_of,
    make_family,
    make_tree,
    noisy_draft,
    random_ids,
    transformers_greedy,
)

from medusa_train.decode import DraftModel, Lookup, Medusa, Plain
from medusa_train.evaluate.near_ties import NEAR, gap_of, spacings
from medusa_train.evaluate.statistics import first_difference
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import untrained_heads

LENGTH = 40
PROMPTS = [random_ids(length, seed=length) for length in (3, 11, 30)]
DTYPES = [torch.bfloat16, torch.float16]


@cache
def case(family, dtype):
    made = make_family(family)
    backbone = Backbone(made.model.to(dtype), made.tokenizer, name=made.name)  # pyright: ignore
    heads = untrained_heads(backbone.lm_head.weight.float(), num_heads=DEPTH)  # pyright: ignore
    return backbone, heads.to(dtype), [answer_of(Plain(backbone), p, LENGTH).ids for p in PROMPTS]


def check(method, backbone, truths):
    for i, prompt in enumerate(PROMPTS):
        check_answer(backbone, i, answer_of(method, prompt, LENGTH).ids, truths[i])


def check_answer(backbone, i, found, truth):
    """It is plain decoding's up to a tie between two tokens; what follows one is another text."""
    assert len(found) == LENGTH
    place = first_difference(found, truth)
    if place is not None:
        gap = gap_of(backbone, {"": PROMPTS[i]})("", truth[:place], found[place], truth[place])
        assert gap <= NEAR, (place, gap)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_medusa(family, dtype, tree):
    backbone, heads, truths = case(family, dtype)
    check(Medusa(backbone, heads, make_tree(TREES[tree])), backbone, truths)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_draft_model(family, dtype):
    backbone, _, truths = case(family, dtype)
    check(DraftModel(backbone, noisy_draft(backbone, 0.01), gamma=4), backbone, truths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lookup(dtype):
    backbone, _, truths = case("llama", dtype)
    check(Lookup(backbone, gamma=4, longest_ngram=1), backbone, truths)


@torch.no_grad()
def ranked(backbone, text):
    """After each token of a text: the gap of the best two in spacings, and the best twenty."""
    ids = torch.tensor([text])
    hidden = backbone.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[0]
    best = backbone.logits(hidden).float().topk(20)
    rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [(spacings(*logits[:2], backbone.dtype), tokens) for logits, tokens in rows]


@pytest.mark.parametrize("dtype", DTYPES)
def test_most_places_are_no_ties_and_at_a_tie_not_any_token_will_do(dtype):
    backbone, _, truths = case("llama", dtype)
    ties = 0
    for i, (prompt, truth) in enumerate(zip(PROMPTS, truths, strict=True)):
        for place, (gap, tokens) in enumerate(ranked(backbone, prompt + truth)[len(prompt) - 1 :]):
            if gap > NEAR or place == LENGTH:
                continue
            ties += 1
            for token in tokens[:2]:
                check_answer(backbone, i, [*truth[:place], token, *truth[place + 1 :]], truth)
            with pytest.raises(AssertionError):
                check_answer(backbone, i, [*truth[:place], tokens[-1], *truth[place + 1 :]], truth)
    assert 0 < ties < len(PROMPTS) * LENGTH / 2


def test_a_model_that_is_moved_between_two_answers():
    """Once it is wrapped again, nothing of what was laid out before is used."""
    made = make_family("llama")
    truth = [transformers_greedy(made, prompt, LENGTH) for prompt in PROMPTS]
    assert answers(made) == truth
    moved = Backbone(made.model.to(torch.bfloat16), made.tokenizer, name="moved")  # pyright: ignore
    _, _, low = case("llama", torch.bfloat16)
    assert answers(moved) == low != truth
    back = Backbone(moved.model.float(), made.tokenizer, name="back")  # pyright: ignore
    assert answers(back) == [transformers_greedy(back, prompt, LENGTH) for prompt in PROMPTS]


def answers(backbone):
    return [answer_of(Plain(backbone), prompt, LENGTH).ids for prompt in PROMPTS]
