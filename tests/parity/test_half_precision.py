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
)

from medusa_train.decode import DraftModel, Medusa, Plain
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import untrained_heads

LENGTH = 40
PROMPTS = [random_ids(length, seed=length) for length in (3, 11, 30)]
# Largest gap between the two best logits that counts as a tie, in units of their last place
UNITS = 16
PLACES = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@cache
def case(family, dtype):
    made = make_family(family)
    backbone = Backbone(made.model.to(dtype), made.tokenizer, name=made.name)  # pyright: ignore
    heads = untrained_heads(backbone.lm_head.weight.float(), num_heads=DEPTH)  # pyright: ignore
    return backbone, heads.to(dtype), [answer_of(Plain(backbone), p, LENGTH).ids for p in PROMPTS]


def gap(backbone, text):
    """Between the two best logits after a text, in units of the last place of the best."""
    ids = torch.tensor([text])
    with torch.no_grad():
        hidden = backbone.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[0, -1]
        best, second = backbone.logits(hidden).float().topk(2).values.tolist()
    return (best - second) / (max(abs(best), 1e-3) * PLACES[backbone.dtype])


def check(method, backbone, truths):
    """Answers are plain decoding's up to a tie; what follows one is another text."""
    for prompt, truth in zip(PROMPTS, truths, strict=True):
        found = answer_of(method, prompt, LENGTH).ids
        assert len(found) == LENGTH
        pairs = enumerate(zip(found, truth, strict=True))
        parting = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if parting is not None:
            assert gap(backbone, prompt + truth[:parting]) <= UNITS


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", PLACES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_medusa(family, dtype, tree):
    backbone, heads, truths = case(family, dtype)
    check(Medusa(backbone, heads, make_tree(TREES[tree])), backbone, truths)


@pytest.mark.parametrize("dtype", PLACES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_draft_model(family, dtype):
    backbone, _, truths = case(family, dtype)
    check(DraftModel(backbone, noisy_draft(backbone, 0.01), gamma=4), backbone, truths)


@pytest.mark.parametrize("dtype", PLACES)
def test_most_places_are_no_ties(dtype):
    backbone, _, truths = case("llama", dtype)
    gaps = [
        gap(backbone, prompt + truth[:place])
        for prompt, truth in zip(PROMPTS, truths, strict=True)
        for place in range(LENGTH)
    ]
    assert sum(found <= UNITS for found in gaps) < len(gaps) / 2


def test_a_model_that_is_moved_between_two_answers():
    """Once it is wrapped again, nothing of what was laid out before is used."""
    made = make_family("llama")
    before = answer_of(Plain(made), PROMPTS[0], 8).ids
    moved = Backbone(made.model.to(torch.bfloat16), made.tokenizer, name="moved")  # pyright: ignore
    assert [len(answer_of(Plain(moved), prompt, LENGTH).ids) for prompt in PROMPTS] == [LENGTH] * 3
    back = Backbone(moved.model.float(), made.tokenizer, name="back")  # pyright: ignore
    assert len(before) == len(answer_of(Plain(back), PROMPTS[0], 8).ids)
