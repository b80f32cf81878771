"""An answer while it comes: its text as far as it is certain, who guessed it, and the numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from medusa_train.decode import Part

REPLACEMENT = "\ufffd"  # what decoding gives in place of bytes that make no character


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text that one token has completed."""

    text: str
    guessed: bool  # the token was guessed ahead and accepted


class Answer:
    """Takes the parts of a stream one by one."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Begin an answer; `decode` gives the text of token ids."""
        self.ids: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None  # None: not ended by itself
        self._text = IncrementalText(decode)
        self._steps = self._accepted = 0
        self._seconds = 0.0

    def take(self, part: Part) -> list[Piece]:
        """What a part adds to the text. A character goes to the token that completes it."""
        self.ids += part.tokens
        self.finish_reason, self._seconds = part.finish_reason, part.seconds
        if part.accepted is not None:
            self._steps += 1
            self._accepted += part.accepted
        added = [
            Piece(text=self._text.add(token), guessed=place < (part.accepted or 0))
            for place, token in enumerate(part.tokens)
        ]
        return [piece for piece in added if piece.text]

    def rest(self) -> list[Piece]:
        """What was held back, once nothing more comes."""
        text = self._text.rest()
        return [Piece(text=text, guessed=False)] if text else []

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens that a forward of the model emits after the prefill; None without any."""
        return 1 + self._accepted / self._steps if self._steps else None

    @property
    def tokens_per_second(self) -> float:
        """Prefill included."""
        return len(self.ids) / self._seconds if self._seconds else 0.0

    def numbers(self) -> str:
        """All of it in a line."""
        count, per_step = len(self.ids), self.tokens_per_step
        said = f"{count} token{'' if count == 1 else 's'} in {self._seconds:.1f} s, "
        said += f"{self.tokens_per_second:.1f} tokens/s"
        return said if per_step is None else f"{said}, {per_step:.2f} tokens per step"


class IncrementalText:
    """Text of tokens that come one by one. Characters that lack some of their bytes are held back.

    A few tokens before the new ones are decoded with them: decoders treat the first token of a
    text in another way than the same token further on, and join bytes over several tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Begin with no text."""
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0  # how many of them make text that was given out before
        self._given = 0  # characters of their text that were given out

    def add(self, token: int) -> str:
        """The text that has become certain with one more token."""
        self._ids.append(token)
        text = self._decode(self._ids)
        certain = text.rstrip(REPLACEMENT)
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        if new and certain == text:
            del self._ids[: self._known]
            self._known, self._given = len(self._ids), len(self._decode(self._ids))
        return new

    def rest(self) -> str:
        """What is held back, incomplete characters as replacement signs."""
        return self._decode(self._ids)[self._given :]
