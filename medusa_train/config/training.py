"""Settings of the stages that train and of what runs them, and what all sections share."""

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


def require(*checks: tuple[bool, str]) -> None:
    """Raise one ValueError that lists the message of every check that does not hold."""
    faults = [message for holds, message in checks if not holds]
    if faults:
        raise ValueError("; ".join(faults))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """One training run: sizes are rows, `max_steps` cuts `epochs` short, intervals are steps."""

    __pydantic_config__ = STRICT
    optimizer: Literal["adamw", "adamw8bit"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    schedule: Literal["cosine", "linear", "constant"]
    warmup_ratio: float
    grad_clip: float
    epochs: int
    max_steps: int | None
    batch_size: int
    micro_batch_size: int
    compute_dtype: DTypeName
    log_every: int
    eval_every: int
    save_every: int
    save_minutes: float | None
    keep_checkpoints: int

    def __post_init__(self) -> None:
        positive = ("epochs", "batch_size", "micro_batch_size", "log_every", "eval_every")
        positive += ("save_every", "keep_checkpoints")
        require(
            (self.lr > 0, f"lr must be above 0, got {self.lr}"),
            (self.weight_decay >= 0, f"weight_decay must be at least 0, got {self.weight_decay}"),
            (all(0 <= beta < 1 for beta in self.betas), f"betas must be in [0, 1): {self.betas}"),
            (0 <= self.warmup_ratio <= 1, f"warmup_ratio must be 0 to 1, got {self.warmup_ratio}"),
            (self.grad_clip > 0, f"grad_clip must be above 0, got {self.grad_clip}"),
            (
                self.max_steps is None or self.max_steps >= 1,
                f"max_steps must be at least 1 or null, got {self.max_steps}",
            ),
            (
                self.save_minutes is None or self.save_minutes > 0,
                f"save_minutes must be above 0 or null, got {self.save_minutes}",
            ),
            *(
                (getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
                for name in positive
            ),
            (
                self.micro_batch_size < 1 or self.batch_size % self.micro_batch_size == 0,
                f"batch_size={self.batch_size} is not a multiple of "
                f"micro_batch_size={self.micro_batch_size}",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """Which engine trains: `auto` is plain torch for one process, DeepSpeed for several.

    `config` is a JSON file of the user's own, which then says the stage and what is offloaded.
    """

    __pydantic_config__ = STRICT
    engine: Literal["auto", "torch", "deepspeed"]
    zero_stage: int | None
    offload: bool
    config: str | None

    def __post_init__(self) -> None:
        own = self.config is not None
        require(
            (
                own or self.zero_stage in (1, 2, 3),
                f"zero_stage is 1, 2 or 3, got {self.zero_stage}",
            ),
            (
                not own or (self.zero_stage is None and not self.offload),
                f"config={self.config} says the stage and what is offloaded: "
                "use zero_stage=null and offload=false",
            ),
            (
                self.engine == "deepspeed" or not (own or self.offload),
                f"config and offload are for engine=deepspeed, got engine={self.engine}",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Medusa1Config:
    """Heads on a frozen backbone: head k's loss is weighted `head_weight ** k`."""

    __pydantic_config__ = STRICT
    head_weight: float
    soft_targets: bool
    hidden_states: Literal["auto", "cached", "online"]
    optim: OptimConfig

    def __post_init__(self) -> None:
        require((self.head_weight > 0, f"head_weight must be above 0, got {self.head_weight}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Low-rank changes of linear layers, through peft; `lm_head` includes the LM head."""

    __pydantic_config__ = STRICT
    rank: int
    alpha: float
    dropout: float
    last_layers: int | None
    lm_head: bool

    def __post_init__(self) -> None:
        require(
            (self.rank >= 1, f"rank must be at least 1, got {self.rank}"),
            (self.alpha > 0, f"alpha must be above 0, got {self.alpha}"),
            (0 <= self.dropout < 1, f"dropout must be in [0, 1), got {self.dropout}"),
            (
                self.last_layers is None or self.last_layers >= 1,
                f"last_layers must be at least 1 or null, got {self.last_layers}",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Medusa2Config:
    """Heads and backbone together: L_base + heads_weight * ramp * sum_k head_weight ** k * L_k."""

    __pydantic_config__ = STRICT
    start: Literal["medusa1", "fresh"]
    backbone: Literal["lora", "full"]
    lora: LoraSettings
    base_loss: Literal["self_distill", "cross_entropy"]
    keep_near: float
    heads_weight: float
    heads_ramp: Literal["constant", "linear", "sine"]
    head_weight: float
    heads_lr_factor: float
    soft_targets: bool
    hidden_states: Literal["auto", "cached", "online"]
    gradient_checkpointing: bool
    merge: bool
    optim: OptimConfig

    def __post_init__(self) -> None:
        require(
            (self.keep_near >= 0, f"keep_near must be at least 0, got {self.keep_near}"),
            (
                self.keep_near == 0 or self.base_loss == "cross_entropy",
                f"keep_near={self.keep_near} is for base_loss=cross_entropy; self_distill alone "
                "already keeps the backbone near the original: use keep_near=0",
            ),
            (
                self.merge or self.backbone == "lora",
                "merge=false with backbone=full would throw the trained backbone away; "
                "use merge=true",
            ),
            (self.heads_weight > 0, f"heads_weight must be above 0, got {self.heads_weight}"),
            (self.head_weight > 0, f"head_weight must be above 0, got {self.head_weight}"),
            (self.heads_lr_factor > 0, f"heads_lr_factor must be above 0: {self.heads_lr_factor}"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """The draft-model baseline: the target's first layers, distilled; or an existing `model`."""

    __pydantic_config__ = STRICT
    model: str | None
    num_layers: int
    vocab_size: int | None
    optim: OptimConfig

    def __post_init__(self) -> None:
        require(
            (self.num_layers >= 1, f"num_layers must be at least 1, got {self.num_layers}"),
            (
                self.vocab_size is None or self.vocab_size >= 2,
                f"vocab_size must be at least 2 or null, got {self.vocab_size}",
            ),
        )
