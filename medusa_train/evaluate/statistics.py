"""What measured answers say: speed-up with an interval, tokens per step, acceptance, repetition.

Pure functions of measurements. A method and its baseline answer the same prompts in the same
order; sums are taken over prompts first and divided afterwards (pooled), so long answers count
for as much as they weigh.

Legend: N prompts, S bootstrap samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medusa_train.decode.generation import Generation

REPETITION_GRAM = 4  # tokens


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One prompt decoded by one method."""

    prompt_id: str
    kind: str
    generation: Generation


Measurements = Sequence[Measurement]


def tokens_per_second(measurements: Measurements) -> float:
    """Kept tokens of all answers / seconds of all answers, prefill included."""
    tokens, seconds = _sums(measurements)
    return float(tokens.sum() / seconds.sum())


def speedup(method: Measurements, baseline: Measurements) -> float:
    """Ratio of pooled tokens per second, method over baseline; above 1 the method is faster.

    Raises:
        ValueError: if the two do not hold the same prompts in the same order, or none.
    """
    _require_pairs(method, baseline)
    return tokens_per_second(method) / tokens_per_second(baseline)


def speedup_interval(
    method: Measurements, baseline: Measurements, *, samples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of `speedup` over prompts.

    Both answers to a prompt are drawn together, so that how hard a prompt is cancels out. The
    same seed gives every pair of methods the same draws.

    Args:
        method: N measurements.
        baseline: the same N prompts in the same order.
        samples: S, at least 1.
        seed: of the draws.
        level: share of the bootstrap ratios that the interval holds.

    Returns:
        Lower and upper end, both ratios.

    Raises:
        ValueError: as `speedup`.
    """
    _require_pairs(method, baseline)
    count = len(method)
    draws = np.random.default_rng(seed)
    # Times each prompt is drawn, [S, N]: the same law as N draws with replacement.
    times = draws.multinomial(count, np.full(count, 1 / count), size=samples)
    rates = [
        (times @ tokens) / (times @ seconds) for tokens, seconds in map(_sums, (method, baseline))
    ]
    tail = (1 - level) / 2
    low, high = np.quantile(rates[0] / rates[1], [tail, 1 - tail])
    return float(low), float(high)


def tokens_per_step(measurements: Measurements) -> float | None:
    """Mean tokens that one target forward emits after the prefill; None without any step.

    Emitted tokens are counted as they came (accepted drafts + 1), before the end of the answer
    cuts the last block.
    """
    accepted = _accepted(measurements)
    return 1 + sum(accepted) / len(accepted) if accepted else None


def step_seconds(measurements: Measurements) -> float | None:
    """Mean seconds of one decoding step; None without any step."""
    steps = len(_accepted(measurements))
    return sum(m.generation.decode_seconds for m in measurements) / steps if steps else None


def acceptance_by_depth(measurements: Measurements, *, depth: int) -> list[float]:
    """Share of steps with at least d accepted drafts, for d = 1 ... depth; empty without any step.

    Args:
        measurements: of one method.
        depth: drafts that one step can accept at most.

    Raises:
        ValueError: if a step accepted more than that.
    """
    accepted = _accepted(measurements)
    _require_at_most(accepted, depth)
    if not accepted:
        return []
    return [sum(a >= d for a in accepted) / len(accepted) for d in range(1, depth + 1)]


def draft_acceptance_rate(measurements: Measurements, *, gamma: int) -> float | None:
    """Accepted drafts / tested drafts of a draft model; None without any step.

    A step tests the drafts that it accepts and the first that it refuses; what lies behind that
    one is never looked at.

    Args:
        measurements: of one draft-model method.
        gamma: drafts proposed in each step.

    Raises:
        ValueError: if a step accepted more than gamma.
    """
    accepted = _accepted(measurements)
    _require_at_most(accepted, gamma)
    tested = sum(a + (a < gamma) for a in accepted)
    return sum(accepted) / tested if tested else None


def repetition_share(measurements: Measurements) -> float:
    """Share of all kept tokens that end a 4-gram already seen earlier in the same answer.

    Answers that run in circles are easy to draft, so a high share means that acceptance and
    speed-up flatter the method.
    """
    answers = [m.generation.ids for m in measurements]
    return sum(map(_repeated, answers)) / sum(map(len, answers))


def first_difference(answer: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position (from 0) where two answers part, or None; an answer that stops early parts there."""
    for position, (a, b) in enumerate(zip(answer, reference, strict=False)):
        if a != b:
            return position
    return None if len(answer) == len(reference) else min(len(answer), len(reference))


def split_by_kind(measurements: Measurements) -> dict[str, list[Measurement]]:
    """The measurements of each kind of prompt, kinds in alphabetical order."""
    kinds = sorted({m.kind for m in measurements})
    return {kind: [m for m in measurements if m.kind == kind] for kind in kinds}


def _sums(measurements: Measurements) -> tuple[np.ndarray, np.ndarray]:
    """Kept tokens [N] and seconds [N] of each answer."""
    tokens = np.array([len(m.generation.ids) for m in measurements], dtype=float)
    return tokens, np.array([m.generation.seconds for m in measurements], dtype=float)


def _accepted(measurements: Measurements) -> list[int]:
    return [accepted for m in measurements for accepted in m.generation.accepted]


def _repeated(ids: Sequence[int]) -> int:
    """How many tokens of one answer end a gram that occurred before."""
    grams = [tuple(ids[i : i + REPETITION_GRAM]) for i in range(len(ids) - REPETITION_GRAM + 1)]
    return len(grams) - len(set(grams))


def _require_pairs(method: Measurements, baseline: Measurements) -> None:
    ours, theirs = ([(m.prompt_id, m.kind) for m in each] for each in (method, baseline))
    if not ours or ours != theirs:
        raise ValueError(
            f"expected the same prompts in the same order, at least one; "
            f"found {len(ours)} and {len(theirs)}: {ours[:3]} ... and {theirs[:3]} ..."
        )


def _require_at_most(accepted: Sequence[int], limit: int) -> None:
    if max(accepted, default=0) > limit:
        raise ValueError(f"a step accepted {max(accepted)} drafts, but can draft only {limit} deep")
