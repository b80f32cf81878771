"""Results of an evaluation: built from measured answers, written, read and checked.

The classes that make up the schema are in `results_schema`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from medusa_train.errors import DataError
from medusa_train.evaluate import statistics
from medusa_train.evaluate.exactness import compare_answers
from medusa_train.evaluate.near_ties import Gap
from medusa_train.evaluate.results_schema import (
    SCHEMA,
    VERSION,
    AddedWeights,
    Bootstrap,
    Comparison,
    DraftInfo,
    DraftModelResult,
    DraftResult,
    GammaResult,
    HeadsInfo,
    KindSpeedup,
    MedusaResult,
    MethodResult,
    Methods,
    ModelInfo,
    Ratio,
    Results,
    TreeInfo,
)
from medusa_train.evaluate.statistics import Measurements
from medusa_train.track.manifest import write_json

PLAIN, MEDUSA, DRAFT_PREFIX = "plain", "medusa", "draft_model/gamma="

_ADAPTER = TypeAdapter(Results)


def build_results(
    measurements: Mapping[str, Measurements],
    *,
    model: ModelInfo,
    heads: HeadsInfo | None,
    draft: DraftInfo | None,
    tree: TreeInfo | None,
    gap: Gap,
    provenance: Mapping[str, Any],
    bootstrap_samples: int,
    seed: int,
) -> Results:
    """Everything worth knowing of measured answers.

    Args:
        measurements: `plain`, and any of `medusa` and `draft_model/gamma=N` for several N; the
            same prompts in the same order in each.
        model: the backbone.
        heads: given with `medusa`, and only then.
        draft: given with a `draft_model/gamma=N`, and only then.
        tree: given with `medusa`, and only then.
        gap: how near to a tie an answer left plain decoding's.
        provenance: JSON-like, for people; `command` is shown as such by the report.
        bootstrap_samples: of each interval.
        seed: of the intervals.

    Raises:
        ValueError: if measurements and blocks do not belong together, or a number is not finite.
    """
    gammas = _by_gamma(measurements)
    _check_blocks(measurements, gammas, model=model, heads=heads, draft=draft, tree=tree)
    bootstrap = Bootstrap(samples=bootstrap_samples, seed=seed)
    plain, medusa = measurements[PLAIN], measurements.get(MEDUSA)
    baseline = _Baseline(plain=plain, bootstrap=bootstrap, gap=gap)
    best = max(gammas, key=lambda gamma: statistics.speedup(gammas[gamma], plain), default=None)
    results = Results(
        schema=SCHEMA,
        version=VERSION,
        model=model,
        methods=Methods(
            plain=MethodResult(**_method(plain, None, 0, baseline)),
            draft_model=None if best is None else _draft_model(gammas, best, draft, baseline),
            medusa=None if not (medusa and tree) else _medusa(medusa, heads, tree, baseline),
        ),
        comparison=Comparison(
            medusa_over_draft=None
            if medusa is None or best is None
            else _ratio(medusa, gammas[best], bootstrap)
        ),
        heads=heads,
        draft=None if best is None or draft is None else _draft(gammas, best, draft, baseline),
        tree=tree,
        bootstrap=bootstrap,
        provenance=dict(provenance),
    )
    # Through JSON and back, so that what is returned is what a reader of the file gets.
    return _ADAPTER.validate_json(json.dumps(asdict(results), allow_nan=False))


def write_results(path: Path, results: Results) -> None:
    """Write strict JSON (no NaN) that appears whole or not at all."""
    write_json(path, asdict(results))


def read_results(path: Path) -> Results:
    """Read and check a results file.

    Raises:
        DataError: if it is missing, not strict JSON, of another schema or version, or a key is
            missing, unknown or of the wrong type (each is named).
    """
    try:
        text = path.read_text()
        found = json.loads(text, parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise DataError(f"results {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise DataError(f'{path} holds no results: expected "schema": "{SCHEMA}"')
    version = found.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        advice = "install a newer medusa-train" if newer else "evaluate again"
        raise DataError(
            f"{path} has version {version!r} of {SCHEMA}; this medusa-train reads {VERSION}. "
            f"To read it, {advice}."
        )
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        faults = [f"  - {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise DataError("\n".join([f"{path} does not fit its schema:", *faults])) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")


def _by_gamma(measurements: Mapping[str, Measurements]) -> dict[int, Measurements]:
    """The draft model's measurements, smallest gamma first."""
    found = {
        int(name.removeprefix(DRAFT_PREFIX)): measured
        for name, measured in measurements.items()
        if name not in (PLAIN, MEDUSA)
    }
    return dict(sorted(found.items()))


def _check_blocks(
    measurements: Mapping[str, Measurements],
    gammas: Mapping[int, Measurements],
    *,
    model: ModelInfo,
    heads: HeadsInfo | None,
    draft: DraftInfo | None,
    tree: TreeInfo | None,
) -> None:
    measured = MEDUSA in measurements
    if {measured} != {heads is not None, tree is not None}:
        raise ValueError(f"medusa measured: {measured}; heads and tree go with it, both or neither")
    if bool(gammas) != (draft is not None):
        raise ValueError(f"gammas measured: {list(gammas)}; a draft block goes with them")
    if model.num_prompts != len(measurements[PLAIN]):
        raise ValueError(
            f"num_prompts={model.num_prompts}, but {len(measurements[PLAIN])} were measured"
        )


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    """What every method is compared with, and how."""

    plain: Measurements
    bootstrap: Bootstrap
    gap: Gap


def _medusa(
    measured: Measurements, heads: HeadsInfo | None, tree: TreeInfo, baseline: _Baseline
) -> MedusaResult:
    fields = _method(measured, heads, tree.depth, baseline)
    return MedusaResult(**fields, tree_nodes=tree.nodes)


def _draft_model(
    gammas: Mapping[int, Measurements], best: int, draft: DraftInfo | None, baseline: _Baseline
) -> DraftModelResult:
    return DraftModelResult(**_method(gammas[best], draft, best, baseline), gamma=best)


def _draft(
    gammas: Mapping[int, Measurements], best: int, draft: DraftInfo, baseline: _Baseline
) -> DraftResult:
    by_gamma = {str(gamma): _gamma(gammas[gamma], gamma, baseline) for gamma in gammas}
    rate = by_gamma[str(best)].acceptance_rate
    return DraftResult(**asdict(draft), acceptance_rate=rate, by_gamma=by_gamma)


def _ratio(method: Measurements, baseline: Measurements, bootstrap: Bootstrap) -> Ratio:
    low, high = statistics.speedup_interval(
        method, baseline, samples=bootstrap.samples, seed=bootstrap.seed
    )
    return Ratio(ratio=statistics.speedup(method, baseline), ci95=(low, high))


def _overhead(method: Measurements, plain: Measurements) -> float | None:
    ours, theirs = statistics.step_seconds(method), statistics.step_seconds(plain)
    return ours / theirs if ours is not None and theirs else None


def _gamma(measured: Measurements, gamma: int, baseline: _Baseline) -> GammaResult:
    speedup = _ratio(measured, baseline.plain, baseline.bootstrap)
    return GammaResult(
        speedup=speedup.ratio,
        speedup_ci95=speedup.ci95,
        tokens_per_step=statistics.tokens_per_step(measured),
        acceptance_rate=statistics.draft_acceptance_rate(measured, gamma=gamma),
        overhead=_overhead(measured, baseline.plain),
    )


def _method(
    measured: Measurements, extra: AddedWeights | None, depth: int, baseline: _Baseline
) -> dict[str, Any]:
    """The fields of a `MethodResult`; `extra` is what the method adds to the backbone."""
    plain = baseline.plain
    speedup = _ratio(measured, plain, baseline.bootstrap)
    per_step, overhead = statistics.tokens_per_step(measured), _overhead(measured, plain)
    step = statistics.step_seconds(measured)
    exactness = compare_answers(measured, plain, baseline.gap)
    answers = [m.generation for m in measured]
    return {
        "architecture": "the backbone alone" if extra is None else extra.architecture,
        "verification": "reference: plain greedy decoding"
        if extra is None
        else "greedy: output equals plain decoding in exact arithmetic; "
        f"{exactness.identical} of {exactness.prompts} answers identical here",
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
        "acceptance_by_depth": statistics.acceptance_by_depth(measured, depth=depth),
        "exactness": exactness,
        "repetition_share": statistics.repetition_share(measured),
        "extra_memory_bytes": 0 if extra is None else extra.bytes,
        "training_tokens": 0 if extra is None else extra.training_tokens,
        "training_seconds": 0.0 if extra is None else extra.training_seconds,
        "speedup_by_kind": _speedup_by_kind(measured, plain),
    }


def _speedup_by_kind(measured: Measurements, plain: Measurements) -> dict[str, KindSpeedup]:
    references = statistics.split_by_kind(plain)
    return {
        kind: KindSpeedup(speedup=statistics.speedup(ours, references[kind]), prompts=len(ours))
        for kind, ours in statistics.split_by_kind(measured).items()
    }
