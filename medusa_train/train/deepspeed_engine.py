"""DeepSpeed ZeRO 1, 2 and 3 behind the interface of `engine.py`; nothing else trains with it.

Stage 0 is not offered: it has no guard against a gradient that is not finite.
"""

import importlib
import math
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.config.training import OptimConfig
from medusa_train.errors import CheckpointError, TrainingError
from medusa_train.parallel import World, skip_collectives_build
from medusa_train.train.engine import adamw, not_finite, whole
from medusa_train.train.objectives import Objective


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
            optimizer=adamw(objective, optim),
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
            raise TrainingError(not_finite(finite, math.nan))
        self._engine.step()
        self._pending = False
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm) or norm < 0:  # DeepSpeed itself has left the step out
            raise TrainingError(not_finite(finite, norm))
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
                    state[name] = whole(parameter)
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
    # DeepSpeed calls collectives by names that newer torch versions warn of, at every step
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
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
