"""Rows on disk: exact ids back, parts whole or absent, hidden states of the right row."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from medusa_train.data import rows as module
from medusa_train.data.rows import (
    LEAD,
    HiddenFiles,
    Row,
    has_hidden,
    hidden_path,
    part_path,
    part_seconds,
    read_split,
    write_part,
)
from medusa_train.errors import DataError


def make_row(name: str, prompt: int, answer: int) -> Row:
    """A row of so many prompt and answer tokens; ids tell rows apart."""
    first = ord(name) * 1000
    return Row(
        id=name,
        kind="list",
        prompt="p \u2028 ü",
        answer="",
        ids=list(range(first, first + prompt + answer)),
        mask=[False] * prompt + [True] * answer,
        finish_reason="stop",
    )


def states(row: Row) -> torch.Tensor:
    """Values that name their row and position, [P, D]."""
    places = torch.arange(row.states_start, len(row.ids) - 1).float()
    return torch.stack([places, torch.full_like(places, ord(row.id))], dim=1)


def test_rows_come_back_exactly_and_in_order(tmp_path):
    rows = [make_row("a", 3, 2), make_row("b", 1, 5)]
    write_part(part_path(tmp_path, 1), rows[:1], None, seconds=0.25)
    write_part(part_path(tmp_path, 0), rows[1:], None, seconds=0.5)

    found = read_split(tmp_path)

    assert [(r.id, r.ids, r.mask) for r in found] == [(r.id, r.ids, r.mask) for r in rows[::-1]]
    assert (found[1].prompt, found[1].kind, found[1].finish_reason) == (
        "p \u2028 ü",
        "list",
        "stop",
    )
    assert [(r.part, r.index) for r in found] == [
        (part_path(tmp_path, 0), 0),
        (part_path(tmp_path, 1), 0),
    ]
    assert part_seconds(tmp_path) == 0.75


def test_parts_are_ordinary_parquet(tmp_path):
    write_part(part_path(tmp_path, 0), [make_row("a", 3, 2)], None)

    table = pq.read_table(part_path(tmp_path, 0))

    assert table.column_names == ["id", "kind", "prompt", "answer", "ids", "mask", "finish_reason"]
    assert str(table.schema.field("ids").type) == "list<element: int32>"


def test_places_of_a_row():
    row = make_row("a", LEAD + 4, 3)

    assert row.answer_ids == row.ids[LEAD + 4 :]
    assert row.answer_start == LEAD + 4
    assert row.states_start == 4
    assert make_row("a", 3, 1).states_start == 0


def test_hidden_states_are_those_of_the_row_asked_for(tmp_path):
    first = [make_row("a", LEAD + 4, 3), make_row("b", 2, 1), make_row("c", 1, 6)]
    second = [make_row("d", 4, 4)]
    write_part(part_path(tmp_path, 0), first, [states(r) for r in first])
    write_part(part_path(tmp_path, 1), second, [states(r) for r in second])
    found = read_split(tmp_path)
    files = HiddenFiles()

    assert has_hidden(found)
    for row in reversed(found):
        assert torch.equal(files(row), states(row))


def test_some_rows_without_states_is_not_having_them(tmp_path):
    rows = [make_row("a", 2, 2)]
    write_part(part_path(tmp_path, 0), rows, [states(rows[0])])
    write_part(part_path(tmp_path, 1), rows, None)

    assert not has_hidden(read_split(tmp_path))
    assert not has_hidden(rows)


def test_a_part_counts_only_once_all_of_it_is_there(tmp_path, monkeypatch):
    rows = [make_row("a", 2, 2)]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_part(part_path(tmp_path, 0), rows, [states(rows[0])])

    assert not part_path(tmp_path, 0).exists()
    with pytest.raises(DataError, match="no rows"):
        read_split(tmp_path)


def test_a_split_without_parts_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"expected part-\*\.parquet"):
        read_split(tmp_path)


def test_a_damaged_part_is_named(tmp_path):
    path = part_path(tmp_path, 0)
    write_part(path, [make_row("a", 2, 2)], None)
    path.write_bytes(path.read_bytes()[:-8])

    with pytest.raises(DataError, match=r"part-00000\.parquet cannot be read"):
        read_split(tmp_path)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ids": []}, "ids is empty"),
        ({"ids": None}, "ids is missing"),
        ({"prompt": None}, "prompt is missing"),
        ({"mask": [False, True]}, "mask has 2 places, expected one for each of the 4 ids"),
        ({"mask": [False, True, None, True]}, "ids and mask must not have gaps"),
        ({"ids": [1, None, 3, 4]}, "ids and mask must not have gaps"),
        ({"ids": [1, 2, 3, 320]}, "ids has 320 at token 3, expected 0 to 319"),
        ({"ids": [1, -1, 3, 4]}, "ids has -1 at token 1, expected 0 to 319"),
        ({"mask": [True] * 4}, "first token is the model's own, but no prompt comes before"),
    ],
)
def test_a_malformed_row_is_named_with_its_file_and_field(tmp_path, change, fault):
    path, rows = part_path(tmp_path, 3), [make_row("\0", 2, 2) for _ in range(3)]
    rows[1] = replace(rows[1], id="odd", **change)
    write_part(path, rows, None)

    with pytest.raises(DataError) as refused:
        read_split(tmp_path, vocab_size=320)

    assert str(refused.value).startswith(f"row odd in {path} (number 1): ")
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_of_another_kind_is_named(tmp_path):
    pq.write_table(pa.table({"ids": ["one two"]}), part_path(tmp_path, 0))

    with pytest.raises(DataError, match=r"part-00000\.parquet cannot be read \(") as refused:
        read_split(tmp_path)

    assert "\n" not in str(refused.value)


def test_rows_that_are_too_long_or_without_an_answer_are_left_out_and_counted(tmp_path, caplog):
    fits, long, silent = make_row("a", 4, 60), make_row("b", 200, 2), make_row("c", 3, 0)
    write_part(part_path(tmp_path, 0), [long, fits], None)
    write_part(part_path(tmp_path, 1), [silent, make_row("d", 62, 3)], None)

    left = read_split(tmp_path, context=64)

    assert [(row.id, row.index) for row in left] == [("a", 1)]
    assert "3 of 4 rows are left out" in caplog.text
    assert "2 longer than the model's context of 64 tokens" in caplog.text
    assert "1 without a token of the model's own" in caplog.text
    assert f"the first is b in {part_path(tmp_path, 0)}" in caplog.text


def test_where_no_row_is_left_it_is_one_error_with_the_reasons(tmp_path):
    write_part(part_path(tmp_path, 0), [make_row("b", 200, 2), make_row("c", 3, 0)], None)

    with pytest.raises(DataError) as refused:
        read_split(tmp_path, context=64)

    assert str(refused.value) == (
        f"no row of {tmp_path} can be used (1 longer than the model's context of 64 tokens, "
        "1 without a token of the model's own); distill again"
    )


def test_hidden_states_beside_rows_that_were_changed_are_refused(tmp_path):
    rows = [make_row("a", 2, 2), make_row("b", 2, 3)]
    write_part(part_path(tmp_path, 0), rows, [states(r) for r in rows])
    more = [rows[0], make_row("b", 2, 9), make_row("c", 2, 2)]
    write_part(part_path(tmp_path, 0), more, None)
    first, *others = read_split(tmp_path)

    assert torch.equal(HiddenFiles()(first), states(first))
    for row in others:
        with pytest.raises(
            DataError, match=rf"row {row.id} in .* needs .* was changed; train with"
        ):
            HiddenFiles()(row)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x" * 20), lambda p: p.unlink()])
def test_damaged_hidden_states_are_named_with_the_way_out(tmp_path, damage):
    row = make_row("a", 2, 2)
    write_part(part_path(tmp_path, 0), [row], [states(row)])
    damage(hidden_path(part_path(tmp_path, 0)))

    with pytest.raises(DataError, match=r"hidden\.safetensors cannot be read.*=online"):
        HiddenFiles()(read_split(tmp_path)[0])
