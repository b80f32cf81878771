"""Rows of a benchmark: two workloads measured in turn, their medians and how far they scatter."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

# Runs the workload once and gives its figure, such as tokens per second
Workload = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, as written to the JSON file."""

    name: str  # fixed, so that runs can be compared over time
    value: float  # median of ours, in `unit`
    peer: float  # median of what it is compared with, in `unit`
    ratio: float  # value / peer
    unit: str
    spread: float  # of the rounds' own ratios: (third - first quartile) / median


def interleave(
    workloads: Mapping[str, Workload], *, repeats: int, warmup: int
) -> dict[str, list[float]]:
    """Figures of all workloads, measured in turn, round by round.

    A machine that gets slower on the way does so for all of them. Every other round runs
    backwards, so that none always comes first.

    Args:
        workloads: by name.
        repeats: rounds that count.
        warmup: rounds before them that do not.
    """
    figures: dict[str, list[float]] = {name: [] for name in workloads}
    rounds = range(warmup + repeats)
    for turn in track(
        rounds, " and ".join(workloads), console=Console(stderr=True), transient=True
    ):
        names = list(workloads)
        for name in names if turn % 2 == 0 else reversed(names):
            figure = workloads[name]()
            if turn >= warmup:
                figures[name].append(figure)
    return figures


def compare(name: str, ours: Sequence[float], peer: Sequence[float], *, unit: str) -> Row:
    """Medians of two workloads over the same rounds.

    The spread is that of `ours[i] / peer[i]`: what drifts from round to round, but hits both
    alike, is not in it.
    """
    value, other = statistics.median(ours), statistics.median(peer)
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    first, middle, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(
        name=name,
        value=value,
        peer=other,
        ratio=value / other,
        unit=unit,
        spread=(third - first) / middle,
    )
