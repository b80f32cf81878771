"""What the person sees: a terminal with colours and live numbers, or plain text in a pipe."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.text import Text

from medusa_train.chat.answer import Piece

# What would move the cursor or worse, were it printed: shown as a sign of its own, or not at all
_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    0x0D: None,
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


class Show(Protocol):
    """Takes an answer as it comes."""

    def add(self, pieces: Sequence[Piece], numbers: str) -> None:
        """More text, and the numbers as they stand."""
        ...


class Screen(Protocol):
    """Where the person asks and reads."""

    interactive: bool  # whether a person is there who can do something about an error

    def read(self, *, more: bool) -> str:
        """The next line, without its end; `more` if it goes on with the one before.

        Raises:
            EOFError: if there is none.
        """
        ...

    def note(self, text: str) -> None:
        """Say something about the chat that is no part of it."""
        ...

    def legend(self, guesser: str) -> None:
        """Say how tokens look that `guesser` has guessed."""
        ...

    def answer(self) -> contextlib.AbstractContextManager[Show]:
        """Show an answer while it is entered."""
        ...


def open_screen() -> Screen:
    """A terminal if input and output are one, else plain text. No text breaks either."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # pyright: ignore
    console = Console(highlight=False)
    if sys.stdin.isatty() and sys.stdout.isatty() and not console.is_dumb_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` a history and its keys
        return Terminal(console)
    return Plain(interactive=sys.stdin.isatty())


class Plain:
    """Lines in, answers out; what is said about them goes to standard error."""

    def __init__(self, *, interactive: bool) -> None:
        """Read and write the standard streams."""
        self.interactive = interactive

    def read(self, *, more: bool) -> str:
        """See `Screen`."""
        if self.interactive:
            sys.stderr.write(_prompt(more))
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def note(self, text: str) -> None:
        """See `Screen`."""
        sys.stderr.write(f"{text.translate(_CONTROLS)}\n")
        sys.stderr.flush()

    def legend(self, guesser: str) -> None:
        """Nothing: plain text does not tell tokens apart."""

    @contextlib.contextmanager
    def answer(self) -> Iterator["Plain"]:
        """See `Screen`."""
        try:
            yield self
        finally:
            self._write("\n")

    def add(self, pieces: Sequence[Piece], numbers: str) -> None:
        """See `Show`."""
        self._write("".join(piece.text for piece in pieces).translate(_CONTROLS))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Terminal:
    """Guessed tokens in colour, or underlined where there shall be none."""

    interactive = True

    def __init__(self, console: Console) -> None:
        """Draw on a console."""
        self._console = console
        self._guessed = (
            Style(underline=True) if console.no_color else Style(color="cyan", bold=True)
        )

    def read(self, *, more: bool) -> str:
        """See `Screen`."""
        try:
            return input(_prompt(more))
        except EOFError:
            self._console.print()  # what comes next in the terminal begins on a line of its own
            raise

    def note(self, text: str) -> None:
        """See `Screen`."""
        self._console.print(Text(text.translate(_CONTROLS), style="dim"))

    def legend(self, guesser: str) -> None:
        """See `Screen`."""
        shown = ("tokens like these", self._guessed)
        self._console.print(Text.assemble(shown, f" were guessed by {guesser} and confirmed"))

    @contextlib.contextmanager
    def answer(self) -> Iterator[Show]:
        """See `Screen`."""
        with _typed_ahead(), Live(console=self._console, auto_refresh=False) as live:
            growing = _Growing(self._console, live, self._guessed)
            growing.add((), "reading the conversation")
            try:
                yield growing
            finally:
                growing.end()


class _Growing:
    """Lines that are full move up and stay; below them the last one grows, above the numbers."""

    def __init__(self, console: Console, live: Live, guessed: Style) -> None:
        self._console, self._live, self._guessed = console, live, guessed
        self._line = Text()

    def add(self, pieces: Sequence[Piece], numbers: str) -> None:
        for piece in pieces:
            style = self._guessed if piece.guessed else None
            self._line.append(piece.text.translate(_CONTROLS), style)
        spaces = len(self._line.plain) - len(self._line.plain.rstrip(" "))
        *full, self._line = self._line.wrap(self._console, self._console.width)
        # Those beyond the edge are dropped, but more may follow them
        self._line.rstrip()
        self._line.append(" " * spaces)
        status = Text(numbers, style="dim", no_wrap=True, overflow="ellipsis")
        with self._console:  # one write, so that nothing flickers
            self._live.update(Group(self._line, status), refresh=True)
            if full:
                self._console.print(Text("\n").join(full))

    def end(self) -> None:
        self._live.update(self._line)


@contextlib.contextmanager
def _typed_ahead() -> Iterator[None]:
    """Keep what is typed meanwhile for the next line: unseen, as it would tear the answer apart.

    Ctrl-D is a key like others then. In its usual mode the terminal would forget it when readline
    takes over. Ctrl-C stays what it is.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios  # not on every system, but wherever `tty` works
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _prompt(more: bool) -> str:
    return "... " if more else "> "
