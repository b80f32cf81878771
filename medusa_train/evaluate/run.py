"""The stage `evaluate`: accuracy, tree, speed, report, in this order."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from medusa_train.config.schema import Config, EvaluateConfig
from medusa_train.data.hidden_states import choose_source
from medusa_train.data.prompts import EncodedPrompt, encode_prompts, prompts_by_split
from medusa_train.data.rows import read_split
from medusa_train.decode import DraftModel, Medusa, Method, Plain
from medusa_train.errors import ConfigError
from medusa_train.evaluate.accuracy import head_accuracy, rank_rows
from medusa_train.evaluate.report import write_report
from medusa_train.evaluate.results import build_results, write_results
from medusa_train.evaluate.results_schema import (
    DraftInfo,
    HeadsInfo,
    ModelInfo,
    Results,
    TreeInfo,
    TreeSize,
)
from medusa_train.evaluate.speed import measure, step_seconds
from medusa_train.evaluate.tree_search import count_paths, grow, simulate
from medusa_train.model.backbone import Backbone
from medusa_train.model.draft import load_draft, load_existing
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.weights import load_heads
from medusa_train.ops.tree import Path as RankPath
from medusa_train.ops.tree import Tree, build_tree
from medusa_train.track.manifest import Stage, write_json
from medusa_train.track.progress import progress
from medusa_train.track.provenance import provenance
from medusa_train.track.sinks import open_sinks

log = logging.getLogger(__name__)

TREE = "tree.json"
REPORT_FILES = ("results.json", "report.md", "speedup.png", "acceptance.png", TREE)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training stage left: a folder, and the summary in its manifest."""

    folder: Path
    summary: Mapping[str, Any]


def evaluate(
    config: Config,
    stage: Stage,
    backbone: Backbone,
    *,
    distilled: Path,
    heads: Trained,
    draft: Trained | None,
) -> dict[str, Any]:
    """Measure plain, draft-model and Medusa decoding; write results, report and plots.

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
    medusa_heads = load_heads(
        heads.folder, dtype=backbone.dtype, device=backbone.device, backbone=backbone
    )
    heads_info, tree, tree_info = _choose_tree(
        config, backbone, medusa_heads, heads, distilled, prompts[0]
    )
    write_json(stage.folder / TREE, {"paths": [list(path) for path in tree.paths]})
    methods: dict[str, Method] = {
        "plain": Plain(backbone),
        "medusa": Medusa(backbone, medusa_heads, tree),
    }
    draft_model = None if draft is None else _load_draft(config, backbone, draft.folder)
    if draft_model is not None:
        for gamma in sorted(set(settings.gammas)):
            method = DraftModel(backbone, draft_model, gamma=gamma)
            methods[method.name] = method
    with progress("evaluate", len(prompts)) as meter:
        measurements = measure(
            methods,
            prompts,
            backbone,
            max_new_tokens=settings.max_new_tokens,
            warmup=settings.warmup_prompts,
            meter=meter,
        )
    results = build_results(
        measurements,
        model=_model_info(config, backbone, len(prompts)),
        heads=heads_info,
        draft=_draft_info(config, draft, draft_model),
        tree=tree_info,
        provenance=provenance(),
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
        max_new_tokens=config.evaluate.max_new_tokens + config.heads.num_heads,
    )


def _choose_tree(
    config: Config,
    backbone: Backbone,
    heads: MedusaHeads,
    trained: Trained,
    distilled: Path,
    prompt: EncodedPrompt,
) -> tuple[HeadsInfo, Tree, TreeInfo]:
    """Accuracies on calibration rows, the tree grown from them, and its size from the clock."""
    settings = config.evaluate
    rows = read_split(distilled / "calibration")
    source = choose_source(
        "auto" if config.medusa1.hidden_states == "cached" else config.medusa1.hidden_states,
        rows,
        backbone,
        num_heads=len(heads),
    )
    max_rank = min(settings.max_rank, heads.shape.head_vocab_size)
    guesses = min(max(max_rank, 5), heads.shape.head_vocab_size)
    ranks = rank_rows(rows, source, heads, backbone, guesses=guesses)
    info = HeadsInfo(
        architecture=_heads_architecture(heads),
        parameters=_parameters(heads),
        bytes=_bytes(heads),
        top1=head_accuracy(ranks, 1),
        top5=head_accuracy(ranks, 5),
        training_tokens=trained.summary["tokens"],
        training_seconds=trained.summary["seconds"],
    )
    if settings.tree == "auto":
        grown = grow(count_paths(ranks, max_rank=max_rank), max(settings.tree_sizes))
        candidates = [grown[:size] for size in sorted(set(settings.tree_sizes))]
    else:
        candidates = [list(settings.tree)]
    trees = [_tree(paths, heads) for paths in candidates]
    curve = _size_curve(trees, ranks, backbone, heads, prompt, settings)
    best = max(range(len(trees)), key=lambda i: curve[i].speedup)
    chosen = trees[best]
    log.info(
        "evaluate: a tree of %d nodes promises %.2f tokens per step and a speed-up of %.2f",
        chosen.nodes,
        curve[best].tokens_per_step,
        curve[best].speedup,
    )
    return (
        info,
        chosen,
        TreeInfo(
            nodes=chosen.nodes,
            depth=chosen.depth[-1],
            paths=[list(path) for path in chosen.paths],
            chosen=curve,
        ),
    )


def _size_curve(
    trees: Sequence[Tree],
    ranks: Sequence[Any],
    backbone: Backbone,
    heads: MedusaHeads,
    prompt: EncodedPrompt,
    settings: EvaluateConfig,
) -> list[TreeSize]:
    """For each tree what it promises: simulated tokens per step over measured step latency."""
    methods: list[Method] = [Plain(backbone), *(Medusa(backbone, heads, tree) for tree in trees)]
    plain, *steps = step_seconds(methods, prompt.ids, repeats=settings.latency_repeats)
    curve = []
    for tree, seconds in zip(trees, steps, strict=True):
        tokens = simulate(ranks, tree.paths)
        curve.append(
            TreeSize(
                nodes=tree.nodes,
                tokens_per_step=tokens,
                step_ms=1e3 * seconds,
                speedup=tokens * plain / seconds,
            )
        )
    return curve


def _tree(paths: Sequence[RankPath], heads: MedusaHeads) -> Tree:
    try:
        return build_tree(paths, num_heads=len(heads), max_rank=heads.shape.head_vocab_size)
    except ValueError as error:
        raise ConfigError(f"evaluate.tree: {error}") from None


def _load_draft(config: Config, backbone: Backbone, folder: Path) -> LanguageModel:
    if config.draft.model is not None:
        return load_existing(config.draft.model, backbone, config.model)
    return load_draft(folder, dtype=backbone.dtype, device=backbone.device)


def _draft_info(
    config: Config, trained: Trained | None, draft: LanguageModel | None
) -> DraftInfo | None:
    if trained is None or draft is None:
        return None
    layers = draft.config.num_hidden_layers
    vocabulary = "whole vocabulary" if draft.token_map is None else f"{draft.vocab_size} tokens"
    origin = config.draft.model or "cut from the target, distilled"
    modules = (draft.decoder, draft.lm_head)
    return DraftInfo(
        architecture=f"{layers} layers, {vocabulary}; {origin}",
        parameters=_parameters(*modules),
        bytes=_bytes(*modules),
        training_tokens=trained.summary["tokens"],
        training_seconds=trained.summary["seconds"],
    )


def _model_info(config: Config, backbone: Backbone, num_prompts: int) -> ModelInfo:
    return ModelInfo(
        name=backbone.name,
        dtype=str(backbone.dtype).removeprefix("torch."),
        device=str(backbone.device),
        parameters=_parameters(backbone.model),
        bytes=_bytes(backbone.model),
        max_new_tokens=config.evaluate.max_new_tokens,
        num_prompts=num_prompts,
    )


def _heads_architecture(heads: MedusaHeads) -> str:
    shape = heads.shape
    lm_head = {
        "own": "own LM heads",
        "shared": "shared LM head",
        "reduced": f"own LM heads over {shape.head_vocab_size} tokens",
    }[shape.lm_head]
    return f"{shape.num_heads} heads x {shape.num_layers} layer(s), {lm_head}"


def _parameters(*modules: nn.Module) -> int:
    return sum(p.numel() for p in _distinct(*modules))


def _bytes(*modules: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in _distinct(*modules))


def _distinct(*modules: nn.Module) -> list[nn.Parameter]:
    """Parameters, tied ones once."""
    return list({id(p): p for module in modules for p in module.parameters()}.values())


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
    for name in ("plain", "draft_model", "medusa"):
        method = getattr(results.methods, name)
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
