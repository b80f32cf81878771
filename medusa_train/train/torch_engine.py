"""Plain torch behind the interface of `engine.py`: one process, no process group.

Legend: L losses.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.config.training import OptimConfig
from medusa_train.errors import TrainingError
from medusa_train.train.objective import Objective
from medusa_train.train.optimizer import (
    LossScale,
    make_optimizer,
    not_finite,
    set_group_lr,
    start_moments,
)
from medusa_train.train.stored_state import stored_state, whole, write_state


class TorchEngine:
    """A head's backward runs before the next head's forward."""

    name = "torch"

    def __init__(
        self, objective: Objective, optim: OptimConfig, *, scale_loss: bool = False
    ) -> None:
        """Make the optimiser.

        Args:
            objective: on its device.
            optim: of the stage.
            scale_loss: keep float16 gradients from vanishing.
        """
        self._objective = objective
        self._clip = optim.grad_clip
        self._trained = {n: p for n, p in objective.named_parameters() if p.requires_grad}
        self._optimizer = make_optimizer(objective, optim)
        self._plain = optim.optimizer == "adamw"
        if self._plain:
            start_moments(self._optimizer.state, self._trained.values())
        self._scale = LossScale() if scale_loss else None
        self._updates = 0
        self._finite = True

    def accumulate(self, batch: Any, scales: Sequence[float]) -> Tensor:
        """As `Engine.accumulate`."""
        trunk = self._objective.trunk(batch)
        leaf = trunk.detach().requires_grad_(trunk.requires_grad)
        factor = 1.0 if self._scale is None else self._scale.value
        sums = []
        for loss, scale in zip(self._objective.losses(leaf, batch), scales, strict=True):
            (loss * (scale * factor)).backward()
            sums.append(loss.detach())
        if leaf.grad is not None:
            trunk.backward(leaf.grad)
        joined = torch.stack(sums)
        self._finite = self._finite and bool(torch.isfinite(joined).all())
        return joined

    def step(self) -> dict[str, float]:
        """As `Engine.step`."""
        norms = self._norms()
        total, (finite, self._finite) = float(norms["all"]), (self._finite, True)
        if not finite or not math.isfinite(total):
            self._optimizer.zero_grad()
            if self._scale is None or not finite:
                raise TrainingError(not_finite(finite, total))
            self._scale.overflowed()
        else:
            if total > self._clip:
                nn.utils.clip_grads_with_norm_(self._trained.values(), self._clip, norms["all"])
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._updates += 1
            if self._scale is not None:
                self._scale.held()
        return {name: float(norm) for name, norm in norms.items()}

    def _norms(self) -> dict[str, Tensor]:
        """Of the unscaled gradients: all of them, and each group's."""
        norms = {}
        for group in self._optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if self._scale is not None:
                for gradient in gradients:
                    gradient /= self._scale.value  # a power of two: exact
            norms[group["name"]] = nn.utils.get_total_norm(gradients)
        return {"all": nn.utils.get_total_norm(norms.values()), **norms}

    def set_lr(self, lr: float) -> None:
        """As `Engine.set_lr`."""
        set_group_lr(self._optimizer, lr)

    def save(self, folder: Path) -> None:
        """As `Engine.save`."""
        moments = {
            f"{key}.{name}": value.detach().to("cpu", copy=True).contiguous()
            for name, parameter in self._trained.items()
            for key, value in self._optimizer.state[parameter].items()
            if key != "step"
        }
        counters = {} if self._scale is None else self._scale.counters
        write_state(folder, self.trained_state(), moments, {"updates": self._updates, **counters})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """As `Engine.load`."""
        shapes = {name: parameter.shape for name, parameter in self._trained.items()}
        with stored_state(folder, shapes) as stored:
            self._updates = int(stored.counters["updates"])
            for name, parameter in self._trained.items():
                parameter.copy_(stored.weight(name))
                read = stored.adamw_moments if self._plain else stored.moments
                self._set_moments(parameter, read(name))
            if self._scale is not None and "loss_scale" in stored.counters:
                self._scale.restore(stored.counters)

    def _set_moments(self, parameter: Tensor, found: dict[str, Tensor]) -> None:
        if found:  # 8-bit AdamW has none before its first step
            step = torch.tensor(float(self._updates), device=parameter.device)
            self._optimizer.state[parameter] = {
                "step": step if self._plain else self._updates,
                **{key: value.to(parameter.device) for key, value in found.items()},
            }

    def trained_state(self) -> dict[str, Tensor]:
        """As `Engine.trained_state`."""
        return {name: whole(parameter) for name, parameter in self._trained.items()}

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """As `Engine.gathered`: they always are."""
        return nullcontext()
