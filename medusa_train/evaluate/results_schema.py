"""The keys of `results.json`, as dataclasses; docs/results.md says what each one means.

Shares and rates lie in 0 ... 1, memory is bytes, times are seconds unless a name says `_ms`.
A number that needs decoding steps is null where no answer got beyond its first token.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, JsonValue

from medusa_train.config.evaluation import AlsoName

SCHEMA = "medusa_train.results"
VERSION = 3  # raised by every change of a key, a unit or a meaning


class _Record:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class ModelInfo(_Record):
    """The backbone, and how it was made to answer."""

    name: str
    dtype: str
    device: str
    parameters: int
    bytes: int
    max_new_tokens: int
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class AddedWeights(_Record):
    """What a method needs on top of the backbone; null training: not known."""

    architecture: str
    parameters: int
    bytes: int
    training_tokens: int | None
    training_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class DraftInfo(AddedWeights):
    """The draft model."""


@dataclass(frozen=True, kw_only=True)
class BackboneChange(_Record):
    """What Medusa-2 did to the backbone, on held-out answers of the original one."""

    perplexity_before: float
    perplexity: float
    kl: float
    agreement_before: float
    agreement: float


@dataclass(frozen=True, kw_only=True)
class HeadsInfo(AddedWeights):
    """The Medusa heads; accuracies are one per head, on held-out rows."""

    top1: list[float]
    top5: list[float]
    backbone_change: BackboneChange | None = None


@dataclass(frozen=True, kw_only=True)
class TreeSize(_Record):
    """One point of the curve that the tree's size was chosen from (an estimate)."""

    nodes: int
    tokens_per_step: float
    step_ms: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class TreeInfo(_Record):
    """The tree that Medusa used; nodes are drafted ones, the root is not counted."""

    nodes: int
    depth: int
    paths: list[list[int]]
    chosen: list[TreeSize]


@dataclass(frozen=True, kw_only=True)
class Exactness(_Record):
    """How many answers equal plain decoding's; the lists go over the differing ones."""

    prompts: int
    identical: int
    first_difference: list[int]
    differing_prompts: list[str]
    # Of the target's logits of both tokens, in spacings of its dtype; null where one answer ends
    gaps: list[float | None]


@dataclass(frozen=True, kw_only=True)
class KindSpeedup(_Record):
    """Pooled speed-up on the prompts of one kind."""

    speedup: float
    prompts: int


@dataclass(frozen=True, kw_only=True)
class MethodResult(_Record):
    """One way of decoding, measured."""

    architecture: str
    verification: str
    lossy: bool
    temperature: float
    tokens_per_step: float | None
    accepted_drafts_per_step: float | None
    overhead: float | None
    speedup: float
    speedup_ci95: tuple[float, float]
    residual: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    prefill_seconds: float
    decode_seconds: float
    steps: int
    step_ms: float | None
    acceptance_by_depth: list[float]
    exactness: Exactness
    repetition_share: float
    extra_memory_bytes: int
    training_tokens: int | None
    training_seconds: float | None
    speedup_by_kind: dict[str, KindSpeedup]


@dataclass(frozen=True, kw_only=True)
class MedusaResult(MethodResult):
    """Medusa, with the size of its tree."""

    tree_nodes: int


@dataclass(frozen=True, kw_only=True)
class DraftModelResult(MethodResult):
    """The draft model at its fastest number of drafts per step."""

    gamma: int


@dataclass(frozen=True, kw_only=True)
class Methods(_Record):
    """All methods; null where one was not measured, `others` by their names in the settings."""

    plain: MethodResult
    draft_model: DraftModelResult | None
    medusa: MedusaResult | None
    others: dict[AlsoName, MethodResult]


@dataclass(frozen=True, kw_only=True)
class Ratio(_Record):
    """Tokens per second of one method over another's, with its 95 % interval."""

    ratio: float
    ci95: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Comparison(_Record):
    """Methods against each other."""

    medusa_over_draft: Ratio | None
    medusa_over_others: dict[AlsoName, Ratio]


@dataclass(frozen=True, kw_only=True)
class GammaResult(_Record):
    """The draft model at one number of drafts per step."""

    speedup: float
    speedup_ci95: tuple[float, float]
    tokens_per_step: float | None
    acceptance_rate: float | None
    overhead: float | None


@dataclass(frozen=True, kw_only=True)
class DraftResult(DraftInfo):
    """The draft model, its acceptance rate at the fastest gamma, and every gamma tried."""

    acceptance_rate: float | None
    by_gamma: dict[str, GammaResult]


@dataclass(frozen=True, kw_only=True)
class Bootstrap(_Record):
    """How the intervals were drawn."""

    samples: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Results(_Record):
    """Everything that `results.json` holds."""

    schema: Literal["medusa_train.results"]
    version: Literal[3]
    model: ModelInfo
    methods: Methods
    comparison: Comparison
    heads: HeadsInfo | None
    draft: DraftResult | None
    tree: TreeInfo | None
    bootstrap: Bootstrap
    provenance: dict[str, JsonValue]
