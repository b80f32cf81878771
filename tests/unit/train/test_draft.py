from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from training_case import CPU, make_backbone, make_rows

from medusa_train.model.draft import cut_draft
from medusa_train.train.draft import DraftObjective

MAP = torch.arange(0, 320, 3)


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


@pytest.mark.parametrize("token_map", [None, MAP])
def test_the_draft_loss_is_that_of_a_language_model(backbone, token_map):
    draft = cut_draft(backbone, 2, token_map, device=CPU)
    objective = DraftObjective(draft, compute_dtype=torch.float32, device=CPU)
    rows = make_rows(4)
    expected, count = 0.0, 0
    for row in rows:  # one at a time: padding must not matter
        logits = backbone.model(input_ids=torch.tensor([row.ids])).logits[0]
        if token_map is not None:
            logits = logits[:, token_map]
        for t in range(1, len(row.ids)):
            target = row.ids[t]
            if token_map is not None:
                place = (token_map == target).nonzero()
                if not len(place):
                    continue
                target = int(place)
            if row.mask[t]:
                expected += F.cross_entropy(logits[t - 1], torch.tensor(target)).item()
                count += 1
    batch = objective.batch(rows)
    assert objective(batch).item() == pytest.approx(expected, rel=1e-5)
    assert objective.target_counts(rows).item() == count
    measured = objective.measure(batch, lambda module: nullcontext())
    assert measured.losses.item() == pytest.approx(expected, rel=1e-5)
    assert measured.counts.item() == count
    assert 0 <= objective.score(measured) <= 1


def test_draft_products_in_bfloat16_train_float32_weights(backbone):
    draft = cut_draft(backbone, 1, None, device=CPU)
    objective = DraftObjective(draft, compute_dtype=torch.bfloat16, device=CPU)
    objective(objective.batch(make_rows(2))).sum().backward()
    for parameter in draft.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.abs().sum() > 0
