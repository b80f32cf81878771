"""How a training run is told to stop: SIGTERM from a scheduler or launcher, SIGINT from a person.

A handler only notes the signal. The loop shares what any process was told in the numbers that it
sums at every step anyway, so all of them stop at the same step, save together and leave with
`Interrupted`: 128 + the signal's number, what a shell shows of a process that it killed.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them; the handlers before are put back."""
    received: list[int] = []
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {
        kind: signal.signal(kind, lambda number, _: received.append(number)) for kind in kinds
    }
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
