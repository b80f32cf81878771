"""DeepSpeed ZeRO 1, 2 and 3 behind the interface of `engine.py`; nothing else trains with it.

Stage 0 is not offered: it has no guard against a gradient that is not finite.
"""

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.config.training import OptimConfig
from medusa_train.errors import ConfigError, TrainingError
from medusa_train.parallel import World
from medusa_train.train.deepspeed_package import objection, start_deepspeed
from medusa_train.train.objective import Objective
from medusa_train.train.optimizer import (
    make_optimizer,
    not_finite,
    set_group_lr,
    start_moments,
)
from medusa_train.train.stored_state import MOMENTS, stored_state, whole, write_state


class DeepSpeedEngine:
    """DeepSpeed with a torch AdamW and its own mixed precision off.

    That keeps one and two processes equal to a few float32 roundings, and needs no compiler.
    """

    def __init__(
        self,
        objective: Objective,
        optim: OptimConfig,
        settings: Mapping[str, Any],
        world: World,
        device: torch.device,
    ) -> None:
        """Hand over everything that is trained.

        Args:
            objective: on its device, its weights whole: ZeRO-3 shards them here.
            optim: of the stage.
            settings: DeepSpeed's own, from `deepspeed_settings`.
            world: this process among the others.
            device: of everything.
        """
        stage = settings["zero_optimization"]["stage"]
        self.name = f"deepspeed zero{stage}"
        self._deepspeed = start_deepspeed(world, device)
        self._utils = importlib.import_module("deepspeed.utils")
        self._zero3 = stage == 3
        self._world = world
        self._device = device
        # DeepSpeed averages over micro-batches and processes; the scales ask for the plain sum
        self._prescale = float(settings["gradient_accumulation_steps"] * world.size)
        self._trained = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        self._shapes = {name: parameter.shape for name, parameter in self._trained.items()}
        self._engine = self._initialize(objective, optim, settings)
        self._start_moments()
        self._pending = False
        self._finite = True

    def _initialize(
        self, objective: Objective, optim: OptimConfig, settings: Mapping[str, Any]
    ) -> Any:
        optimizer = make_optimizer(objective, optim)
        try:
            return self._deepspeed.initialize(
                model=objective, optimizer=optimizer, config=dict(settings)
            )[0]
        except Exception as error:  # of many kinds
            reason = objection(error, settings)
            raise ConfigError(f"DeepSpeed refuses its configuration: {reason}") from error

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

    def step(self) -> dict[str, float]:
        """As `Engine.step`; DeepSpeed tells only the norm of all gradients."""
        bad = torch.tensor(0.0 if self._finite else 1.0, device=self._device)
        finite, self._finite = float(self._world.sum(bad)) == 0.0, True
        if not finite:
            raise TrainingError(not_finite(finite, math.nan))
        self._engine.step()
        self._pending = False
        if not self._engine.was_step_applied():  # then its norm may be that of the step before
            raise TrainingError(not_finite(finite, math.inf))
        return {"all": float(self._engine.get_global_grad_norm())}

    def set_lr(self, lr: float) -> None:
        """As `Engine.set_lr`."""
        set_group_lr(self._engine.optimizer, lr)

    def save(self, folder: Path) -> None:
        """As `Engine.save`: gathered one tensor at a time, kept by the first process alone."""
        weights, moments = {}, {}
        for name, parameter in self._trained.items():
            found = self._utils.safe_get_full_fp32_param(parameter)
            if self._world.is_main:
                weights[name] = whole(found)
            for key in MOMENTS:
                found = self._utils.safe_get_full_optimizer_state(parameter, key)
                if self._world.is_main:
                    moments[f"{key}.{name}"] = whole(found)
        if self._world.is_main:
            updates = max(float(state["step"]) for state in self._states())
            write_state(folder, weights, moments, {"updates": updates})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """As `Engine.load`: every process reads one tensor at a time and keeps its share."""
        with stored_state(folder, self._shapes) as stored:
            for name, parameter in self._trained.items():
                weight = stored.weight(name)
                with self._gathered([parameter], modifier_rank=0):
                    parameter.data.copy_(weight)
                self._set_weight(parameter, weight)
                for key, value in stored.adamw_moments(name).items():
                    self._set_moment(parameter, value, key)
            for state in self._states():
                state["step"].fill_(stored.counters["updates"])

    def trained_state(self) -> dict[str, Tensor]:
        """As `Engine.trained_state`."""
        return {
            name: whole(self._utils.safe_get_full_fp32_param(parameter))
            for name, parameter in self._trained.items()
        }

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """As `Engine.gathered`."""
        return self._gathered(list(module.parameters()))

    def _gathered(
        self, parameters: list[nn.Parameter], modifier_rank: int | None = None
    ) -> AbstractContextManager[Any]:
        if not self._zero3:
            return nullcontext()
        return self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank)

    def _flat_partitions(self) -> list[Tensor]:
        """What the inner AdamW updates: this process's share of each group, in one piece."""
        zero = self._engine.optimizer
        if self._zero3:
            return zero.fp32_partitioned_groups_flat
        return zero.single_partition_of_fp32_groups

    def _states(self) -> Iterator[dict[str, Tensor]]:
        """What the inner AdamW keeps of each share."""
        inner = self._engine.optimizer.optimizer
        return (inner.state[flat] for flat in self._flat_partitions())

    def _start_moments(self) -> None:
        """Make the moments now, so that they can be read and written before the first step.

        DeepSpeed 0.19 itself links them to the parameters of ZeRO 1 and 2 once, when its first
        group has made its first step: those of further groups would stay unknown.
        """
        zero, flats = self._engine.optimizer, self._flat_partitions()
        start_moments(zero.optimizer.state, flats)
        if not self._zero3:
            for group, flat in zip(zero.bit16_groups, flats, strict=True):
                self._utils.lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)

    def _set_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        if self._zero3:
            self._utils.safe_set_local_fp32_param(parameter, self._share(parameter, value))
        else:
            self._utils.safe_set_full_fp32_param(parameter, value)

    def _set_moment(self, parameter: nn.Parameter, value: Tensor, key: str) -> None:
        if self._zero3:
            share = self._share(parameter, value)
            self._utils.safe_set_local_optimizer_state(parameter, share, key)
        else:
            self._utils.safe_set_full_optimizer_state(parameter, value, key)

    def _share(self, parameter: Any, value: Tensor) -> Tensor:
        """This process's part of a tensor under ZeRO-3, padded as DeepSpeed pads it.

        `safe_set_full_*` cuts the parts without padding, and so fails where there is any.
        """
        size = parameter.ds_tensor.numel()
        padded = F.pad(value.flatten(), (0, size * self._world.size - value.numel()))
        return padded[size * self._world.rank :][:size]
