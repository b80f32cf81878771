"""Hidden states: stored ones equal a forward of the backbone, and which of the two is used."""

from dataclasses import replace

import pytest
import torch
from training_case import make_backbone, make_rows

from medusa_train.data.hidden_states import (
    cached_source,
    choose_source,
    online_source,
    padded,
)
from medusa_train.data.rows import LEAD, part_path, read_split, write_part
from medusa_train.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


@pytest.fixture
def stored(tmp_path, backbone):
    """Rows with the states of a forward, one marked so that it is known where states come from."""
    rows = make_rows(5)
    states = online_source(backbone.hidden_states, backbone.device)(rows)
    states[0] = states[0] + 1
    write_part(part_path(tmp_path, 0), rows, states)
    return read_split(tmp_path)


def test_states_do_not_depend_on_the_other_rows_of_a_batch(backbone):
    rows = make_rows(6)
    source = online_source(backbone.hidden_states, backbone.device)

    for row, together in zip(rows, source(rows), strict=True):
        [alone] = source([row])
        assert together.shape == (len(row.ids) - 1 - row.states_start, 16)
        torch.testing.assert_close(together, alone)


def test_stored_states_are_those_of_a_forward(backbone, stored):
    fresh = online_source(backbone.hidden_states, backbone.device)(stored)
    kept = cached_source(CPU)(stored)

    assert torch.equal(kept[0], fresh[0] + 1)
    for a, b in zip(kept[1:], fresh[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("mode", "num_heads", "from_disk"),
    [
        ("auto", 3, True),
        ("cached", 3, True),
        ("online", 3, False),
        ("auto", LEAD - 1, True),
        ("auto", LEAD, False),
    ],
)
def test_where_states_come_from(backbone, stored, mode, num_heads, from_disk):
    source = choose_source(
        mode,
        stored,
        backbone.hidden_states,
        num_heads=num_heads,
        device=backbone.device,
        stage="medusa1",
    )

    fresh = online_source(backbone.hidden_states, backbone.device)(stored[:1])[0]
    torch.testing.assert_close(source(stored[:1])[0], fresh + 1 if from_disk else fresh)


def test_auto_without_stored_states_runs_the_backbone(backbone):
    rows = make_rows(2)

    source = choose_source(
        "auto",
        rows,
        backbone.hidden_states,
        num_heads=3,
        device=backbone.device,
        stage="medusa1",
    )

    assert torch.equal(
        source(rows)[1], online_source(backbone.hidden_states, backbone.device)(rows)[1]
    )


def test_cached_states_that_cannot_be_had_are_refused_with_the_reason(backbone, stored):
    with pytest.raises(
        ConfigError, match=f"num_heads={LEAD}, but they serve up to {LEAD - 1} heads"
    ):
        choose_source(
            "cached",
            stored,
            backbone.hidden_states,
            num_heads=LEAD,
            device=backbone.device,
            stage="medusa1",
        )
    some = [*stored, replace(stored[0], part=None)]
    with pytest.raises(
        ConfigError, match=r"some rows have none: use medusa1\.hidden_states=online"
    ):
        choose_source(
            "cached",
            some,
            backbone.hidden_states,
            num_heads=3,
            device=backbone.device,
            stage="medusa1",
        )


def test_padding_is_known_by_position_and_not_by_id():
    rows = [replace(make_rows(1)[0], ids=ids, mask=[True] * len(ids)) for ids in ([0, 7, 0], [9])]

    ids, attend = padded(rows, CPU)

    assert ids.tolist() == [[0, 7, 0], [9, 0, 0]]
    assert attend.tolist() == [[True, True, True], [True, False, False]]
