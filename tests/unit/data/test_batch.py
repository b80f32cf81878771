"""What a training step reads: targets by hand, and which rows come when.

Legend: K heads, P positions.
"""

import pytest
import torch
from training_case import make_backbone, make_heads

from medusa_train.data.batch import (
    head_batch,
    row_targets,
    step_rows,
    steps_per_epoch,
    token_batch,
)
from medusa_train.data.hidden_states import online_source
from medusa_train.data.rows import Row
from medusa_train.errors import ConfigError
from medusa_train.ops.loss import IGNORE

CPU = torch.device("cpu")


def make_row(ids: list[int], mask: list[int]) -> Row:
    return Row(
        id="r",
        kind="",
        prompt="",
        answer="",
        ids=ids,
        mask=[bool(own) for own in mask],
        finish_reason="stop",
    )


def test_head_k_learns_the_models_own_token_k_plus_2_places_on():
    row = make_row([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])

    targets = row_targets(row, 2)

    assert targets.tolist() == [
        [12, 13, 14, IGNORE, IGNORE],
        [13, 14, IGNORE, IGNORE, IGNORE],
    ]
    assert row_targets(row, 1, first=1).tolist() == [[IGNORE, 12, 13, 14, IGNORE]]


def test_a_tokens_own_prompt_is_no_target_even_between_answers():
    row = make_row([10, 11, 12, 13, 14, 15], [0, 1, 0, 1, 1, 0])

    assert row_targets(row, 1).tolist() == [[IGNORE, 13, 14, IGNORE, IGNORE, IGNORE]]


@pytest.mark.parametrize(
    ("prompt", "answer", "teaching"),
    [
        (4, 3, [[3, 4, 5], [2, 3, 4], [1, 2, 3]]),
        (1, 4, [[0, 1, 2, 3], [0, 1, 2], [0, 1]]),
    ],
)
def test_a_position_teaches_if_what_lies_ahead_is_the_models_own(prompt, answer, teaching):
    """The end of the prompt and the stop token included; the base LM head first, then two heads."""
    ids = [50 + t for t in range(prompt + answer)]
    row = make_row(ids, [0] * prompt + [1] * answer)

    targets = row_targets(row, 3, first=1).tolist()

    for ahead, (line, positions) in enumerate(zip(targets, teaching, strict=True), start=1):
        found = {t: token for t, token in enumerate(line) if token != IGNORE}
        assert found == {t: 50 + t + ahead for t in positions}


def test_a_head_batch_holds_the_positions_that_teach_and_their_states():
    backbone = make_backbone()
    heads = make_heads(backbone, num_heads=2)
    rows = [make_row([10, 11, 12, 13, 14], [0, 0, 1, 1, 1]), make_row([20, 21, 22], [0, 1, 1])]

    batch = head_batch(rows, online_source(backbone.hidden_states, backbone.device), heads)

    assert batch.targets.tolist() == [[12, 13, 14, 22], [13, 14, IGNORE, IGNORE]]
    first, second = (
        backbone.hidden_states(torch.tensor([r.ids]), torch.ones(1, len(r.ids), dtype=torch.bool))
        for r in rows
    )
    expected = torch.cat([first[0, :3], second[0, :1]])
    torch.testing.assert_close(batch.hidden, expected)


def test_targets_are_ids_of_a_reduced_vocabulary_where_it_has_them():
    backbone = make_backbone()
    heads = make_heads(backbone, num_heads=2, lm_head="reduced", token_map=torch.tensor([12, 14]))
    row = make_row([10, 11, 12, 13, 14], [0, 0, 1, 1, 1])

    batch = head_batch([row], online_source(backbone.hidden_states, backbone.device), heads)

    assert batch.targets.tolist() == [[0, IGNORE, 1], [IGNORE, 1, IGNORE]]


def test_an_answer_too_short_for_any_head_teaches_nothing():
    backbone = make_backbone()
    row = make_row([10, 11], [0, 1])

    batch = head_batch(
        [row], online_source(backbone.hidden_states, backbone.device), make_heads(backbone)
    )

    assert batch.hidden.shape == (0, 16)
    assert batch.targets.shape == (3, 0)


def test_a_token_batch_is_padded_on_the_right_and_padding_is_no_target():
    batch = token_batch([make_row([0, 1, 2, 3], [0, 1, 1, 1]), make_row([5, 0], [0, 1])], CPU)

    assert batch.ids.tolist() == [[0, 1, 2, 3], [5, 0, 0, 0]]
    assert batch.attend.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, 3, IGNORE], [0, IGNORE, IGNORE, IGNORE]]


@pytest.mark.parametrize(("rows", "size", "steps"), [(8, 4, 2), (9, 4, 2), (4, 4, 1), (11, 3, 3)])
def test_steps_per_epoch(rows, size, steps):
    assert steps_per_epoch(rows, size) == steps


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ConfigError, match=r"batch_size=4, but there are only 3 training rows"):
        steps_per_epoch(3, 4)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order():
    steps = [step_rows(step, num_rows=8, batch_size=4, seed=0) for step in range(6)]
    epochs = [steps[e] + steps[e + 1] for e in (0, 2, 4)]

    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_rows_of_a_step_depend_on_the_step_and_the_seed_alone():
    state = torch.random.get_rng_state()
    first = step_rows(5, num_rows=100, batch_size=10, seed=1)

    assert first == step_rows(5, num_rows=100, batch_size=10, seed=1)
    assert first != step_rows(5, num_rows=100, batch_size=10, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_rows_left_over_in_one_epoch_have_their_turn_in_another():
    seen = {r for step in range(12) for r in step_rows(step, num_rows=7, batch_size=4, seed=0)}

    assert seen == set(range(7))
