"""Where an answer ends, inside a block of accepted tokens as if one token came at a time."""

from collections.abc import Collection, Sequence
from typing import Literal

FinishReason = Literal["stop", "length"]


def cut_block(
    block: Sequence[int], *, room: int, end_ids: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """The part of a block that belongs to the answer, and why the answer ends if it does.

    Args:
        block: tokens that one step emits, in order.
        room: how many tokens the answer may still take, at least 1.
        end_ids: ids that end an answer; the first one is kept as its last token.

    Returns:
        The kept tokens, and `stop` (an end id), `length` (no room left) or None.
    """
    for i, token in enumerate(block[:room]):
        if token in end_ids:
            return list(block[: i + 1]), "stop"
    return list(block[:room]), "length" if len(block) >= room else None
