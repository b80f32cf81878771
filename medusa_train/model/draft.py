"""The draft model: the target's first layers with a final norm and LM head of their own.

It is cut from the target, trained, saved, and loaded for decoding; or an existing model of the
same tokenizer is taken instead.

Legend: P positions, V vocabulary (of the draft), D hidden size.
"""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from medusa_train.config.schema import ModelConfig
from medusa_train.errors import ConfigError, ModelError
from medusa_train.model.backbone import Backbone, load_backbone, quiet_transformers
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.lm_head import LmHead
from medusa_train.model.vocabulary import to_reduced_ids
from medusa_train.track.manifest import replace_folder, write_json

DRAFT = "draft.json"
REDUCED_HEAD = "draft_head.safetensors"


class DraftModel(nn.Module):
    """A decoder that ends with the final norm, an LM head, and the map of a reduced vocabulary."""

    token_map: Tensor | None

    def __init__(self, decoder: PreTrainedModel, lm_head: LmHead, token_map: Tensor | None) -> None:
        """Put the parts together; `token_map` holds ascending target ids, [V]."""
        super().__init__()
        self.decoder = decoder
        self.lm_head = lm_head
        self.register_buffer("token_map", token_map)

    def to_draft_ids(self, ids: Tensor) -> Tensor:
        """Target ids as the draft's; `IGNORE` where it has none, any shape."""
        return ids if self.token_map is None else to_reduced_ids(ids, self.token_map)


@torch.no_grad()
def cut_draft(
    backbone: Backbone, num_layers: int, token_map: Tensor | None, *, device: torch.device
) -> DraftModel:
    """The first layers of the target in float32, all its own memory; the embeddings are frozen.

    Args:
        backbone: the target.
        num_layers: how many of its layers.
        token_map: ascending target ids of a reduced vocabulary, [V], or None.
        device: where the draft model is to be.

    Raises:
        ConfigError: if the target has fewer layers.
    """
    depth = int(backbone.decoder.config.num_hidden_layers)
    if num_layers > depth:
        raise ConfigError(
            f"draft.num_layers={num_layers}, but {backbone.name} has {depth} layers: "
            f"choose 1 to {depth}"
        )
    config = cut_config(backbone.decoder.config, num_layers)
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        decoder = type(backbone.decoder)(config)
    weights = backbone.decoder.state_dict()
    decoder.float().load_state_dict({name: weights[name] for name in decoder.state_dict()})
    rows = backbone.lm_head.weight.detach()  # pyright: ignore
    if token_map is not None:
        rows = rows[token_map.to(rows.device)]
    lm_head = LmHead(rows.shape[1], rows.shape[0])
    lm_head.weight.copy_(rows)
    decoder.get_input_embeddings().requires_grad_(False)
    return DraftModel(decoder, lm_head, token_map).to(device).eval()


def cut_config(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of a model's settings for its first layers, at most all."""
    cut, depth = copy.deepcopy(config), int(config.num_hidden_layers)
    for name, value in list(vars(cut).items()):
        if isinstance(value, list) and len(value) == depth:  # one entry a layer, as layer_types
            setattr(cut, name, value[:num_layers])
    cut.num_hidden_layers = min(depth, num_layers)
    return cut


def save_draft(folder: Path, draft: DraftModel, *, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a draft model as float32; the folder appears whole, after it was read back.

    With the whole vocabulary it is an ordinary causal LM with its tokenizer. With a reduced one
    it holds the decoder, and `draft_head.safetensors` beside it the LM head and the token map.

    Raises:
        ModelError: if what is read back is not what was trained.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with quiet_transformers():
        if draft.token_map is None:
            _as_causal_lm(draft).save_pretrained(part)
            tokenizer.save_pretrained(part)
        else:
            draft.decoder.save_pretrained(part)
            head = {"weight": draft.lm_head.weight.detach(), "token_map": draft.token_map}
            save_file({k: v.cpu().contiguous() for k, v in head.items()}, part / REDUCED_HEAD)
    write_json(part / DRAFT, {"version": 1, "valid_ids": len(tokenizer)})
    _check_saved(part, draft)
    replace_folder(part, folder)


def load_draft(folder: Path, *, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """A draft model as `save_draft` wrote it, frozen, for decoding.

    Raises:
        ModelError: if the folder is not one, or weights are missing, unknown or of other shapes.
    """
    try:
        valid_ids = json.loads((folder / DRAFT).read_text())["valid_ids"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no draft model in {folder} ({error}); run the stage draft") from None
    if not (folder / REDUCED_HEAD).exists():
        model = _from_folder(AutoModelForCausalLM, folder, dtype).to(device)
        return LanguageModel(
            model.get_decoder(), model.get_output_embeddings(), valid_ids=valid_ids
        )
    decoder = _from_folder(AutoModel, folder, dtype).to(device)
    try:
        stored = load_file(folder / REDUCED_HEAD)
        weight, token_map = stored["weight"], stored["token_map"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"{folder / REDUCED_HEAD} cannot be read ({error})") from None
    expected = (token_map.shape[0], decoder.config.hidden_size)
    if tuple(weight.shape) != expected:
        raise ModelError(
            f"{folder / REDUCED_HEAD}: weight is {list(weight.shape)}, expected {list(expected)}"
        )
    lm_head = LmHead(weight.shape[1], weight.shape[0])
    lm_head.weight.data.copy_(weight)
    lm_head = lm_head.to(device=device, dtype=dtype).eval().requires_grad_(False)
    return LanguageModel(decoder, lm_head, valid_ids=valid_ids, token_map=token_map.to(device))


def load_existing(name: str, backbone: Backbone, settings: ModelConfig) -> LanguageModel:
    """An existing model as the draft model, loaded with the target's other `model` settings.

    Raises:
        ModelError: if it cannot be loaded, or its tokenizer gives an id another meaning.
    """
    draft = load_backbone(
        replace(settings, name=name, revision=None, device_map=None, quantization=None)
    )
    try:
        refuse_other_tokenizer(draft, backbone)
    except ModelError as error:
        raise ModelError(
            f"draft.model={error}, or draft.model=null to cut one from the target"
        ) from None
    valid_ids = min(draft.valid_ids, backbone.valid_ids)
    return LanguageModel(draft.decoder, draft.lm_head, valid_ids=valid_ids)


def refuse_other_tokenizer(draft: LanguageModel, target: LanguageModel) -> None:
    """Refuse a draft whose ids mean other tokens; one without a tokenizer has the target's.

    Raises:
        ModelError: naming the first id that differs.
    """
    kept: list[Any] = [getattr(model, "tokenizer", None) for model in (draft, target)]
    if None in kept or kept[0] is kept[1]:
        return
    theirs, ours = ({i: token for token, i in each.get_vocab().items()} for each in kept)
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            named: list[Any] = [draft, target]
            raise ModelError(
                f"{named[0].name} has another tokenizer than {named[1].name}: id {i} is "
                f"{theirs[i]!r} there, expected {ours[i]!r}; use a draft model of the same family"
            )


@torch.no_grad()
def _as_causal_lm(draft: DraftModel) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(draft.decoder.config)
    model.float().get_decoder().load_state_dict(draft.decoder.state_dict())
    model.get_output_embeddings().weight.copy_(draft.lm_head.weight)
    return model


def _from_folder(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    try:
        with quiet_transformers():
            model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"the draft model in {folder} cannot be loaded: {reason}") from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(fault):
            names = sorted(str(name) for name in info[fault])
            raise ModelError(f"the draft model in {folder} has {fault}: {', '.join(names[:3])}")
    return model.eval().requires_grad_(False)


def _check_saved(folder: Path, draft: DraftModel) -> None:
    stored = load_draft(folder, dtype=torch.float32, device=torch.device("cpu"))
    pairs = [(stored.lm_head.weight, draft.lm_head.weight)]  # pyright: ignore
    ours = draft.decoder.state_dict()
    pairs += [(tensor, ours[name]) for name, tensor in stored.decoder.state_dict().items()]
    for read, written in pairs:
        if not torch.equal(read, written.cpu()) or not bool(torch.isfinite(read).all()):  # pyright: ignore
            raise ModelError(f"{folder}: a weight reads back differently or is not finite")
