"""Where an answer ends, inside a block of accepted tokens as if one token came at a time."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from medusa_train.errors import DataError

FinishReason = Literal["stop", "length"]


class StopStrings:
    """Strings that end an answer once its text holds one, across any borders of tokens."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """Look for `strings` in what `decode` makes of an answer's last tokens.

        Raises:
            DataError: if a string is empty, or one is given in place of a list.
        """
        if isinstance(strings, str):
            raise DataError(f"stop strings must be a list, got the string {strings!r}: use [...]")
        if any(not string for string in strings):
            raise DataError("a stop string is empty, which every answer holds; leave it out")
        self._strings, self._decode = tuple(strings), decode
        self._longest = max((len(string) for string in strings), default=0)
        # A token has a byte at least; a few more, since a character may begin in an earlier one
        self._window = max((len(string.encode()) for string in strings), default=0) + 8

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the last token of an answer has completed one of them."""
        if not self._strings:
            return False
        window = self._window
        # Special tokens have no text: look further back where they stand
        while window < len(ids) and len(self._decode(list(ids[-window:-1]))) < self._longest:
            window *= 2
        text = self._decode(list(ids[-window:]))
        return any(string in text for string in self._strings)


def cut_block(
    block: Sequence[int],
    *,
    room: int,
    end_ids: Collection[int],
    before: Sequence[int] = (),
    stop: StopStrings | None = None,
) -> tuple[list[int], FinishReason | None]:
    """The part of a block that belongs to the answer, and why the answer ends if it does.

    Args:
        block: tokens that one step emits, in order.
        room: how many tokens the answer may still take, at least 1.
        end_ids: ids that end an answer; the first one is kept as its last token.
        before: the answer so far.
        stop: strings that end it; the token that completes one is kept as its last.

    Returns:
        The kept tokens, and `stop` (an end id or a string), `length` (no room left) or None.
    """
    for i, token in enumerate(block[:room]):
        if token in end_ids or (stop and stop.reached([*before, *block[: i + 1]])):
            return list(block[: i + 1]), "stop"
    return list(block[:room]), "length" if len(block) >= room else None
