"""What was compared, in words and sizes: architectures, parameters, bytes."""

from torch import nn

from medusa_train.config.schema import Config
from medusa_train.evaluate.results_schema import DraftInfo, ModelInfo
from medusa_train.model.backbone import Backbone
from medusa_train.model.device import dtype_name
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.track.manifest import Trained


def draft_info(
    config: Config, trained: Trained | None, draft: LanguageModel | None
) -> DraftInfo | None:
    """The draft model, or None where there is none."""
    if trained is None or draft is None:
        return None
    layers = draft.config.num_hidden_layers
    vocabulary = "whole vocabulary" if draft.token_map is None else f"{draft.vocab_size} tokens"
    origin = config.draft.model or "cut from the target, distilled (hard targets)"
    modules = (draft.decoder, draft.lm_head)
    return DraftInfo(
        architecture=f"{layers} layers, {vocabulary}; {origin}",
        parameters=count_parameters(*modules),
        bytes=count_bytes(*modules),
        training_tokens=trained.summary["tokens"],
        training_seconds=trained.summary["seconds"],
    )


def model_info(config: Config, backbone: Backbone, num_prompts: int) -> ModelInfo:
    """The backbone and how it was made to answer."""
    return ModelInfo(
        name=backbone.name,
        dtype=dtype_name(backbone.dtype),
        device=str(backbone.device),
        parameters=count_parameters(backbone.model),
        bytes=count_bytes(backbone.model),
        max_new_tokens=config.evaluate.max_new_tokens,
        num_prompts=num_prompts,
    )


def heads_architecture(heads: MedusaHeads) -> str:
    """Number, depth and LM heads, in words."""
    shape = heads.shape
    lm_head = {
        "own": "own LM heads",
        "shared": "shared LM head",
        "reduced": f"own LM heads over {shape.head_vocab_size} tokens",
    }[shape.lm_head]
    return f"{shape.num_heads} heads x {shape.num_layers} layer(s), {lm_head}"


def count_parameters(*modules: nn.Module) -> int:
    """Of all modules together, tied ones once."""
    return sum(p.numel() for p in _distinct(*modules))


def count_bytes(*modules: nn.Module) -> int:
    """Of all modules' parameters together, tied ones once."""
    return sum(p.numel() * p.element_size() for p in _distinct(*modules))


def _distinct(*modules: nn.Module) -> list[nn.Parameter]:
    """Parameters, tied ones once."""
    return list({id(p): p for module in modules for p in module.parameters()}.values())
