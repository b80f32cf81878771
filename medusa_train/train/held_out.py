"""What the held-out rows say: measured by all processes, named for logs and checkpoints.

Legend: L losses, K heads.
"""

from collections.abc import Sequence
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
    """`Objective.measure` of all rows, on every process; the same however many there are."""
    micros = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    mine = micros[world.rank :: world.size]
    parts = []
    # Weights may be sharded: every process makes as many calls, the spare ones without effect
    for turn in range(-(-len(micros) // world.size)):
        is_spare = turn >= len(mine)
        batch = objective.batch(rows[:1] if is_spare else mine[turn])
        found = objective.measure(batch, engine.gathered)
        if not is_spare:
            parts.append(found)
    turns = zip_longest(*world.gather(parts))
    return joined([part for turn in turns for part in turn if part is not None])


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
