"""Settings of the stage `evaluate`."""

from dataclasses import dataclass
from typing import Literal

from medusa_train.config.training import STRICT, require

AlsoName = Literal["lookup", "draft_adaptive", "medusa_typical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How every method decodes."""

    __pydantic_config__ = STRICT
    compile: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What is measured. `tree` is `auto` (searched) or a list of rank paths such as [[0],[0,0]].

    `also` names methods beside plain decoding, Medusa and the draft model with a fixed gamma.
    """

    __pydantic_config__ = STRICT
    num_prompts: int
    max_new_tokens: int
    gammas: tuple[int, ...]
    also: tuple[AlsoName, ...]
    typical_temperature: float
    tree: Literal["auto"] | tuple[tuple[int, ...], ...]
    tree_sizes: tuple[int, ...]
    min_tokens_per_step: float | None
    max_rank: int
    latency_repeats: int
    warmup_prompts: int
    bootstrap_samples: int

    def __post_init__(self) -> None:
        require(
            (self.num_prompts >= 1, f"num_prompts must be at least 1, got {self.num_prompts}"),
            (self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {self.max_new_tokens}"),
            (
                bool(self.gammas) and all(gamma >= 1 for gamma in self.gammas),
                f"gammas needs at least one number, all at least 1, got {list(self.gammas)}",
            ),
            (
                len(set(self.also)) == len(self.also),
                f"also must name each method once, got {list(self.also)}",
            ),
            (
                0.01 <= self.typical_temperature <= 10,
                "typical_temperature must be from 0.01 to 10, since typical acceptance is greedy "
                f"where nothing is drawn, got {self.typical_temperature}",
            ),
            (
                bool(self.tree_sizes) and all(1 <= size <= 256 for size in self.tree_sizes),
                f"tree_sizes needs at least one number from 1 to 256, got {list(self.tree_sizes)}",
            ),
            (
                self.min_tokens_per_step is None or self.min_tokens_per_step >= 1,
                f"min_tokens_per_step must be at least 1 or null, got {self.min_tokens_per_step}",
            ),
            (self.max_rank >= 1, f"max_rank must be at least 1, got {self.max_rank}"),
            (self.latency_repeats >= 5, f"latency_repeats must be >= 5: {self.latency_repeats}"),
            (self.warmup_prompts >= 0, f"warmup_prompts must be >= 0, got {self.warmup_prompts}"),
            (self.bootstrap_samples >= 100, f"bootstrap_samples: {self.bootstrap_samples} < 100"),
            (
                self.tree == "auto" or len(self.tree) > 0,
                "tree is an empty list; use auto or at least one path such as [[0]]",
            ),
        )


def tree_checks(
    tree: tuple[tuple[int, ...], ...], vocab_size: int | None
) -> list[tuple[bool, str]]:
    """What can be said of a given tree without a model; `ops.tree` says the rest."""
    known = {(), *tree}
    orphans = [path for path in tree if path and path[:-1] not in known]
    orphan = list(next(iter(orphans), ()))
    ranks = [rank for path in tree for rank in path]
    bound = 2**31 if vocab_size is None else vocab_size
    return [
        (not orphans, f"evaluate.tree: tree path {orphan} lacks its parent {orphan[:-1]}"),
        (len(set(tree)) == len(tree), "evaluate.tree: a path stands twice"),
        (all(tree), "evaluate.tree: an empty path"),
        (
            all(0 <= rank < bound for rank in ranks),
            f"evaluate.tree: ranks must be 0 to {bound - 1}",
        ),
    ]
