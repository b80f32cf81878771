from contextlib import nullcontext

import pytest
import torch
from medusa2_case import disturb
from training_case import CPU, make_backbone, make_heads, make_rows

from medusa_train.data.hidden_states import online_source
from medusa_train.data.rows import Row
from medusa_train.evaluate.accuracy import rank_rows
from medusa_train.ops.loss import IGNORE
from medusa_train.ops.metrics import MISSED
from medusa_train.train.medusa1 import Medusa1Objective

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
        online_source(backbone.hidden_states, CPU),
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
        found.losses, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0
    )
    assert all(0 <= a <= b <= 1 for a, b in zip(found.hits(1), found.hits(5), strict=True))
    assert found.counts.tolist() == objective.target_counts(make_rows(4)).tolist()


def test_ranks_are_those_of_a_sort_where_decoding_starts_a_step(backbone):
    objective, rows = medusa1(backbone, lm_head="reduced", token_map=MAP), make_rows(30)
    found = objective.measure(objective.batch(rows), gather)
    assert len(found.ranks) == len(rows)
    seen = set()
    for row, ranks in zip(rows, found.ranks, strict=True):
        hidden = backbone.model.model(input_ids=torch.tensor([row.ids])).last_hidden_state[0]
        order = (hidden @ backbone.lm_head.weight[MAP].T).argsort(descending=True, stable=True)
        first = row.answer_start - 1
        assert ranks.shape == (3, len(row.ids) - 2 - first)
        for k in range(3):
            for i, rank in enumerate(ranks[k].tolist()):
                ahead = first + i + k + 2
                if ahead >= len(row.ids):
                    assert rank == IGNORE
                elif row.ids[ahead] % 3:
                    assert rank == MISSED
                else:
                    assert MAP[order[first + i, rank]] == row.ids[ahead]
                seen.add(rank if rank in (IGNORE, MISSED) else 0)
    assert seen == {IGNORE, MISSED, 0}


def test_training_and_evaluation_look_at_the_same_targets(backbone):
    """One convention, where the base LM head's own target is one ahead: head k's is k + 2."""
    known = torch.arange(backbone.valid_ids)  # evaluation never guesses a padding id
    objective, rows = medusa1(backbone, lm_head="reduced", token_map=known), make_rows(12)
    disturb(objective)
    measured = objective.measure(objective.batch(rows), gather)
    source = online_source(backbone.hidden_states, CPU)
    ranks = rank_rows(rows, source, objective.heads, backbone, guesses=len(known))
    assert all(torch.equal(a, b) for a, b in zip(measured.ranks, ranks, strict=True))
    assert any((rank != IGNORE).any() for rank in ranks)


def test_only_heads_are_parameters(backbone):
    names = [name for name, _ in medusa1(backbone, lm_head="shared").named_parameters()]
    assert all(name.startswith("heads.heads.") and "lm_head" not in name for name in names)
    assert len(names) == 3 * 2


def test_weights_fall_by_head(backbone):
    assert medusa1(backbone).weights(0.5) == pytest.approx((1.0, 0.8, 0.64))


def test_losses_are_made_one_at_a_time(backbone):
    objective = medusa1(backbone)
    calls = []
    for head in objective.heads.heads:
        head.register_forward_hook(lambda *_: calls.append(1))
    batch = objective.batch(make_rows(2))
    next(objective.losses(objective.trunk(batch), batch))
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
    measured = objective.measure(batch, gather)
    assert measured.means == [0, 0, 0]
    assert measured.hits(1) == [0, 0, 0]
    assert objective.score(measured) == 1


def test_training_mode_is_never_on(backbone):
    objective = medusa1(backbone)
    assert not objective.train().training
