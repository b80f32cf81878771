"""Backbones with 4-bit or 8-bit weights, through bitsandbytes. LM head and embeddings stay whole.

Legend: V vocabulary, D hidden size.
"""

import importlib.util
import logging

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from medusa_train.errors import ConfigError, ModelError

# peft imports bitsandbytes, which then misses aloud a kernel that only its inference would use
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)


def quantization_settings(kind: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """What `from_pretrained` is to do with the linear layers of the decoder.

    Args:
        kind: `nf4`, which quantises its own scales too, or `int8`.
        dtype: that products are computed in; `int8` computes in float16 and gives this one back.

    Raises:
        ConfigError: if bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.quantization={kind} needs bitsandbytes, which is not installed: "
            "pip install 'medusa-train[quantization]', or use model.quantization=null"
        )
    # One line for every layer and call, of casts that cannot be avoided
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_differentiable(model: PreTrainedModel) -> None:
    """On a CPU, 4-bit layers would else lay out their weights anew when they first infer.

    Through that layout no gradient flows, and none is missed aloud.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # pyright: ignore


def check_whole_head(model: PreTrainedModel, name: str) -> None:
    """Heads start from the LM head as it is, [V, D], so that must not be quantised.

    Raises:
        ModelError: if it is.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Module) and not head.weight.is_floating_point():  # pyright: ignore
        raise ModelError(
            f"{name}: the LM head is quantised, which heads cannot start from: load a model that "
            "is not quantised yet and let model.quantization do it"
        )
