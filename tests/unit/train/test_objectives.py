from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from training_case import CPU, make_backbone, make_heads, make_rows

from medusa_train.data.hidden_states import online_source
from medusa_train.data.rows import Row
from medusa_train.model.draft import cut_draft
from medusa_train.ops.loss import IGNORE
from medusa_train.train.objectives import (
    COUNT,
    LOSS,
    TOP1,
    TOP5,
    DraftObjective,
    Medusa1Objective,
)

MAP = torch.arange(0, 320, 3)


def gather(module):
    return nullcontext()


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


def medusa1(backbone, dtype=torch.float32, **heads):
    built = make_heads(backbone, **heads)
    shared = backbone.lm_head.weight if built.shape.lm_head == "shared" else None
    return Medusa1Objective(
        built,
        online_source(backbone),
        shared_lm_head=shared,
        head_weight=0.8,
        compute_dtype=dtype,
    )


KINDS = [
    {"lm_head": "own"},
    {"lm_head": "own", "num_layers": 0},
    {"lm_head": "shared"},
    {"lm_head": "reduced", "token_map": MAP},
]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_rows_are_the_counts_of_their_batch(backbone, kind):
    objective, rows = medusa1(backbone, **kind), make_rows(6)
    batch = objective.batch(rows)
    assert objective.target_counts(rows).tolist() == (batch.targets != IGNORE).sum(1).tolist()
    if "token_map" not in kind:
        assert (batch.targets != IGNORE).any(dim=0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_loss_is_the_trained_loss(backbone, kind, dtype):
    objective = medusa1(backbone, dtype, **kind)
    batch = objective.batch(make_rows(4))
    found = objective.measure(batch, gather)
    expected = objective(batch).detach().double()
    torch.testing.assert_close(
        found[LOSS], expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0
    )
    assert (found[TOP1] <= found[TOP5]).all()
    assert (found[TOP5] <= found[COUNT]).all()
    assert found[COUNT].tolist() == objective.target_counts(make_rows(4)).tolist()


def test_hits_are_those_of_a_sort(backbone):
    objective = medusa1(backbone)
    batch = objective.batch(make_rows(30))
    targets = batch.targets[0]
    logits = batch.hidden @ backbone.lm_head.weight.T
    best = logits.topk(5, dim=-1).indices
    known = targets != IGNORE
    found = objective.measure(batch, gather)
    assert found[TOP1, 0] == (best[known, 0] == targets[known]).sum()
    assert found[TOP5, 0] == (best[known] == targets[known, None]).sum() > 0


def test_only_heads_are_parameters(backbone):
    names = [name for name, _ in medusa1(backbone, lm_head="shared").named_parameters()]
    assert all(name.startswith("heads.heads.") and "lm_head" not in name for name in names)
    assert len(names) == 3 * 2


def test_weights_fall_by_head(backbone):
    assert medusa1(backbone).weights == pytest.approx((1.0, 0.8, 0.64))


def test_losses_are_made_one_at_a_time(backbone):
    objective = medusa1(backbone)
    calls = []
    for head in objective.heads.heads:
        head.register_forward_hook(lambda *_: calls.append(1))
    losses = objective.losses(objective.batch(make_rows(2)))
    next(losses)
    assert len(calls) == 1


def test_rows_without_a_target_cost_nothing(backbone):
    row = Row(
        id="short",
        kind="",
        prompt="",
        answer="",
        ids=[1, 2],
        mask=[False, True],
        finish_reason="stop",
    )
    objective = medusa1(backbone)
    batch = objective.batch([row])
    assert objective.target_counts([row]).tolist() == [0, 0, 0]
    total = objective(batch)
    total.sum().backward()
    assert total.tolist() == [0, 0, 0]
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in objective.parameters())
    assert objective.measure(batch, gather).abs().sum() == 0


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
    measured = objective.measure(batch, gather)[:, 0]
    assert measured[LOSS].item() == pytest.approx(expected, rel=1e-5)
    assert measured[COUNT] == count


def test_draft_products_in_bfloat16_train_float32_weights(backbone):
    draft = cut_draft(backbone, 1, None, device=CPU)
    objective = DraftObjective(draft, compute_dtype=torch.bfloat16, device=CPU)
    objective(objective.batch(make_rows(2))).sum().backward()
    for parameter in draft.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.abs().sum() > 0


def test_training_mode_is_never_on(backbone):
    objective = medusa1(backbone)
    assert not objective.train().training
