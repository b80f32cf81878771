"""`growth`: memory and time of the loss of Medusa-1 as heads, vocabulary and positions grow.

One of the three grows while the others stay. Sides and ways to measure are those of `loss.py`.
"""

from bench.case import Case
from bench.loss import build_training
from bench.memory import MEGABYTE, peak_bytes
from bench.rows import Row, compare, interleave
from medusa_train.decode.generation import clock

HEADS = (1, 2, 4, 8)
FEW_HEADS = 4
POSITIONS = (256, 512, 1024, 2048)
FEW_POSITIONS = 512
VOCABULARY_SHARES = (4, 2, 1)  # the whole vocabulary is divided by these
TINY = 32  # positions are divided by this in a check


def run(case: Case) -> list[Row]:
    """Two rows for each size: memory in MB, time of forward and backward in ms."""
    return [row for sizes in all_sizes(case) for row in _rows(case, *sizes)]


def all_sizes(case: Case) -> list[tuple[int, int, int]]:
    """Heads, vocabulary and positions of everything that is measured, each once."""
    whole = case.backbone.vocab_size
    few, cut = whole // VOCABULARY_SHARES[0], TINY if case.tiny else 1
    sizes = [(heads, few, FEW_POSITIONS // cut) for heads in HEADS]
    sizes += [(FEW_HEADS, whole // share, FEW_POSITIONS // cut) for share in VOCABULARY_SHARES]
    sizes += [(FEW_HEADS, few, positions // cut) for positions in POSITIONS]
    return list(dict.fromkeys(sizes))


def _rows(case: Case, heads: int, vocabulary: int, positions: int) -> list[Row]:
    training = build_training(
        case, "own", num_heads=heads, positions=positions, vocab_size=vocabulary
    )
    training.check()
    device = case.backbone.device

    def milliseconds(side: str) -> float:
        begin = clock(device)
        getattr(training, side)()
        return 1e3 * (clock(device) - begin)

    def megabytes(side: str) -> float:
        return peak_bytes(getattr(training, side), device) / MEGABYTE

    rows = []
    for what, unit, measure, repeats in (
        ("memory", "MB", megabytes, 2),  # the same in every round
        ("time", "ms", milliseconds, case.repeats),
    ):
        sides = {side: lambda s=side, m=measure: m(s) for side in ("ours", "stacked")}
        figures = interleave(sides, repeats=repeats, warmup=1)
        name = f"growth_{what}_k{heads}_v{vocabulary}_p{positions}"
        rows.append(compare(name, figures["ours"], figures["stacked"], unit=unit))
    return rows
