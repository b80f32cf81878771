"""Every method's greedy answer is that of `transformers.generate`, token for token, in fp32."""

from functools import cache

import pytest
import torch
from decoding_case import (
    DEPTH,
    FAMILIES,
    TREES,
    OracleHeads,
    answer_of,
    expected_acceptances,
    make_family,
    make_tree,
    mixed_ranks,
    noisy_draft,
    random_ids,
    transformers_greedy,
)

from medusa_train.decode import DraftModel, Medusa, Plain
from medusa_train.model.heads import untrained_heads

PROMPT = random_ids(20)
LENGTH = 48
BEYOND = DEPTH * 2 + 2  # what heads may guess at when the answer is already cut


@cache
def case(family):
    """A model, the true answer, and text that goes on behind it."""
    backbone = make_family(family)
    text = transformers_greedy(backbone, PROMPT, LENGTH + BEYOND)
    return backbone, text[:LENGTH], PROMPT + text


@pytest.mark.parametrize("family", FAMILIES)
def test_plain(family):
    backbone, truth, _ = case(family)
    assert len(set(truth)) > 5, "an answer that repeats one token would show little"
    assert answer_of(Plain(backbone), PROMPT, LENGTH).ids == truth


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_medusa_with_heads_that_are_often_right(family, tree):
    backbone, truth, text = case(family)
    laid_out = make_tree(TREES[tree])
    ranks = mixed_ranks(len(text))
    method = Medusa(backbone, OracleHeads(backbone, text, ranks), laid_out)  # pyright: ignore
    found = answer_of(method, PROMPT, LENGTH)
    assert found.ids == truth
    assert found.accepted == expected_acceptances(
        laid_out, ranks, prompt=len(PROMPT), length=LENGTH
    )


@pytest.mark.parametrize("tree", TREES)
def test_those_heads_make_every_depth_happen(tree):
    laid_out = make_tree(TREES[tree])
    ranks = mixed_ranks(len(PROMPT) + LENGTH + BEYOND)
    expected = expected_acceptances(laid_out, ranks, prompt=len(PROMPT), length=LENGTH)
    assert set(expected) == set(range(len(laid_out.ranks_by_depth) + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_medusa_with_random_heads(family):
    backbone, truth, _ = case(family)
    heads = untrained_heads(backbone.lm_head.weight, num_heads=DEPTH)  # pyright: ignore
    generator = torch.Generator().manual_seed(2)
    for parameter in heads.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    choices = [*TREES["64 nodes"], *((rank,) for rank in range(5, 30))]
    found = answer_of(Medusa(backbone, heads, make_tree(choices)), PROMPT, LENGTH)
    assert found.ids == truth
    assert sum(found.accepted) > 0


@pytest.mark.parametrize("gamma", [1, 3, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_model(family, gamma):
    backbone, truth, _ = case(family)
    method = DraftModel(backbone, noisy_draft(backbone, 0.02), gamma=gamma)
    found = answer_of(method, PROMPT, LENGTH)
    assert found.ids == truth
    assert min(found.accepted) == 0
    assert max(found.accepted) > 0


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_a_draft_model_that_is_always_right(family):
    backbone, truth, _ = case(family)
    method = DraftModel(backbone, noisy_draft(backbone, 0.0), gamma=4)
    found = answer_of(method, PROMPT, LENGTH)
    assert found.ids == truth
    assert set(found.accepted) == {4}
