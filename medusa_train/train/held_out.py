"""What the held-out rows say: measured by all processes, named for logs and checkpoints.

Legend: L losses, K heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from medusa_train.data.rows import Row
from medusa_train.parallel import World
from medusa_train.train.engine import Engine
from medusa_train.train.objective import Measured, Objective, joined


def measure(
    objective: Objective,
    engine: Engine,
    rows: Sequence[Row],
    *,
    micro_batch_size: int,
    world: World,
) -> Measured:
    """`Objective.measure` of all rows, on every process."""
    mine = rows[world.rank :: world.size]
    largest_share = -(-len(rows) // world.size)
    parts = []
    # Weights may be sharded: every process makes as many calls, the spare ones without effect
    for start in range(0, largest_share, micro_batch_size):
        batch = mine[start : start + micro_batch_size]
        found = objective.measure(objective.batch(batch or rows[:1]), engine.gathered)
        if batch:
            parts.append(found)
    shares = [joined(share) for share in world.gather(parts) if share]
    by_row = zip_longest(*(share.ranks for share in shares))
    ranks = [rank for group in by_row for rank in group if rank is not None]
    return replace(joined(shares), ranks=ranks)


def figures(objective: Objective, measured: Measured, score: float) -> dict[str, list[float]]:
    """As `TrainState.held_out`: loss [L], top1 and top5 [K], the score and other figures as [1]."""
    found = {"loss": measured.means, "top1": measured.hits(1), "top5": measured.hits(5)}
    found.setdefault(objective.score_name, [score])
    for name, (value, count) in measured.others.items():
        found[name] = [value / max(count, 1)]
    return found


def metrics(objective: Objective, found: dict[str, list[float]]) -> dict[str, float]:
    """The same as `eval/{loss}/...` of each loss and head, and `eval/{figure}` of the run."""
    heads = objective.names[len(objective.names) - len(found["top1"]) :]
    named = {
        f"eval/{name}/{kind}": value
        for kind, names in (("loss", objective.names), ("top1", heads), ("top5", heads))
        for name, value in zip(names, found[kind], strict=True)
    }
    single = {objective.score_name, *found} - ({"loss", "top1", "top5"} - {objective.score_name})
    return {**named, **{f"eval/{name}": found[name][0] for name in sorted(single)}}
