"""Who runs the optimiser: plain torch in one process, or DeepSpeed ZeRO 1, 2 or 3 in several.

Nothing else in `train` knows which. DeepSpeed is imported only where it is used.
Weights and optimiser are float32 on both; lower precision is a matter of the objective's products.

Legend: K heads.
"""

import importlib
import math
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from medusa_train.config.schema import DeepSpeedConfig, OptimConfig
from medusa_train.errors import CheckpointError, ConfigError, TrainingError
from medusa_train.parallel import World, skip_collectives_build
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
    accumulation = accumulation_steps(optim, world)
    if config.engine == "torch" and world.size > 1:
        raise ConfigError(
            f"deepspeed.engine=torch runs in one process, but {world.size} were launched: "
            "use deepspeed=zero1 (or zero2, zero3), or launch one process"
        )
    if config.engine == "torch" or (config.engine == "auto" and world.size == 1):
        return TorchEngine(objective, optim)
    return DeepSpeedEngine(objective, optim, config.zero_stage, accumulation, world, device)


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


def _optimizer(objective: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
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
        self._optimizer = _optimizer(objective, optim)
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
            raise TrainingError(_not_finite(finite, norm))
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
        return {name: _whole(parameter) for name, parameter in self._trained.items()}

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """As `Engine.gathered`: they always are."""
        return nullcontext()


class DeepSpeedEngine:
    """DeepSpeed with a torch AdamW and its own mixed precision off.

    That keeps one and two processes equal to a few float32 roundings, and needs no compiler.
    """

    _TAG = "deepspeed"

    def __init__(
        self,
        objective: Objective,
        optim: OptimConfig,
        zero_stage: int,
        accumulation: int,
        world: World,
        device: torch.device,
    ) -> None:
        self.name = f"deepspeed zero{zero_stage}"
        self._deepspeed = _import_deepspeed(world, device)
        self._zero3 = zero_stage == 3
        self._world = world
        self._device = device
        # DeepSpeed averages over micro-batches and processes; the scales ask for the plain sum
        self._prescale = float(accumulation * world.size)
        self._engine: Any = self._deepspeed.initialize(
            model=objective,
            optimizer=_optimizer(objective, optim),
            config=_settings(optim, zero_stage, accumulation),
        )[0]
        self._pending = False
        self._finite = True

    def accumulate(self, batch: Any, scales: Sequence[float]) -> Tensor:
        """As `Engine.accumulate`."""
        if self._pending:
            self._engine.step()  # not the last micro-batch: only counts it
        sums = self._engine(batch)
        weights = torch.tensor(scales, dtype=sums.dtype, device=sums.device)
        self._engine.backward((sums * weights).sum() * self._prescale)
        self._pending = True
        sums = sums.detach()
        self._finite = self._finite and bool(torch.isfinite(sums).all())
        return sums

    def step(self) -> float:
        """As `Engine.step`."""
        bad = torch.tensor(0.0 if self._finite else 1.0, device=self._device)
        finite, self._finite = float(self._world.sum(bad)) == 0.0, True
        if not finite:
            raise TrainingError(_not_finite(finite, math.nan))
        self._engine.step()
        self._pending = False
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm) or norm < 0:  # DeepSpeed itself has left the step out
            raise TrainingError(_not_finite(finite, norm))
        return norm

    def set_lr(self, lr: float) -> None:
        """As `Engine.set_lr`."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def save(self, folder: Path) -> None:
        """As `Engine.save`."""
        self._engine.save_checkpoint(
            str(folder), tag=self._TAG, save_latest=False, exclude_frozen_parameters=True
        )

    def load(self, folder: Path) -> None:
        """As `Engine.load`."""
        all_trained = all(p.requires_grad for p in self._engine.module.parameters())
        path, _ = self._engine.load_checkpoint(
            str(folder), tag=self._TAG, load_module_strict=all_trained
        )
        if path is None:
            raise CheckpointError(f"{folder} holds no DeepSpeed checkpoint; delete it")

    def trained_state(self) -> dict[str, Tensor]:
        """As `Engine.trained_state`."""
        state = {}
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                with self._gathered([parameter]):
                    state[name] = _whole(parameter)
        return state

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """As `Engine.gathered`."""
        return self._gathered(list(module.parameters()))

    def _gathered(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        if not self._zero3:
            return nullcontext()
        return self._deepspeed.zero.GatheredParameters(parameters)


def _settings(optim: OptimConfig, zero_stage: int, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's own configuration."""
    return {
        "train_micro_batch_size_per_gpu": optim.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optim.grad_clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": zero_stage,
            # Small biases are kept whole; a block's or LM head's matrix never is
            "stage3_param_persistence_threshold": 10_000,
        },
    }


def _import_deepspeed(world: World, device: torch.device) -> Any:
    """DeepSpeed with its process group up, also without a launcher."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cpu":
        # Its Muon optimiser calls torch.compile on import, which takes seconds and is not used
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    deepspeed = importlib.import_module("deepspeed")
    skip_collectives_build()
    if world.size == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(_free_port())}.items():
            os.environ.setdefault(name, value)
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
    return deepspeed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _whole(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True).contiguous()


def _not_finite(finite_loss: bool, norm: float) -> str:
    if not finite_loss:
        return "the loss is not finite; no weight was changed"
    return f"the norm of the gradient is {norm}; no weight was changed"
