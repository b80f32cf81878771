"""How near to a tie two tokens were, in steps of the dtype."""

import pytest
import torch
from decoding_case import make_llama, random_ids

from medusa_train.evaluate.near_ties import gap_of, spacings


@pytest.mark.parametrize(
    ("one", "other", "dtype", "apart"),
    [
        (16.0, 16.0, torch.bfloat16, 0.0),
        (16.0, 15.875, torch.bfloat16, 1.0),  # bfloat16 has 8 bits: eps 2 ** -7
        (-16.0, -15.875, torch.bfloat16, 1.0),
        (1.0, 1.0 - 2**-23, torch.float32, 1.0),
        (0.0, 0.0, torch.float32, 0.0),
    ],
)
def test_spacings(one, other, dtype, apart):
    assert spacings(one, other, dtype) == pytest.approx(apart)


def test_the_gap_is_that_of_the_targets_logits_behind_the_shared_tokens():
    backbone, prompt, shared = make_llama(), random_ids(9), [5, 6]
    with torch.no_grad():
        logits = backbone.model(torch.tensor([prompt + shared])).logits[0, -1]
    best, second = logits[: backbone.valid_ids].topk(2).indices.tolist()
    gap = gap_of(backbone, {"p": prompt})
    expected = spacings(float(logits[best]), float(logits[second]), torch.float32)
    assert gap("p", shared, best, second) == pytest.approx(expected, rel=1e-3)
    assert gap("p", shared, second, best) == gap("p", shared, best, second)
    assert gap("p", [], best, second) != gap("p", shared, best, second)
