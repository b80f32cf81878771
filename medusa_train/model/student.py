"""The backbone as Medusa-2 trains it: with a LoRA (through peft), or a whole copy of it.

Legend: B rows, T tokens, V vocabulary, D hidden size.
"""

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.helpers import disable_input_dtype_casting
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from medusa_train.config.training import LoraSettings
from medusa_train.errors import ConfigError, ModelError
from medusa_train.model.backbone import Backbone, quiet_transformers
from medusa_train.model.compat import checkpoint_activations
from medusa_train.model.compiled import compiled_rows
from medusa_train.model.lm_head import LmHead, LoraLmHead
from medusa_train.track.manifest import replace_folder

_ADAPTER = "default"  # peft's name of the only one


class Student(nn.Module):
    """A decoder that ends with the final norm, and its LM head; what is trained has a gradient.

    With a LoRA the frozen weights are the backbone's own, not a copy.
    """

    def __init__(self, backbone: Backbone, lora: LoraSettings | None, *, seed: int) -> None:
        """Make the backbone trainable.

        Args:
            backbone: frozen; with a LoRA its modules are wrapped in place.
            lora: None trains a float32 copy of every weight.
            seed: of the LoRA's random half.

        Raises:
            ConfigError: if the model cannot be trained so.
        """
        super().__init__()
        if getattr(backbone.config, "final_logit_softcapping", None) is not None:
            raise ConfigError(
                f"{backbone.name} caps its logits (final_logit_softcapping), which medusa2 does "
                "not train; leave medusa2 out of stages"
            )
        self.dtype, self.device = backbone.dtype, backbone.device
        self._peft: tuple[PeftModel, ...] = ()  # in a tuple: its modules are registered below
        if lora is None:
            model: Any = copy.deepcopy(backbone.model).float().requires_grad_(True)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self._peft = (_with_lora(backbone, lora),)
            model = self._peft[0].get_base_model()
        _without_dropout(model)
        self._model = (model,)
        self.decoder = model.get_decoder()
        head = model.get_output_embeddings()
        if isinstance(head, BaseTunerLayer):
            self.lm_head: LmHead | LoraLmHead = LoraLmHead(head, _ADAPTER)
        else:
            self.lm_head = LmHead(head.weight.shape[1], head.weight.shape[0])
            self.lm_head.weight = head.weight  # where tied, still the embeddings' own
        self._compiled = compiled_rows(self.decoder) if backbone.compiles else None

    def hidden_states(self, ids: Tensor, attend: Tensor) -> Tensor:
        """Final-norm hidden states of right-padded rows, [B, T] -> [B, T, D].

        In training mode, for dropout and checkpointing, only where a gradient is wanted.
        """
        self.train(torch.is_grad_enabled())
        attention_mask = None if bool(attend.all()) else attend
        # Autocast makes the products' dtype; peft would make float32 of every input before it
        automatic = torch.is_autocast_enabled(ids.device.type)
        with disable_input_dtype_casting(self.decoder, active=automatic):
            return (self._compiled or self.decoder)(
                input_ids=ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state

    def original_states(self, ids: Tensor, attend: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Final-norm hidden states with the LoRA off: those of the original model.

        Args:
            ids, attend: as in `hidden_states`.
            dtype: of the matrix products.
        """
        with (
            self._peft[0].disable_adapter(),
            torch.autocast(ids.device.type, dtype=dtype, enabled=dtype != torch.float32),
        ):
            return self.hidden_states(ids, attend)

    def checkpoint_gradients(self) -> None:
        """Less memory for a second forward of each layer."""
        checkpoint_activations(self._model[0])

    def save_adapter(self, folder: Path) -> None:
        """The LoRA as peft writes and reads it."""
        (wrapped,) = self._peft
        # The LM head's LoRA makes peft think of the embeddings, which have not changed
        wrapped.save_pretrained(
            str(folder), selected_adapters=[_ADAPTER], save_embedding_layers=False
        )

    def load_adapter(self, folder: Path) -> None:
        """Take up what `save_adapter` wrote.

        Raises:
            ModelError: if it cannot be read, or is another LoRA than this one.
        """
        path, (wrapped,) = folder / SAFETENSORS_WEIGHTS_NAME, self._peft
        try:
            found = set_peft_model_state_dict(wrapped, load_file(path), adapter_name=_ADAPTER)
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{path} cannot be read ({reason}); train medusa2 again") from None
        odd = [*found.unexpected_keys, *(key for key in found.missing_keys if ".lora_" in key)]
        if odd:
            raise ModelError(f"{path} is another LoRA: {odd[0]} is on one side only")

    @torch.no_grad()
    def merged_state(self) -> dict[str, Tensor]:
        """Weights of the whole model with the LoRA added in, by the names of the plain model.

        Each sum is made in float32 and rounded once to the dtype of the backbone.
        """
        (model,) = self._model
        layers = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
        state = {}
        for name, tensor in model.state_dict().items():
            owner = next((n for n in layers if name.startswith(f"{n}.")), None)
            if owner is None:
                state[name] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            elif name == f"{owner}.base_layer.weight":
                layer: Any = layers[owner]
                changed = tensor.float() + layer.get_delta_weight(_ADAPTER).float()
                state[f"{owner}.weight"] = changed.to(self.dtype)
            elif name.startswith(f"{owner}.base_layer."):
                state[name.replace(".base_layer.", ".")] = tensor.to(self.dtype)
        return state

    def save_merged(self, folder: Path, tokenizer: Any) -> None:
        """A plain model folder with the LoRA added in; it appears whole, after it was read back.

        Where a LoRA has changed the LM head of a model with tied embeddings, the saved model has
        an LM head of its own.

        Raises:
            ModelError: if a weight is not finite, or what is read back differs.
        """
        (model,), state = self._model, self.merged_state()
        config = copy.deepcopy(model.config)
        if isinstance(self.lm_head, LoraLmHead):
            config.tie_word_embeddings = False
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        with quiet_transformers():
            with torch.device("meta"):
                plain = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
            plain.load_state_dict(state, assign=True)
            plain.generation_config = model.generation_config
            plain.save_pretrained(part)
            tokenizer.save_pretrained(part)
        _check_merged(part, state)
        replace_folder(part, folder)


def _with_lora(backbone: Backbone, lora: LoraSettings) -> PeftModel:
    """The backbone wrapped by peft, its LoRA in float32 on every linear layer that is asked for."""
    model: Any = backbone.model
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    layers = _layers(decoder)
    if lora.last_layers is not None and lora.last_layers > len(layers):
        raise ConfigError(
            f"medusa2.lora.last_layers={lora.last_layers}, but {backbone.name} has {len(layers)} "
            f"layers: choose 1 to {len(layers)}, or null for all"
        )
    trained = {
        id(module)
        for layer in layers[-(lora.last_layers or len(layers)) :]
        for module in layer.modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    if lora.lm_head:
        trained.add(id(head))
    targets = [name for name, module in model.named_modules() if id(module) in trained]
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]: peft only divides it
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings, which `save_merged` unties
        return get_peft_model(model, settings, adapter_name=_ADAPTER)


def _without_dropout(model: nn.Module) -> None:
    """Switch a model's own dropout off, which no recipe has; that of a LoRA stays."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_dropout." not in f".{name}.":
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout"):  # given to a function of attention
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


def _check_merged(folder: Path, state: dict[str, Tensor]) -> None:
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(f"{file}: {name} is not finite after the LoRA was added in")
            written = state.get(name)  # experts are stored under other names
            if written is not None and not torch.equal(tensor, written.cpu()):
                raise ModelError(f"{file}: {name} reads back differently; is the disk full?")


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's layers, whatever they are called in its family."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            f"{type(decoder).__name__} has no list of layers that a LoRA could be put on; "
            "leave medusa2 out of stages"
        )
    return list(max(lists, key=len))
