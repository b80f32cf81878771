"""How far a long loop is: a bar on a terminal, a line now and then in a log file.

Only the first process shows anything.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0


class Meter(Protocol):
    """Takes what was done."""

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """So many more are done; `note` is shown beside the count until the next one."""
        ...


@contextmanager
def progress(
    label: str, total: int, *, is_main: bool = True, done: int = 0, terminal: bool | None = None
) -> Iterator[Meter]:
    """Show the progress of a loop while it is entered.

    Args:
        label: what is going on, in a word or two.
        total: how many there are to do.
        is_main: whether this is the first process; the others show nothing.
        done: how many an earlier run has done.
        terminal: draw a bar; None asks whether standard error is a terminal.
    """
    if not is_main:
        yield _Silent()
        return
    if not (sys.stderr.isatty() if terminal is None else terminal):
        lines = _Lines(label, total, done)
        yield lines
        lines.end()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(label, total=total, completed=done, note="")
        yield _Bar(bars, task)


class _Silent:
    def advance(self, amount: int = 1, note: str | None = None) -> None:
        pass


class _Bar:
    def __init__(self, bars: Progress, task: int) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        fields = {} if note is None else {"note": note}
        self._bars.update(self._task, advance=amount, **fields)  # pyright: ignore


class _Lines:
    def __init__(self, label: str, total: int, done: int) -> None:
        self._label, self._total, self._done = label, total, done
        self._first, self._begun = done, time.monotonic()
        self._next = self._begun + SECONDS_BETWEEN_LINES
        self._note = ""

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self._done += amount
        self._note = self._note if note is None else note
        if time.monotonic() >= self._next:
            self._line()
            self._next = time.monotonic() + SECONDS_BETWEEN_LINES

    def end(self) -> None:
        if self._done > self._first:
            self._line()

    def _line(self) -> None:
        spent = time.monotonic() - self._begun
        left = spent / max(1, self._done - self._first) * (self._total - self._done)
        text = f"{self._label} {self._done}/{self._total}, {spent:.0f} s, {left:.0f} s left"
        log.info("%s", f"{text}, {self._note}" if self._note else text)
