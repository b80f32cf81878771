"""The learning-rate schedule as a function of the step."""

import math


def lr_factor(step: int, *, total: int, warmup: int, schedule: str) -> float:
    """Factor on the peak learning rate for the update number `step` (from 0).

    Args:
        step: 0 for the first update.
        total: number of updates of the run.
        warmup: updates over which the factor rises linearly; the first is `1 / warmup`.
        schedule: `constant`, `linear` (to 0) or `cosine` (to 0).

    Returns:
        A number in [0, 1]; the last update of `linear` and `cosine` still has a positive one.

    Raises:
        ValueError: for another `schedule`.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"schedule is constant, linear or cosine, got {schedule!r}")
