"""Results of an evaluation: built from measured answers, written, read and checked.

The classes that make up the schema are in `results_schema`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from medusa_train.config.evaluation import AlsoName
from medusa_train.errors import DataError
from medusa_train.evaluate import statistics
from medusa_train.evaluate.method_result import (
    PLAIN_TRAITS,
    Baseline,
    Traits,
    gamma_result,
    method_fields,
)
from medusa_train.evaluate.near_ties import Gap
from medusa_train.evaluate.results_schema import (
    SCHEMA,
    VERSION,
    Bootstrap,
    Comparison,
    DraftInfo,
    DraftModelResult,
    DraftResult,
    HeadsInfo,
    MedusaResult,
    MethodResult,
    Methods,
    ModelInfo,
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
    others: Mapping[AlsoName, Traits],
    gap: Gap,
    provenance: Mapping[str, Any],
    bootstrap_samples: int,
    seed: int,
) -> Results:
    """Everything worth knowing of measured answers.

    Args:
        measurements: `plain`, and any of `medusa`, `draft_model/gamma=N` for several N and the
            names of `others`; the same prompts in the same order in each.
        model: the backbone.
        heads: given with `medusa`, and only then.
        draft: given with a `draft_model/gamma=N`, and only then.
        tree: given with `medusa`, and only then.
        others: further methods, by name.
        gap: how near to a tie an answer left plain decoding's.
        provenance: JSON-like, for people; `command` is shown as such by the report.
        bootstrap_samples: of each interval.
        seed: of the intervals.

    Raises:
        ValueError: if measurements and blocks do not belong together, or a number is not finite.
    """
    gammas = _by_gamma(measurements, others)
    _check_blocks(
        measurements, gammas, model=model, heads=heads, draft=draft, tree=tree, others=others
    )
    bootstrap = Bootstrap(samples=bootstrap_samples, seed=seed)
    plain, medusa = measurements[PLAIN], measurements.get(MEDUSA)
    baseline = Baseline(plain=plain, bootstrap=bootstrap, gap=gap)
    best = max(gammas, key=lambda gamma: statistics.speedup(gammas[gamma], plain), default=None)
    results = Results(
        schema=SCHEMA,
        version=VERSION,
        model=model,
        methods=Methods(
            plain=MethodResult(**method_fields(plain, PLAIN_TRAITS, baseline)),
            draft_model=None
            if best is None or draft is None
            else _draft_model(gammas, best, draft, baseline),
            medusa=None
            if medusa is None or heads is None or tree is None
            else _medusa(medusa, heads, tree, baseline),
            others={
                name: MethodResult(**method_fields(measurements[name], traits, baseline))
                for name, traits in others.items()
            },
        ),
        comparison=Comparison(
            medusa_over_draft=None
            if medusa is None or best is None
            else baseline.ratio(medusa, gammas[best]),
            medusa_over_others={}
            if medusa is None
            else {
                name: baseline.ratio(medusa, measurements[name])
                for name, traits in others.items()
                if not traits.lossy  # which does other work
            },
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


def _by_gamma(
    measurements: Mapping[str, Measurements], others: Mapping[AlsoName, Traits]
) -> dict[int, Measurements]:
    """The draft model's measurements, smallest gamma first."""
    found = {
        int(name.removeprefix(DRAFT_PREFIX)): measured
        for name, measured in measurements.items()
        if name not in (PLAIN, MEDUSA, *others)
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
    others: Mapping[AlsoName, Traits],
) -> None:
    measured = MEDUSA in measurements
    if {measured} != {heads is not None, tree is not None}:
        raise ValueError(f"medusa measured: {measured}; heads and tree go with it, both or neither")
    if bool(gammas) != (draft is not None):
        raise ValueError(f"gammas measured: {list(gammas)}; a draft block goes with them")
    if not others.keys() <= measurements.keys() - {PLAIN, MEDUSA}:
        raise ValueError(f"others are {list(others)}, measured are {list(measurements)}")
    if model.num_prompts != len(measurements[PLAIN]):
        raise ValueError(
            f"num_prompts={model.num_prompts}, but {len(measurements[PLAIN])} were measured"
        )


def _medusa(
    measured: Measurements, heads: HeadsInfo, tree: TreeInfo, baseline: Baseline
) -> MedusaResult:
    fields = method_fields(measured, Traits(adds=heads, depth=tree.depth), baseline)
    return MedusaResult(**fields, tree_nodes=tree.nodes)


def _draft_model(
    gammas: Mapping[int, Measurements], best: int, draft: DraftInfo, baseline: Baseline
) -> DraftModelResult:
    fields = method_fields(gammas[best], Traits(adds=draft, depth=best), baseline)
    return DraftModelResult(**fields, gamma=best)


def _draft(
    gammas: Mapping[int, Measurements], best: int, draft: DraftInfo, baseline: Baseline
) -> DraftResult:
    by_gamma = {str(gamma): gamma_result(gammas[gamma], gamma, baseline) for gamma in gammas}
    rate = by_gamma[str(best)].acceptance_rate
    return DraftResult(**asdict(draft), acceptance_rate=rate, by_gamma=by_gamma)
