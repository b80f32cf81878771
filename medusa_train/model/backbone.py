"""The backbone: a frozen causal LM with its tokenizer, loaded from any supported source."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from medusa_train.config.schema import ModelConfig
from medusa_train.errors import ModelError
from medusa_train.model.compiled import compiled_rows, refuse_compile
from medusa_train.model.device import choose_device, choose_dtype
from medusa_train.model.language_model import LanguageModel, check_head, check_positions
from medusa_train.model.packed import plain_twin
from medusa_train.model.quantization import (
    check_whole_head,
    keep_differentiable,
    quantization_settings,
)
from medusa_train.model.source import resolve
from medusa_train.model.tiny import tiny_llama

# States that a rejected draft cannot be taken out of again
_NO_ROLLBACK = ("mamba", "rwkv", "recurrent", "hybrid", "conv", "lfm", "linear_attention")


class Backbone(LanguageModel):
    """A frozen causal LM and its tokenizer."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str
    ) -> None:
        """Freeze `model` and refuse what cannot be served.

        Raises:
            ModelError: if the model cannot roll back, has an unusual LM head, or counts positions
                by itself.
        """
        _refuse_recurrent(model, name)
        _refuse_own_windows(model, name)
        model.eval().requires_grad_(False)
        lm_head = model.get_output_embeddings()
        if lm_head is None:
            raise ModelError(f"{name}: model type {model.config.model_type} has no LM head")
        if getattr(lm_head, "bias", None) is not None:
            raise ModelError(
                f"{name}: the LM head of model type {model.config.model_type} has a bias, which "
                "heads cannot start from; such a model is not supported"
            )
        check_whole_head(model, name)
        super().__init__(model.get_decoder(), lm_head, valid_ids=len(tokenizer))
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.end_ids = all_end_ids(model, tokenizer)
        self.compiles = False
        check_head(model, self, name)
        check_positions(self, name)

    def compile(self) -> None:
        """Let `hidden_states` run a compiled decoder, which is made at its first call."""
        self.compiles = True
        # Not the fast twin: the compiler cannot see into rearranged weights
        self._rows_decoder = compiled_rows(plain_twin(self.decoder))

    def encode_prompt(self, text: str, system: str | None) -> list[int]:
        """Token ids of one user turn, ready for the answer to begin.

        Raises:
            ModelError: if the tokenizer has no chat template, or it refuses the turns.
        """
        turns = [{"role": "user", "content": text}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        return self.tokenise(self.render(turns))

    def render(self, turns: Sequence[Mapping[str, str]]) -> str:
        """What the chat template makes of turns, up to where the next answer begins.

        Args:
            turns: each with a `role` and its `content`.

        Raises:
            ModelError: if the tokenizer has no chat template, or it refuses the turns.
        """
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"{self.name}: the tokenizer has no chat template, so it is unknown how a prompt "
                "is put; use an instruction-tuned model, or save a chat_template with it"
            )
        try:
            return self.tokenizer.apply_chat_template(  # pyright: ignore
                [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever they like
            raise ModelError(f"{self.name}: the chat template refuses a prompt: {error}") from error

    def tokenise(self, rendered: str) -> list[int]:
        """Token ids of rendered turns; without special tokens, which the template has put in."""
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]  # pyright: ignore

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, for people."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)  # pyright: ignore


def load_backbone(config: ModelConfig) -> Backbone:
    """Load the model and tokenizer that `config` names.

    Raises:
        ModelError: if it cannot be found, read or used.
        ConfigError: if a setting asks for what this machine lacks.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if config.compile:
        refuse_compile(device)
    if config.name == "random:llama":
        model, tokenizer = tiny_llama()
        model = model.to(dtype)  # pyright: ignore
    else:
        model, tokenizer = _load(config, dtype, device)
    if config.device_map is None and config.quantization is None:
        model = model.to(device)  # pyright: ignore
    backbone = Backbone(model, tokenizer, name=config.name)
    if config.compile:
        backbone.compile()
    return backbone


def _load(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    source = resolve(config.name)
    where: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        where["revision"] = config.revision
    where["local_files_only"] = source.only_here()
    if source.gguf_file is not None:
        where["gguf_file"] = source.gguf_file
    extra = dict(where)
    if source.gguf_file is not None:
        extra["quantization_config"] = GgufConfig(dequantize=True)
    if config.device_map is not None:
        extra["device_map"] = config.device_map
    if config.quantization is not None:
        extra["quantization_config"] = quantization_settings(config.quantization, dtype)
        extra.setdefault("device_map", {"": device})  # where the weights are quantised
    try:
        with quiet_transformers(bars=source.is_remote):
            tokenizer = AutoTokenizer.from_pretrained(source.location, **where)
            model = AutoModelForCausalLM.from_pretrained(
                source.location, dtype=dtype, attn_implementation=config.attention, **extra
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.name={config.name} cannot be loaded: {reason} "
            "(expected a hub name, a folder, a .gguf file or package:NAME)"
        ) from error
    if source.gguf_file is not None:
        forget_gguf(model)
    if config.quantization is not None:
        keep_differentiable(model)
    return model, tokenizer


def forget_gguf(model: PreTrainedModel) -> None:
    """A de-quantised model is a plain one: let it be saved as such."""
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None  # pyright: ignore
    model.is_quantized = False  # pyright: ignore


def all_end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end an answer: of the generation config and of the tokenizer."""
    found: set[int] = set()
    for ids in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)  # pyright: ignore
    return frozenset(found)


def _refuse_recurrent(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    kinds = [config.model_type, *(getattr(config, "layer_types", None) or [])]
    bad = [kind for kind in kinds if any(word in kind for word in _NO_ROLLBACK)]
    if model._is_stateful:  # transformers' own mark; not all it should have it
        bad.append(config.model_type)
    if bad:
        raise ModelError(
            f"{name}: layers of type {bad[0]} keep a state that a rejected draft cannot be taken "
            "out of; speculative decoding needs attention layers only"
        )


def _refuse_own_windows(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    if "local" in (getattr(config, "attention_layers", None) or []):  # GPT-Neo
        raise ModelError(
            f"{name}: model type {config.model_type} has local layers with a mask of their own, "
            "which knows no trees and no rows of unequal length; choose another model"
        )


@contextmanager
def quiet_transformers(*, bars: bool = False) -> Iterator[None]:
    """No loading notes of transformers and, unless `bars`, no progress bars of it either."""
    notes = transformers.logging
    verbosity, had_bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    notes.set_verbosity_error()
    with contextlib.ExitStack() as stack:
        stack.callback(notes.set_verbosity, verbosity)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if not bars:
            # The bar over GGUF tensors asks no switch
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            notes.disable_progress_bar()
            if had_bars:
                stack.callback(notes.enable_progress_bar)
        yield
