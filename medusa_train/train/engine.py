"""Who runs the optimiser: plain torch in one process, or DeepSpeed ZeRO 1, 2 or 3 in several.

Nothing else in `train` knows which. The DeepSpeed engine is in a file of its own, imported only
where it is used.
Weights and optimiser are float32 on both; lower precision is a matter of the objective's products.

Legend: K heads.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa_train.config.schema import DeepSpeedConfig
from medusa_train.config.training import OptimConfig
from medusa_train.errors import CheckpointError, ConfigError, TrainingError
from medusa_train.parallel import World
from medusa_train.train.objectives import Objective


class Engine(Protocol):
    """Gradients of micro-batches, one optimiser step, and the state of both on disk."""

    name: str  # checkpoints of another one cannot be read

    def accumulate(self, batch: Any, scales: Sequence[float]) -> Tensor:
        """Add the gradient of `sum_k scales[k] * S_k`; returns the detached S_k, [K]."""
        ...

    def step(self) -> float:
        """Clip, update and clear the gradients; returns their norm before clipping.

        Raises:
            TrainingError: on every process, and before any weight changes, if the loss or the
                gradient of one is not finite.
        """
        ...

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimiser; every process calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote; every process calls it."""
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
    accumulation = check_launch(optim, config, world)
    if config.engine == "torch" or (config.engine == "auto" and world.size == 1):
        return TorchEngine(objective, optim)
    from medusa_train.train.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(objective, optim, config.zero_stage, accumulation, world, device)


def check_launch(optim: OptimConfig, config: DeepSpeedConfig, world: World) -> int:
    """Whether these settings go with the number of processes; micro-batches a step in one.

    Raises:
        ConfigError: if not, or the batch cannot be divided.
    """
    if config.engine == "torch" and world.size > 1:
        raise ConfigError(
            f"deepspeed.engine=torch runs in one process, but {world.size} were launched: "
            "use deepspeed=zero1 (or zero2, zero3), or launch one process"
        )
    return accumulation_steps(optim, world)


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


def adamw(objective: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """The optimiser of everything that is trained, with one learning rate."""
    parameters = [p for p in objective.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )


class TorchEngine:
    """One process, no process group; a head's backward runs before the next head's forward."""

    name = "torch"
    _WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.pt"

    def __init__(self, objective: Objective, optim: OptimConfig) -> None:
        self._objective = objective
        self._clip = optim.grad_clip
        self._trained = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        self._optimizer = adamw(objective, optim)
        self._finite = True

    def accumulate(self, batch: Any, scales: Sequence[float]) -> Tensor:
        """As `Engine.accumulate`."""
        sums = []
        for loss, scale in zip(self._objective.losses(batch), scales, strict=True):
            (loss * scale).backward()
            sums.append(loss.detach())
        joined = torch.stack(sums)
        self._finite = self._finite and bool(torch.isfinite(joined).all())
        return joined

    def step(self) -> float:
        """As `Engine.step`."""
        norm = float(nn.utils.clip_grad_norm_(self._trained.values(), self._clip))
        finite, self._finite = self._finite, True
        if not finite or not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise TrainingError(not_finite(finite, norm))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def set_lr(self, lr: float) -> None:
        """As `Engine.set_lr`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def save(self, folder: Path) -> None:
        """As `Engine.save`."""
        save_file(self.trained_state(), folder / self._WEIGHTS)
        torch.save(self._optimizer.state_dict(), folder / self._OPTIMIZER)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """As `Engine.load`."""
        stored = load_file(folder / self._WEIGHTS)
        if stored.keys() != self._trained.keys():
            names = sorted(stored.keys() ^ self._trained.keys())
            raise CheckpointError(f"{folder} holds other weights than are trained: {names[0]}")
        for name, parameter in self._trained.items():
            parameter.copy_(stored[name])
        self._optimizer.load_state_dict(torch.load(folder / self._OPTIMIZER, weights_only=True))

    def trained_state(self) -> dict[str, Tensor]:
        """As `Engine.trained_state`."""
        return {name: whole(parameter) for name, parameter in self._trained.items()}

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """As `Engine.gathered`: they always are."""
        return nullcontext()


def whole(parameter: Tensor) -> Tensor:
    """A float32 copy on the CPU."""
    return parameter.detach().to("cpu", torch.float32, copy=True).contiguous()


def not_finite(finite_loss: bool, norm: float) -> str:
    """What to say of a step that is refused."""
    if not finite_loss:
        return "the loss is not finite; no weight was changed"
    return f"the norm of the gradient is {norm}; no weight was changed"
