"""torch.compile of a decoder: for forwards over whole rows, and for decoding in fixed blocks.

Legend: B rows, T tokens, D hidden size.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.errors import ConfigError


def refuse_compile(device: torch.device, setting: str = "model.compile") -> None:
    """Refuse a setting that asks for compiling where nothing would be compiled.

    Raises:
        ConfigError: if the compiler is missing or switched off.
    """
    instead = f"or use {setting}=false"
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise ConfigError(
            f"{setting}=true, but torch.compile is switched off by TORCHDYNAMO_DISABLE=1: "
            f"unset it, {instead}"
        )
    if device.type == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"{setting}=true, but DeepSpeed runs with torch.compile switched off on a CPU: "
            f"launch one process, {instead}"
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"{setting}=true needs a C++ compiler, but {compiler} is not found: install it "
            f"or let the variable CXX name another, {instead}"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"{setting}=true needs triton, which is not installed: pip install triton, {instead}"
        )


def compiled_rows(decoder: nn.Module) -> Callable[..., Any]:
    """A decoder compiled once for any number of rows and tokens.

    Takes `input_ids`, `attention_mask` and `use_cache` as the decoder does. It compiles at the
    first call, and again for training mode and for a LoRA that is switched off or on.
    """
    run = torch.compile(decoder, dynamic=True)

    def forward(*, input_ids: Tensor, attention_mask: Tensor | None, use_cache: bool) -> Any:
        # Without a mask another graph would be made, and one that looks for borders of rows
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        return run(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    return forward


SIZES = 256  # of blocks, batches and caches that one process may decode with


def compile_for_decoding(decoder: nn.Module) -> Callable[..., Any]:
    """A decoder compiled for blocks of fixed sizes; on a GPU its launches become one graph.

    Every new size of block or cache is compiled when it first comes. Its frozen weights are read
    as they are: on a CPU in bfloat16 that is slower than the rearranged ones of `model/packed.py`.
    """
    device = next(decoder.parameters()).device
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    run = torch.compile(decoder, dynamic=False, mode=mode)

    def forward(**inputs: Any) -> Any:
        # Beyond its limit the compiler would fall back to eager without a word
        limits = {"recompile_limit": SIZES, "fail_on_recompile_limit_hit": True}
        with torch._dynamo.config.patch(limits):
            output = run(**inputs)
        # A graph's outputs are lost when another one runs, as that of a method measured in turn
        output.last_hidden_state = output.last_hidden_state.clone()
        return output

    return forward
