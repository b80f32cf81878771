"""Every setting of a run, as frozen strict dataclasses. The YAML under `configs/` must match this.

There are no defaults here: they live in `configs/` and nowhere else, since that is what users read.
Lengths are tokens, sizes are rows, times are seconds unless a name says otherwise.
"""

from dataclasses import dataclass
from typing import Literal

from medusa_train.config.evaluation import DecodeConfig, EvaluateConfig, tree_checks
from medusa_train.config.training import (
    STRICT,
    DeepSpeedConfig,
    DraftConfig,
    DTypeName,
    Medusa1Config,
    Medusa2Config,
    require,
)

StageName = Literal["distill", "medusa1", "medusa2", "draft", "evaluate"]
STAGE_ORDER: tuple[StageName, ...] = ("distill", "medusa1", "medusa2", "draft", "evaluate")


FOLDER_NAME = (
    "expected the name of one folder, which is made in outputs: no /, no \\, not . or .., "
    "at most 200 bytes"
)


def is_folder_name(name: str) -> bool:
    """Whether a name is that of one folder, which stays where it is put."""
    plain = name.strip() not in ("", ".", "..") and not set(name) & set("/\\\0")
    return plain and len(name.encode(errors="replace")) <= 200


@dataclass(frozen=True, kw_only=True, slots=True)
class PathsConfig:
    """Where stages read and write; null means a folder of that name under the run's own folder."""

    __pydantic_config__ = STRICT
    distill: str | None
    medusa1: str | None
    medusa2: str | None
    draft: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The backbone: a hub name, a folder, a GGUF file, `package:NAME`, or `random:llama`.

    With `quantization`, `dtype` is what is computed in and what the LM head is kept in.
    """

    __pydantic_config__ = STRICT
    name: str
    revision: str | None
    dtype: DTypeName
    quantization: Literal["nf4", "int8"] | None
    attention: Literal["sdpa", "eager"]
    device: str
    device_map: str | None
    compile: bool
    trust_remote_code: bool

    def __post_init__(self) -> None:
        made_here = self.name == "random:llama"
        gguf = self.name.startswith("package:") or self.name.endswith(".gguf")
        require(
            (
                self.quantization is None or not (gguf or made_here),
                f"quantization={self.quantization} is for weights as a hub or a folder has them, "
                f"but {self.name} is {'made on the spot' if made_here else 'a GGUF file'}: use "
                "quantization=null, or name a model folder",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsConfig:
    """Which prompts are answered and how they are split."""

    __pydantic_config__ = STRICT
    path: str | None
    system: str | None
    calibration_share: float
    test_share: float
    max_train: int | None
    max_calibration: int | None
    max_test: int | None

    def __post_init__(self) -> None:
        shares = (self.calibration_share, self.test_share)
        require(
            (min(shares) > 0, f"calibration_share and test_share must be above 0, got {shares}"),
            (sum(shares) < 1, f"calibration_share + test_share must be below 1, got {shares}"),
            *(
                (value is None or value >= 1, f"{name} must be at least 1 or null, got {value}")
                for name, value in (
                    ("max_train", self.max_train),
                    ("max_calibration", self.max_calibration),
                    ("max_test", self.max_test),
                )
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """How the model answers the training prompts. Calibration prompts are answered greedily."""

    __pydantic_config__ = STRICT
    temperature: float
    top_p: float
    max_new_tokens: int
    batch_size: int
    hidden_states: bool

    def __post_init__(self) -> None:
        require(
            (self.temperature >= 0, f"temperature must be at least 0, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (self.max_new_tokens >= 2, f"max_new_tokens must be >= 2, got {self.max_new_tokens}"),
            (self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsConfig:
    """The architecture of the heads; `vocab_size` is for `reduced` only."""

    __pydantic_config__ = STRICT
    num_heads: int
    num_layers: int
    lm_head: Literal["own", "shared", "reduced"]
    vocab_size: int | None

    def __post_init__(self) -> None:
        require(
            (1 <= self.num_heads <= 16, f"num_heads must be 1 to 16, got {self.num_heads}"),
            (0 <= self.num_layers <= 8, f"num_layers must be 0 to 8, got {self.num_layers}"),
            (
                self.lm_head != "shared" or self.num_layers >= 1,
                "lm_head=shared with num_layers=0 leaves nothing to train; use num_layers=1",
            ),
            (
                (self.lm_head == "reduced") == (self.vocab_size is not None),
                f"vocab_size={self.vocab_size} with lm_head={self.lm_head}: "
                "give a size with lm_head=reduced and null otherwise",
            ),
            (
                self.vocab_size is None or self.vocab_size >= 2,
                f"vocab_size must be at least 2, got {self.vocab_size}",
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackConfig:
    """Weights & Biases; the JSONL file beside it is always written."""

    __pydantic_config__ = STRICT
    mode: Literal["online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run. One recipe drives all its stages."""

    __pydantic_config__ = STRICT
    run_name: str
    description: str
    seed: int
    stages: tuple[StageName, ...]
    paths: PathsConfig
    model: ModelConfig
    prompts: PromptsConfig
    distill: DistillConfig
    heads: HeadsConfig
    medusa1: Medusa1Config
    medusa2: Medusa2Config
    draft: DraftConfig
    decode: DecodeConfig
    evaluate: EvaluateConfig
    deepspeed: DeepSpeedConfig
    track: TrackConfig

    def __post_init__(self) -> None:
        order = [STAGE_ORDER.index(stage) for stage in self.stages]
        tree = () if self.evaluate.tree == "auto" else self.evaluate.tree
        depth = max((len(path) for path in tree), default=0)
        require(
            (bool(self.stages), f"stages is empty; choose from {', '.join(STAGE_ORDER)}"),
            (
                order == sorted(set(order)),
                f"stages={list(self.stages)} must each stand once, in the order "
                f"{', '.join(STAGE_ORDER)}",
            ),
            (
                depth <= self.heads.num_heads,
                f"evaluate.tree is {depth} deep, but heads.num_heads={self.heads.num_heads}: "
                "a path may be at most as long as there are heads",
            ),
            (
                self.medusa1.hidden_states != "cached" or self.distill.hidden_states,
                "medusa1.hidden_states=cached needs distill.hidden_states=true",
            ),
            (
                self.medusa2.hidden_states != "cached" or self.distill.hidden_states,
                "medusa2.hidden_states=cached needs distill.hidden_states=true",
            ),
            (
                not {"medusa2", "evaluate"} <= set(self.stages) or self.medusa2.merge,
                "evaluate measures the merged backbone of medusa2: use medusa2.merge=true, or "
                "leave evaluate out of stages",
            ),
            *self._quantization_checks(),
            (
                not self.model.compile
                or "medusa2" not in self.stages
                or self.deepspeed.zero_stage != 3
                or self.deepspeed.engine == "torch",
                "model.compile=true cannot see through weights that are shared among processes: "
                "use deepspeed=zero2 for medusa2, or model.compile=false",
            ),
            (is_folder_name(self.run_name), f"run_name={self.run_name!r}: {FOLDER_NAME}"),
            (0 <= self.seed < 2**31, f"seed must be from 0 to 2**31 - 1, got {self.seed}"),
            *tree_checks(tree, self.heads.vocab_size),
        )

    def _quantization_checks(self) -> list[tuple[bool, str]]:
        kind = self.model.quantization
        if kind is None:
            return []
        joint, cut = "medusa2" in self.stages, "draft" in self.stages and not self.draft.model
        return [
            (
                not joint or not self.medusa2.merge,
                f"medusa2.merge=true cannot add a LoRA into model.quantization={kind}: use "
                "medusa2.merge=false, which leaves the adapter and the heads",
            ),
            (
                not joint or self.medusa2.backbone == "lora",
                f"medusa2.backbone=full cannot train model.quantization={kind}: use "
                "medusa2.backbone=lora",
            ),
            (
                not cut,
                f"the draft model is cut from the target, and model.quantization={kind} cannot be "
                "trained on: name a draft.model, or leave draft out of stages",
            ),
        ]
