"""On the device, in fp32: every method's greedy answer is that of `transformers.generate`."""

import pytest
import torch
from decoding_case import (
    DEPTH,
    TREES,
    OracleHeads,
    answer_of,
    make_llama,
    make_tree,
    mixed_ranks,
    random_ids,
    transformers_greedy,
)

from medusa_train.decode import DraftModel, Medusa, Plain
from medusa_train.model.language_model import LanguageModel

pytestmark = pytest.mark.gpu

PROMPT = random_ids(40)
LENGTH = 64
BEYOND = DEPTH * 2 + 2  # what heads may guess at when the answer is already cut


@pytest.fixture(scope="module", params=["tiny", "large"])
def case(request, device):
    """A model, the true answer, and text that goes on behind it."""
    from bench.gpu import SIZES

    settings = SIZES[device.type] if request.param == "large" else {}
    with device:
        backbone = make_llama(**settings)
    assert (backbone.device.type, backbone.dtype) == (device.type, torch.float32)
    text = transformers_greedy(backbone, PROMPT, LENGTH + BEYOND)
    assert len(set(text)) > 5, "an answer that repeats one token would show little"
    return backbone, text[:LENGTH], PROMPT + text


def test_products_are_not_rounded_to_tf32(device):
    a = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64)
    torch.testing.assert_close((a @ a).double(), a.double() @ a.double(), rtol=1e-5, atol=1e-5)


def test_plain(case):
    backbone, truth, _ = case
    assert answer_of(Plain(backbone), PROMPT, LENGTH).ids == truth


@pytest.mark.parametrize("tree", TREES)
def test_medusa(case, tree):
    backbone, truth, text = case
    heads = OracleHeads(backbone, text, mixed_ranks(len(text)))
    found = answer_of(Medusa(backbone, heads, make_tree(TREES[tree])), PROMPT, LENGTH)  # pyright: ignore
    assert found.ids == truth
    assert len(set(found.accepted)) > 1


@pytest.mark.parametrize("layers", [1, 99])
def test_draft_model(case, device, layers):
    """One of the target's first layer is seldom right, one of all its layers always is."""
    from bench.decode import cut_layers

    backbone, truth, _ = case
    with device:
        model = cut_layers(backbone.model, layers)
    draft = LanguageModel(model.get_decoder(), model.lm_head, valid_ids=backbone.valid_ids)
    found = answer_of(DraftModel(backbone, draft, gamma=4), PROMPT, LENGTH)
    assert found.ids == truth
    if layers == 99:
        assert set(found.accepted) == {4}
    else:
        assert min(found.accepted) == 0
