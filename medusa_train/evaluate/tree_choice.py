"""Accuracies on held-out rows, the tree grown from them, and its size from the clock."""

import logging
from collections.abc import Sequence

from torch import Tensor

from medusa_train.config.schema import Config
from medusa_train.data.hidden_states import choose_source
from medusa_train.data.rows import Row
from medusa_train.decode import Medusa, Method, Plain
from medusa_train.decode.medusa import HeadGuesses, most_ranks
from medusa_train.errors import ConfigError
from medusa_train.evaluate.accuracy import head_accuracy, rank_rows
from medusa_train.evaluate.describe import (
    count_bytes,
    count_parameters,
    heads_architecture,
)
from medusa_train.evaluate.results_schema import BackboneChange, HeadsInfo, TreeInfo, TreeSize
from medusa_train.evaluate.speed import step_seconds
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.ops.tree import Path as RankPath
from medusa_train.ops.tree import Tree, build_tree
from medusa_train.ops.tree_growth import count_paths, grow, simulate
from medusa_train.track.manifest import Trained

log = logging.getLogger(__name__)


def choose_tree(
    config: Config,
    backbone: Backbone,
    heads: MedusaHeads,
    trained: Trained,
    rows: Sequence[Row],
) -> tuple[HeadsInfo, Tree, TreeInfo]:
    """The heads' accuracies, the tree to decode with, and the curve it was chosen from.

    Args:
        config: the whole run.
        backbone: the target.
        heads: in the dtype they will decode in.
        trained: where they come from.
        rows: held out, with greedy answers.

    Raises:
        ConfigError: if a given tree does not fit the heads.
    """
    settings = config.evaluate
    # Stored states are those of the original backbone, which medusa2 has changed
    stored = trained.stage == "medusa1" and config.medusa1.hidden_states != "online"
    source = choose_source(
        "auto" if stored else "online",
        rows,
        backbone.hidden_states,
        num_heads=len(heads),
        device=backbone.device,
        stage=trained.stage,
    )
    most = most_ranks(backbone, heads)
    max_rank = min(settings.max_rank, most)
    guesses = min(max(max_rank, 5), most)
    ranks = rank_rows(rows, source, heads, backbone, guesses=guesses)
    changed = trained.summary.get("backbone")
    soft = getattr(config, trained.stage).soft_targets
    targets = f" ({'soft' if soft else 'hard'} targets)"
    info = HeadsInfo(
        architecture=heads_architecture(heads) + targets,
        parameters=count_parameters(heads),
        bytes=count_bytes(heads),
        top1=head_accuracy(ranks, 1),
        top5=head_accuracy(ranks, 5),
        training_tokens=trained.summary["tokens"] + trained.summary.get("tokens_before", 0),
        training_seconds=trained.summary["seconds"] + trained.summary.get("seconds_before", 0),
        backbone_change=BackboneChange(**changed) if changed else None,
    )
    if settings.tree == "auto":
        grown = grow(count_paths(ranks, max_rank=max_rank), max(settings.tree_sizes))
        candidates = [grown[:size] for size in sorted(set(settings.tree_sizes))]
    else:
        candidates = [list(settings.tree)]
    trees = [_tree(paths, backbone, heads) for paths in candidates]
    prompt = rows[0].ids[: rows[0].answer_start]  # steps are timed behind it
    curve = _size_curve(trees, ranks, backbone, heads, prompt, config)
    best = fastest(curve, at_least=settings.min_tokens_per_step)
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


def fastest(curve: Sequence[TreeSize], *, at_least: float | None) -> int:
    """Index of the size with the best estimated speed-up among those with enough tokens per step.

    Where none has enough, the one with the most.
    """
    enough = [i for i, size in enumerate(curve) if size.tokens_per_step >= (at_least or 1.0)]
    if not enough:
        most = max(range(len(curve)), key=lambda i: curve[i].tokens_per_step)
        log.warning(
            "evaluate: no tree promises evaluate.min_tokens_per_step=%s; the best promises %.2f",
            at_least,
            curve[most].tokens_per_step,
        )
        return most
    return max(enough, key=lambda i: curve[i].speedup)


def _size_curve(
    trees: Sequence[Tree],
    ranks: Sequence[Tensor],
    backbone: Backbone,
    heads: MedusaHeads,
    prompt: Sequence[int],
    config: Config,
) -> list[TreeSize]:
    """For each tree what it promises: simulated tokens per step over measured step latency."""
    guesses = HeadGuesses(backbone, heads, [1] * len(heads))
    compiled = config.decode.compile
    along = [Medusa(backbone, heads, t, guesses=guesses, compiled=compiled) for t in trees]
    methods: list[Method] = [Plain(backbone, compiled=compiled), *along]
    plain, *steps = step_seconds(methods, prompt, repeats=config.evaluate.latency_repeats)
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


def _tree(paths: Sequence[RankPath], backbone: Backbone, heads: MedusaHeads) -> Tree:
    try:
        return build_tree(paths, num_heads=len(heads), max_rank=most_ranks(backbone, heads))
    except ValueError as error:
        raise ConfigError(f"evaluate.tree: {error}") from None
