"""Ranks of the right tokens among the heads' guesses, by hand and against a plain forward.

Legend: K heads, P positions.
"""

from dataclasses import replace

import pytest
import torch
from training_case import make_backbone, make_heads, make_rows

from medusa_train.data.batch import row_targets
from medusa_train.data.hidden_states import online_source
from medusa_train.evaluate.accuracy import head_accuracy, rank_rows
from medusa_train.ops.loss import IGNORE
from medusa_train.ops.metrics import MISSED


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


def noisy_heads(backbone, **shape):
    heads = make_heads(backbone, **shape)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return heads.eval().requires_grad_(False)


def by_hand(row, backbone, heads, guesses):
    """Ranks by sorting every head's logits of a forward over the whole row."""
    ids = torch.tensor([row.ids])
    hidden = backbone.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[0]
    targets = row_targets(row, len(heads))
    ranks = []
    for t in range(row.answer_start - 1, len(row.ids) - 2):
        column = []
        for k in range(len(heads)):
            logits = heads[k].logits(hidden[t : t + 1])[0]
            order = logits[: backbone.valid_ids].argsort(descending=True).tolist()
            target = int(targets[k, t])
            rank = IGNORE if target == IGNORE else order.index(target)
            column.append(rank if rank == IGNORE or rank < guesses else MISSED)
        ranks.append(column)
    return torch.tensor(ranks).T


def test_ranks_are_those_of_sorted_logits(backbone):
    heads, rows = noisy_heads(backbone), make_rows(11)

    found = rank_rows(
        rows, online_source(backbone.hidden_states, backbone.device), heads, backbone, guesses=20
    )

    assert len(found) == len(rows)
    for row, ranks in zip(rows, found, strict=True):
        assert torch.equal(ranks, by_hand(row, backbone, heads, 20))


def test_heads_over_a_reduced_vocabulary_miss_what_it_lacks(backbone):
    token_map = torch.arange(0, 200, 2)
    heads = noisy_heads(backbone, lm_head="reduced", token_map=token_map)
    rows = make_rows(4)

    found = rank_rows(
        rows, online_source(backbone.hidden_states, backbone.device), heads, backbone, guesses=100
    )

    for row, ranks in zip(rows, found, strict=True):
        targets = row_targets(row, 3)[:, row.answer_start - 1 : len(row.ids) - 2]
        inside = torch.isin(targets, token_map)
        assert (ranks[inside] < 100).all()
        assert (ranks[~inside & (targets != IGNORE)] == MISSED).all()


def test_an_answer_of_one_token_gives_no_position(backbone):
    [row] = make_rows(1)
    short = replace(row, ids=[1, 2, 3], mask=[False, False, True])

    [ranks] = rank_rows(
        [short],
        online_source(backbone.hidden_states, backbone.device),
        noisy_heads(backbone),
        backbone,
        guesses=5,
    )

    assert ranks.shape == (3, 0)


def test_accuracy_by_hand():
    ranks = [
        torch.tensor([[0, 1, 4], [MISSED, 0, IGNORE]]),
        torch.tensor([[5], [IGNORE]]),
    ]

    assert head_accuracy(ranks, 1) == pytest.approx([1 / 4, 1 / 2])
    assert head_accuracy(ranks, 5) == pytest.approx([3 / 4, 1 / 2])


def test_accuracy_without_any_target_is_zero():
    assert head_accuracy([torch.full((2, 3), IGNORE)], 1) == [0.0, 0.0]
