"""Which device and which dtype settings mean here; quick to import, as it needs torch alone."""

import os

import torch

from medusa_train.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """`auto` is this process's own GPU where there is one, else the CPU.

    Raises:
        ConfigError: if the device does not exist here.
    """
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device={name}: expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"model.device={name}: expected auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise ConfigError(f"model.device={name}: torch sees no CUDA device; use auto or cpu")
    if device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= found or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"model.device={name}: torch sees {found} CUDA device(s), and under a launcher each "
            "process takes its own; use auto"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As settings spell it, and `choose_dtype` reads it."""
    return str(dtype).removeprefix("torch.")
