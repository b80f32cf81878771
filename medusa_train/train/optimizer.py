"""AdamW over everything that is trained, and loss scaling for float16."""

import importlib
import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.training import OptimConfig
from medusa_train.errors import ConfigError, TrainingError
from medusa_train.train.objective import Objective
from medusa_train.train.stored_state import MOMENTS

log = logging.getLogger(__name__)


def make_optimizer(objective: Objective, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser of all groups; `adamw8bit` keeps its moments in 8 bits a number."""
    groups = [
        {
            "params": group.parameters,
            "name": group.name,
            "lr": optim.lr * group.lr_factor,
            "lr_factor": group.lr_factor,
        }
        for group in objective.groups()
    ]
    shared: dict[str, Any] = {
        "lr": optim.lr,
        "betas": optim.betas,
        "weight_decay": optim.weight_decay,
    }
    if optim.optimizer == "adamw8bit":
        return importlib.import_module("bitsandbytes.optim").AdamW8bit(groups, **shared)
    return torch.optim.AdamW(groups, **shared, fused=True)


def refuse_optimizer(optim: OptimConfig) -> None:
    """Refuse an optimiser that this machine cannot run.

    Raises:
        ConfigError: for `adamw8bit` without bitsandbytes or without a CUDA device.
    """
    if optim.optimizer != "adamw8bit":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "optim.optimizer=adamw8bit needs bitsandbytes, which is not installed: "
            "pip install bitsandbytes, or use optim.optimizer=adamw"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "optim.optimizer=adamw8bit needs a CUDA device, and none is found: "
            "use optim.optimizer=adamw"
        )


def set_group_lr(optimizer: Any, lr: float) -> None:
    """Learning rate of every group of an optimiser made here, or of what wraps it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def start_moments(state: Any, tensors: Iterable[Tensor]) -> None:
    """Give AdamW the state of each tensor that it would make itself at its first step."""
    for tensor in tensors:
        state[tensor] = {
            "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
            **{key: torch.zeros_like(tensor) for key in MOMENTS},
        }


def not_finite(finite_loss: bool, norm: float) -> str:
    """What to say of a step that is refused."""
    if not finite_loss:
        return "the loss is not finite; no weight was changed"
    return f"the norm of the gradient is {norm}; no weight was changed"


class LossScale:
    """The power of two that keeps float16 gradients from rounding to zero.

    It halves when a gradient overflows, and that step is left out; it doubles after
    `GROWTH_STEPS` steps without.
    """

    GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.value = 2.0**16
        self.since = 0  # steps since it last changed
        self.skipped = 0  # steps left out in all

    def held(self) -> None:
        """A step was made."""
        self.since += 1
        if self.since == self.GROWTH_STEPS:
            self.value, self.since = self.value * 2, 0

    def overflowed(self) -> None:
        """A step was left out.

        Raises:
            TrainingError: if the scale is already 1: scaling is not what is wrong.
        """
        if self.value <= 1:
            raise TrainingError("the gradient overflows float16 even with a loss scale of 1")
        self.value, self.since, self.skipped = self.value / 2, 0, self.skipped + 1
        log.warning(
            "a gradient overflowed float16: step left out (%d so far), loss scale now %g",
            self.skipped,
            self.value,
        )

    @property
    def counters(self) -> dict[str, float]:
        """Everything there is to know, for a checkpoint."""
        return {
            "loss_scale": self.value,
            "loss_scale_since": float(self.since),
            "skipped_steps": float(self.skipped),
        }

    def restore(self, counters: Any) -> None:
        """Take up what `counters` gave."""
        self.value = counters["loss_scale"]
        self.since = int(counters["loss_scale_since"])
        self.skipped = int(counters["skipped_steps"])
