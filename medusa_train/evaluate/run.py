"""The stage `evaluate`: accuracy, tree, speed, report, in this order."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_train.config.schema import Config
from medusa_train.data.prompts import EncodedPrompt, encode_prompts, prompts_by_split
from medusa_train.data.rows import Row, read_split
from medusa_train.errors import DataError
from medusa_train.evaluate.describe import draft_info, model_info
from medusa_train.evaluate.methods import (
    make_methods,
    most_guesses,
    samplings,
    traits_of_others,
)
from medusa_train.evaluate.near_ties import gap_of
from medusa_train.evaluate.report import write_report
from medusa_train.evaluate.results import build_results, write_results
from medusa_train.evaluate.results_schema import MethodResult, Results
from medusa_train.evaluate.speed import measure
from medusa_train.evaluate.tree_choice import choose_tree
from medusa_train.model.backbone import Backbone
from medusa_train.model.draft import load_draft, load_existing
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.weights import load_heads
from medusa_train.track.manifest import Stage, Trained, read_manifest, write_json
from medusa_train.track.places import TREE
from medusa_train.track.progress import progress
from medusa_train.track.provenance import provenance
from medusa_train.track.sinks import open_sinks

log = logging.getLogger(__name__)

REPORT_FILES = ("results.json", "report.md", "speedup.png", "acceptance.png", TREE)


def evaluate(
    config: Config,
    stage: Stage,
    backbone: Backbone,
    *,
    distilled: Path,
    heads: Trained,
    draft: Trained | None,
) -> dict[str, Any]:
    """Measure plain, draft-model, Medusa and further decoding; write results, report and plots.

    Args:
        config: the whole run.
        stage: opened and unfinished; results go to its folder.
        backbone: the target.
        distilled: folder of the distilled rows; `calibration` is read.
        heads: trained heads.
        draft: trained or checked draft model; None leaves it out.

    Returns:
        The headline numbers.
    """
    settings = config.evaluate
    prompts = _prompts(config, backbone)
    limits = {"vocab_size": backbone.vocab_size, "context": backbone.max_positions}
    calibration = read_split(distilled / "calibration", **limits)
    refuse_trained(prompts, [*read_split(distilled / "train"), *calibration], distilled)
    medusa_heads = load_heads(
        heads.folder, dtype=backbone.dtype, device=backbone.device, backbone=backbone
    )
    heads_info, tree, tree_info = choose_tree(config, backbone, medusa_heads, heads, calibration)
    write_json(stage.folder / TREE, {"paths": [list(path) for path in tree.paths]})
    draft_model = None if draft is None else _load_draft(config, backbone, draft.folder)
    draft_facts = draft_info(config, draft, draft_model)
    methods = make_methods(config, backbone, medusa_heads, tree, draft_model)
    with progress("evaluate", len(prompts)) as meter:
        measurements = measure(
            methods,
            prompts,
            backbone,
            max_new_tokens=settings.max_new_tokens,
            warmup=settings.warmup_prompts,
            meter=meter,
            samplings=samplings(config),
        )
    results = build_results(
        measurements,
        model=model_info(config, backbone, len(prompts)),
        heads=heads_info,
        draft=draft_facts,
        tree=tree_info,
        others=traits_of_others(config, methods, heads=heads_info, draft=draft_facts),
        gap=gap_of(backbone, {encoded.prompt.id: encoded.ids for encoded in prompts}),
        provenance={**provenance(), "distill": distill_cost(distilled)},
        bootstrap_samples=settings.bootstrap_samples,
        seed=config.seed,
    )
    _write(stage.folder, results, measurements, backbone)
    headline = _headline(results)
    _track(config, stage, headline)
    return headline


def _prompts(config: Config, backbone: Backbone) -> list[EncodedPrompt]:
    wanted = config.evaluate.num_prompts
    prompts = prompts_by_split(config.prompts)["test"][:wanted]
    if len(prompts) < wanted:
        log.warning("evaluate: %d test prompts wanted, there are %d", wanted, len(prompts))
    return encode_prompts(
        prompts,
        backbone,
        system=config.prompts.system,
        max_new_tokens=config.evaluate.max_new_tokens
        + most_guesses(config.evaluate, config.heads.num_heads),
    )


def refuse_trained(prompts: Sequence[EncodedPrompt], rows: Sequence[Row], distilled: Path) -> None:
    """Test prompts must not be among the rows that were trained on or calibrated with.

    Raises:
        DataError: naming one that is.
    """
    known = {row.prompt for row in rows}
    leaked = [encoded.prompt.id for encoded in prompts if encoded.prompt.text in known]
    if leaked:
        raise DataError(
            f"{len(leaked)} of {len(prompts)} test prompts were answered for training in "
            f"{distilled}, first {leaked[0]}: evaluate with the prompts settings of that stage"
        )


def distill_cost(distilled: Path) -> dict[str, Any]:
    """Answer tokens and seconds of the rows that heads and draft model both learn from."""
    manifest = read_manifest(distilled) or {}
    train = manifest.get("summary", {}).get("train", {})
    return {key: train.get(key) for key in ("rows", "tokens", "seconds")}


def _load_draft(config: Config, backbone: Backbone, folder: Path) -> LanguageModel:
    if config.draft.model is not None:
        return load_existing(config.draft.model, backbone, config.model)
    return load_draft(folder, dtype=backbone.dtype, device=backbone.device)


def _write(
    folder: Path,
    results: Results,
    measurements: Mapping[str, Sequence[Any]],
    backbone: Backbone,
) -> None:
    write_results(folder / "results.json", results)
    answers = {
        name: {m.prompt_id: backbone.decode(m.generation.ids) for m in measured}
        for name, measured in measurements.items()
    }
    write_json(folder / "answers.json", answers)
    write_report(folder, results)


def _headline(results: Results) -> dict[str, Any]:
    headline: dict[str, Any] = {}
    measured: dict[str, MethodResult | None] = {
        name: getattr(results.methods, name) for name in ("plain", "draft_model", "medusa")
    }
    for key, method in results.methods.others.items():
        measured[f"{key}_lossy" if method.lossy else key] = method
    for name, method in measured.items():
        if method is not None:
            headline[f"{name}/tokens_per_step"] = method.tokens_per_step
            headline[f"{name}/overhead"] = method.overhead
            headline[f"{name}/speedup"] = method.speedup
            headline[f"{name}/speedup_ci95_low"] = method.speedup_ci95[0]
            headline[f"{name}/speedup_ci95_high"] = method.speedup_ci95[1]
    if results.draft is not None:
        headline["draft_model/acceptance_rate"] = results.draft.acceptance_rate
    return headline


def _track(config: Config, stage: Stage, headline: Mapping[str, Any]) -> None:
    sink = open_sinks(
        stage.folder,
        config.track,
        is_main=True,
        run_name=config.run_name,
        stage=stage.name,
        settings=stage.settings,
    )
    try:
        sink.log({name: value for name, value in headline.items() if value is not None}, 0)
        sink.attach([stage.folder / name for name in REPORT_FILES])
    finally:
        sink.close()
