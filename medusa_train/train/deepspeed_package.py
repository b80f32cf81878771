"""DeepSpeed, the package: imported without what is not used, and asked what it thinks of settings.

Nothing here is imported where plain torch trains.
"""

import copy
import importlib
import itertools
import os
import socket
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from medusa_train.errors import ConfigError
from medusa_train.parallel import World, skip_collectives_build


def load_deepspeed(device: torch.device) -> Any:
    """The package, kept from guessing the device and from compiling what is not used."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cpu":
        # Its Muon optimiser calls torch.compile on import, which takes seconds and is not used
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # DeepSpeed calls collectives by names that newer torch versions warn of, at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed = importlib.import_module("deepspeed")
    skip_collectives_build()
    return deepspeed


def start_deepspeed(world: World, device: torch.device) -> Any:
    """DeepSpeed with its process group up, also without a launcher."""
    deepspeed = load_deepspeed(device)
    if world.size == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(_free_port())}.items():
            os.environ.setdefault(name, value)
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
    return deepspeed


def refuse_settings(settings: Mapping[str, Any], file: str, device: torch.device) -> None:
    """Let DeepSpeed read what a file of the user's came to, long before anything is trained.

    Args:
        settings: from `deepspeed_settings`.
        file: for the message.
        device: that will be trained on.

    Raises:
        ConfigError: for what it refuses, and for keys that it knows nothing of and would ignore.
    """
    load_deepspeed(device)
    noting = _Noting(copy.deepcopy(dict(settings)))
    try:
        importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig(noting)
    except Exception as error:  # of many kinds
        reason = objection(error, settings)
        raise ConfigError(f"deepspeed.config={file}: DeepSpeed refuses it: {reason}") from error
    unknown = sorted(settings.keys() - noting.read)
    if unknown:
        raise ConfigError(
            f"deepspeed.config={file}: DeepSpeed knows no {', '.join(unknown)}: correct or remove "
            "what it would ignore"
        )


def objection(error: Exception, settings: Mapping[str, Any]) -> str:
    """What DeepSpeed objects to, in one line; each fault of a pydantic list with its key."""
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split()) or type(error).__name__
    lines = []
    for fault in error.errors():
        place = [str(part) for part in fault["loc"]]
        inside = (s for s, v in settings.items() if isinstance(v, dict) and place[0] in v)
        key = ".".join([*itertools.islice(inside, 1), *place])
        known = fault["type"] != "extra_forbidden"
        lines.append(f"{key}: {fault['msg'].lower() if known else 'unknown key'}")
    return "; ".join(lines)


class _Noting(dict[str, Any]):
    """Settings that note which of their keys are read; a shallow copy notes in the same place."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As that of a dict."""
        self.read.add(key)
        return super().get(key, default)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
