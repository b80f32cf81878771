"""Who runs the optimiser: plain torch in one process, or DeepSpeed ZeRO 1, 2 or 3 in several.

Nothing else in `train` knows which. Each is in a file of its own; DeepSpeed's is imported only
where it is used.
Weights and optimiser are float32 on both; lower precision is a matter of the objective's products.

Legend: L losses.
"""

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from medusa_train.config.deepspeed import deepspeed_settings
from medusa_train.config.training import DeepSpeedConfig, OptimConfig
from medusa_train.errors import ConfigError
from medusa_train.model.device import choose_dtype
from medusa_train.parallel import World
from medusa_train.train.objective import Objective
from medusa_train.train.optimizer import refuse_optimizer
from medusa_train.train.torch_engine import TorchEngine

log = logging.getLogger(__name__)


class Engine(Protocol):
    """Gradients of micro-batches, one optimiser step, and the state of both on disk."""

    name: str  # for the record: any engine reads any checkpoint

    def accumulate(self, batch: Any, scales: Sequence[float]) -> Tensor:
        """Add the gradient of `sum_l scales[l] * S_l`; returns the detached S_l, [L]."""
        ...

    def step(self) -> dict[str, float]:
        """Clip, update and clear the gradients.

        Returns:
            Their norm before clipping: of `all`, and of each group where the engine knows it. Not
            finite where float16 overflowed and the step was left out.

        Raises:
            TrainingError: on every process, and before any weight changes, if the loss or the
                gradient of one is not finite.
        """
        ...

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step; each group's is its `lr_factor` times that."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimiser; every process calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Take up what `save` of any engine wrote; every process calls it."""
        ...

    def trained_state(self) -> dict[str, Tensor]:
        """Trained weights by name, whole, float32, on the CPU; every process calls it."""
        ...

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Make the weights of a module whole; every process enters it."""
        ...


def build_engine(
    objective: Objective,
    optim: OptimConfig,
    config: DeepSpeedConfig,
    *,
    world: World,
    device: torch.device,
) -> Engine:
    """The engine that `config` and the number of processes ask for.

    Raises:
        ConfigError: if they do not go together, or the batch cannot be divided.
    """
    accumulation = check_launch(optim, config, world, device)
    float16 = choose_dtype(optim.compute_dtype, device) == torch.float16
    log.info(
        "%d rows a step = %d a micro-batch x %d micro-batches x %d processes",
        optim.batch_size,
        optim.micro_batch_size,
        accumulation,
        world.size,
    )
    for group in objective.groups():
        log.info(
            "training %s: %d tensors, %s parameters, learning rate x %g",
            group.name,
            len(group.parameters),
            f"{sum(p.numel() for p in group.parameters):,}",
            group.lr_factor,
        )
    if not _with_deepspeed(config, world):
        return TorchEngine(objective, optim, scale_loss=float16)
    from medusa_train.train.deepspeed_engine import DeepSpeedEngine

    settings = deepspeed_settings(config, optim, accumulation)
    return DeepSpeedEngine(objective, optim, settings, world, device)


def check_launch(
    optim: OptimConfig, config: DeepSpeedConfig, world: World, device: torch.device
) -> int:
    """Whether these settings go with the launch; micro-batches of one process in a step.

    Needs no model: a run that DeepSpeed would refuse in hours is refused now.

    Raises:
        ConfigError: if not, or the batch cannot be divided.
    """
    if config.engine == "torch" and world.size > 1:
        raise ConfigError(
            f"deepspeed.engine=torch runs in one process, but {world.size} were launched: "
            "use deepspeed=zero1 (or zero2, zero3), or launch one process"
        )
    accumulation = accumulation_steps(optim, world)
    refuse_optimizer(optim)
    if _with_deepspeed(config, world):
        _refuse_under_deepspeed(optim, device)
        settings = deepspeed_settings(config, optim, accumulation)
        if config.config is not None:
            from medusa_train.train.deepspeed_package import refuse_settings

            refuse_settings(settings, config.config, device)
    return accumulation


def _with_deepspeed(config: DeepSpeedConfig, world: World) -> bool:
    return config.engine == "deepspeed" or (config.engine == "auto" and world.size > 1)


def _refuse_under_deepspeed(optim: OptimConfig, device: torch.device) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "several processes, and deepspeed=zero1 to zero3_offload, need DeepSpeed, which is "
            "not installed: pip install deepspeed, or launch one process with deepspeed=none"
        )
    if choose_dtype(optim.compute_dtype, device) == torch.float16:
        raise ConfigError(
            f"optim.compute_dtype={optim.compute_dtype} is float16 here, which needs loss scaling, "
            "and only plain torch on one process does that: use optim.compute_dtype=bfloat16 (or "
            "float32) with DeepSpeed"
        )
    if optim.optimizer != "adamw":
        raise ConfigError(
            f"optim.optimizer={optim.optimizer} is for plain torch on one process; DeepSpeed "
            "shares the moments among processes instead: use optim.optimizer=adamw"
        )


def accumulation_steps(optim: OptimConfig, world: World) -> int:
    """Micro-batches of one process in a step.

    Raises:
        ConfigError: if the batch is not a whole number of them on every process.
    """
    share = world.size * optim.micro_batch_size
    if optim.batch_size % share:
        nearest = max(1, round(optim.batch_size / share)) * share
        raise ConfigError(
            f"optim.batch_size={optim.batch_size} cannot be divided among {world.size} processes "
            f"x micro_batch_size={optim.micro_batch_size}: expected a multiple of {share}, "
            f"such as batch_size={nearest}"
        )
    return optim.batch_size // share
