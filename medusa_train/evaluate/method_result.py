"""What measured answers say of one method, as the results hold it."""

from dataclasses import dataclass
from typing import Any

from medusa_train.evaluate import statistics
from medusa_train.evaluate.exactness import compare_answers
from medusa_train.evaluate.near_ties import Gap
from medusa_train.evaluate.results_schema import (
    AddedWeights,
    Bootstrap,
    Exactness,
    GammaResult,
    KindSpeedup,
    Ratio,
)
from medusa_train.evaluate.statistics import Measurements


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is known of a method before it is measured."""

    adds: AddedWeights  # to the backbone
    depth: int  # the most drafts that a step can accept
    lossy: bool = False  # whether it may give other answers than plain decoding
    temperature: float = 0.0


def no_weights(architecture: str) -> AddedWeights:
    """What a method without weights of its own adds to the backbone."""
    return AddedWeights(
        architecture=architecture, parameters=0, bytes=0, training_tokens=0, training_seconds=0.0
    )


PLAIN_TRAITS = Traits(adds=no_weights("the backbone alone"), depth=0)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What every method is compared with, and how."""

    plain: Measurements
    bootstrap: Bootstrap
    gap: Gap

    def ratio(self, measured: Measurements, other: Measurements | None = None) -> Ratio:
        """Of speeds, with its interval; to plain decoding if no other method is given."""
        other = self.plain if other is None else other
        low, high = statistics.speedup_interval(
            measured, other, samples=self.bootstrap.samples, seed=self.bootstrap.seed
        )
        return Ratio(ratio=statistics.speedup(measured, other), ci95=(low, high))


def method_fields(measured: Measurements, traits: Traits, baseline: Baseline) -> dict[str, Any]:
    """The fields of a `MethodResult`."""
    plain, adds = baseline.plain, traits.adds
    speedup = baseline.ratio(measured)
    per_step, overhead = statistics.tokens_per_step(measured), _overhead(measured, plain)
    step = statistics.step_seconds(measured)
    exactness = compare_answers(measured, plain, baseline.gap)
    answers = [m.generation for m in measured]
    return {
        "architecture": adds.architecture,
        "verification": _verification(traits, exactness),
        "lossy": traits.lossy,
        "temperature": traits.temperature,
        "tokens_per_step": per_step,
        "accepted_drafts_per_step": None if per_step is None else per_step - 1,
        "overhead": overhead,
        "speedup": speedup.ratio,
        "speedup_ci95": speedup.ci95,
        "residual": speedup.ratio * overhead / per_step - 1 if per_step and overhead else None,
        "tokens": sum(len(answer.ids) for answer in answers),
        "seconds": sum(answer.seconds for answer in answers),
        "tokens_per_second": statistics.tokens_per_second(measured),
        "prefill_seconds": sum(answer.prefill_seconds for answer in answers),
        "decode_seconds": sum(answer.decode_seconds for answer in answers),
        "steps": sum(answer.steps for answer in answers),
        "step_ms": None if step is None else 1000 * step,
        "acceptance_by_depth": statistics.acceptance_by_depth(measured, depth=traits.depth),
        "exactness": exactness,
        "repetition_share": statistics.repetition_share(measured),
        "extra_memory_bytes": adds.bytes,
        "training_tokens": adds.training_tokens,
        "training_seconds": adds.training_seconds,
        "speedup_by_kind": _speedup_by_kind(measured, plain),
    }


def gamma_result(measured: Measurements, gamma: int, baseline: Baseline) -> GammaResult:
    """The draft model at one number of drafts per step."""
    speedup = baseline.ratio(measured)
    return GammaResult(
        speedup=speedup.ratio,
        speedup_ci95=speedup.ci95,
        tokens_per_step=statistics.tokens_per_step(measured),
        acceptance_rate=statistics.draft_acceptance_rate(measured, gamma=gamma),
        overhead=_overhead(measured, baseline.plain),
    )


def _verification(traits: Traits, exactness: Exactness) -> str:
    if traits == PLAIN_TRAITS:
        return "reference: plain greedy decoding"
    counted = f"{exactness.identical} of {exactness.prompts}"
    if traits.lossy:
        return (
            "typical acceptance: answers may differ from plain decoding's; "
            f"{counted} identical here"
        )
    return (
        "greedy: output equals plain decoding in exact arithmetic; "
        f"{counted} answers identical here"
    )


def _overhead(method: Measurements, plain: Measurements) -> float | None:
    ours, theirs = statistics.step_seconds(method), statistics.step_seconds(plain)
    return ours / theirs if ours is not None and theirs else None


def _speedup_by_kind(measured: Measurements, plain: Measurements) -> dict[str, KindSpeedup]:
    references = statistics.split_by_kind(plain)
    return {
        kind: KindSpeedup(speedup=statistics.speedup(ours, references[kind]), prompts=len(ours))
        for kind, ours in statistics.split_by_kind(measured).items()
    }
