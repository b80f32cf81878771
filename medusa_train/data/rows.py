"""Distilled rows on disk: exact token ids with a mask by position, in Parquet parts.

A split is a folder of `part-00000.parquet` files, each written whole or not at all. Beside a part
there may be `part-00000.hidden.safetensors` with the final-norm hidden states that its answers
were computed from. Text is for people; training never tokenises it again.

Legend: T tokens of a row, P positions with a stored state, D hidden size, R rows of a part.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.errors import DataError

# States are stored from this many positions before the answer on, so that each of up to LEAD - 1
# heads (more than a config allows) finds the prompt positions whose targets lie in the answer.
LEAD = 17

_INSTEAD = "train with medusa1.hidden_states=online (or medusa2's), or distill again"

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("kind", pa.string()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt with the model's answer."""

    id: str
    kind: str
    prompt: str
    answer: str
    ids: list[int]  # [T]
    mask: list[bool]  # True where the token is the model's own, [T]
    finish_reason: str  # "stop" or "length"
    part: Path | None = None
    index: int = 0  # place in the part

    @cached_property
    def answer_ids(self) -> list[int]:
        """The model's own tokens, in order."""
        return [token for token, own in zip(self.ids, self.mask, strict=True) if own]

    @property
    def answer_start(self) -> int:
        """Position of the first token of the model's own; T if there is none."""
        return self.mask.index(True) if True in self.mask else len(self.mask)

    @property
    def states_start(self) -> int:
        """First position whose hidden state is stored."""
        return max(0, self.answer_start - LEAD)


def part_path(split: Path, index: int) -> Path:
    """Where the rows of a part lie."""
    return split / f"part-{index:05d}.parquet"


def hidden_path(part: Path) -> Path:
    """Where the hidden states of a part lie."""
    return part.with_suffix(".hidden.safetensors")


def write_part(
    path: Path, rows: Sequence[Row], hidden: Sequence[Tensor] | None, *, seconds: float = 0.0
) -> None:
    """Write a part; it counts as present only once its Parquet file is, which comes last.

    Args:
        path: as `part_path` gives it.
        rows: at least one.
        hidden: for each row the states of positions `row.states_start ... T - 2`, [P, D].
        seconds: what the part cost.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if hidden is not None:
        offsets = torch.tensor([0] + [len(states) for states in hidden]).cumsum(0)
        tensors = {"hidden": torch.cat(list(hidden)).contiguous(), "offsets": offsets}
        unfinished = hidden_path(path).with_suffix(f".{os.getpid()}.part")
        save_file(tensors, unfinished)
        unfinished.replace(hidden_path(path))
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    schema = SCHEMA.with_metadata({"seconds": repr(seconds)})
    pq.write_table(pa.table(columns, schema=schema), unfinished)
    unfinished.replace(path)


def part_seconds(split: Path) -> float:
    """What all parts of a split cost together."""
    metadata = (pq.read_schema(part).metadata or {} for part in split.glob("part-*.parquet"))
    return sum(float(found.get(b"seconds", 0.0)) for found in metadata)


def read_split(
    split: Path, *, vocab_size: int | None = None, context: int | None = None
) -> list[Row]:
    """All rows of a split that say something, in the order of its parts.

    A row without a token of the model's own, or longer than `context`, is left out and counted in
    a warning.

    Args:
        split: folder of the parts.
        vocab_size: of the model that reads them: ids lie below it; None for any.
        context: tokens that the model can read at once; None for any number.

    Raises:
        DataError: if there is no part, one cannot be read, a row is malformed (file, row and field
            are named), or no row is left.
    """
    parts = sorted(split.glob("part-*.parquet"))
    if not parts:
        raise DataError(f"no rows in {split}: expected part-*.parquet files made by `distill`")
    rows = [row for part in parts for row in _read_part(part)]
    for row in rows:
        fault = _fault(row, vocab_size)
        if fault is not None:
            raise DataError(
                f"row {row.id} in {row.part} (number {row.index}): {fault}; distill again"
            )
    return _left(rows, split, context)


def _read_part(part: Path) -> list[Row]:
    try:
        table = pq.read_table(part, schema=SCHEMA)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{part} cannot be read ({reason}); delete the distill folder") from None
    return [Row(**row, part=part, index=i) for i, row in enumerate(table.to_pylist())]


def _fault(row: Row, vocab_size: int | None) -> str | None:
    """What is wrong with a row, with the field it is in; None if nothing is."""
    empty = [name for name in SCHEMA.names if getattr(row, name) is None]
    if empty:
        return f"{empty[0]} is missing"
    if not row.ids:
        return "ids is empty"
    if len(row.mask) != len(row.ids):
        return f"mask has {len(row.mask)} places, expected one for each of the {len(row.ids)} ids"
    if None in row.ids or None in row.mask:
        return "ids and mask must not have gaps"
    if row.mask[0]:
        return "mask says that the first token is the model's own, but no prompt comes before it"
    size = 2**31 if vocab_size is None else vocab_size
    if min(row.ids) < 0 or max(row.ids) >= size:
        place, odd = next((t, i) for t, i in enumerate(row.ids) if not 0 <= i < size)
        return (
            f"ids has {odd} at token {place}, expected 0 to {size - 1}, the vocabulary of the "
            "model: the rows were made for another one, or edited"
        )
    return None


def _left(rows: Sequence[Row], split: Path, context: int | None) -> list[Row]:
    """The rows that a model can read and learn from; the others are counted by their reason."""
    left, out, counts = [], [], Counter[str]()
    for row in rows:
        reason = None
        if True not in row.mask:
            reason = "without a token of the model's own"
        elif context is not None and len(row.ids) > context:
            reason = f"longer than the model's context of {context} tokens"
        (left if reason is None else out).append(row)
        counts.update([reason] if reason else [])
    why = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "it has none"
    if not left:
        raise DataError(f"no row of {split} can be used ({why}); distill again")
    if out:
        where = f"the first is {out[0].id} in {out[0].part}"
        log.warning("%d of %d rows are left out (%s): %s", len(out), len(rows), why, where)
    return left


class HiddenFiles:
    """Stored hidden states of rows, read from disk only where asked for."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[object, list[int]]] = {}

    def __call__(self, row: Row) -> Tensor:
        """States of positions `row.states_start ... T - 2`, [P, D]."""
        assert row.part is not None
        path = hidden_path(row.part)
        if path not in self._open:
            try:
                stored = safe_open(path, framework="pt")
                self._open[path] = (stored, stored.get_tensor("offsets").tolist())
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"hidden states {path} cannot be read ({error}); {_INSTEAD}"
                ) from None
        stored, offsets = self._open[path]
        begin, *ends = offsets[row.index : row.index + 2] or [0]
        wanted = len(row.ids) - 1 - row.states_start
        if [end - begin for end in ends] != [wanted]:
            raise DataError(
                f"row {row.id} in {row.part} (number {row.index}) needs {wanted} hidden states, of "
                f"which {path} has another number: one of the files was changed; {_INSTEAD}"
            )
        return stored.get_slice("hidden")[begin : begin + wanted]  # pyright: ignore


def has_hidden(rows: Sequence[Row]) -> bool:
    """Whether every row has stored hidden states."""
    parts = {row.part for row in rows}
    return all(part is not None and hidden_path(part).exists() for part in parts)
