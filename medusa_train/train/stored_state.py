"""Trained weights and optimiser state on disk: whole, by name, the same whoever wrote them.

`weights.safetensors` holds every trained parameter in float32. `optimizer.safetensors` holds what
the optimiser keeps of each, as `exp_avg.<name>` and `exp_avg_sq.<name>`, and counters as text in
its header. Neither says how many processes there were: that is what makes them portable.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.errors import CheckpointError

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


def whole(tensor: Tensor) -> Tensor:
    """A float32 copy on the CPU, in memory of its own."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def write_state(
    folder: Path,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    counters: Mapping[str, float],
) -> None:
    """Write both files.

    Args:
        folder: exists.
        weights: by parameter name, on the CPU.
        moments: by `<what>.<parameter name>`, on the CPU.
        counters: numbers that `StoredState.counters` gives back exactly.

    Raises:
        CheckpointError: for a tensor of size 0, which is what a sharded one looks like.
    """
    for name, tensor in (*weights.items(), *moments.items()):
        if tensor.numel() == 0:
            raise CheckpointError(
                f"{name} has size 0: it was not gathered from the processes that share it"
            )
    save_file(dict(weights), folder / WEIGHTS)
    header = {name: repr(float(value)) for name, value in counters.items()}
    save_file(dict(moments), folder / OPTIMIZER, metadata=header)


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The two files, open; tensors are read one at a time."""

    folder: Path
    counters: Mapping[str, float]
    _weights: Any
    _moments: Any
    _keys: Mapping[str, list[str]]  # of the moments of each parameter

    def weight(self, name: str) -> Tensor:
        """The weights of a parameter, float32."""
        return self._weights.get_tensor(name)

    def moments(self, name: str) -> dict[str, Tensor]:
        """Whatever the optimiser kept of a parameter, in its own dtypes."""
        return {
            key.partition(".")[0]: self._moments.get_tensor(key) for key in self._keys.get(name, ())
        }

    def adamw_moments(self, name: str) -> dict[str, Tensor]:
        """What AdamW kept of a parameter, float32.

        Raises:
            CheckpointError: if it was another optimiser.
        """
        found = self.moments(name)
        if set(found) != set(MOMENTS):
            raise CheckpointError(
                f"{self.folder} holds {sorted(found)} of {name} for the optimiser, "
                f"expected {sorted(MOMENTS)}; delete it"
            )
        return found


@contextmanager
def stored_state(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[StoredState]:
    """Open what `write_state` wrote.

    Args:
        folder: of the checkpoint.
        shapes: of every parameter that is trained now.

    Raises:
        CheckpointError: if the parameters there have other names or shapes.
    """
    with (
        safe_open(folder / WEIGHTS, "pt") as weights,  # pyright: ignore
        safe_open(folder / OPTIMIZER, "pt") as moments,  # pyright: ignore
    ):
        there = {name: torch.Size(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        _refuse_other_parameters(folder, there, shapes)
        keys: dict[str, list[str]] = {}
        for key in moments.keys():  # noqa: SIM118
            keys.setdefault(key.partition(".")[2], []).append(key)
        counters = {name: float(text) for name, text in (moments.metadata() or {}).items()}
        yield StoredState(
            folder=folder, counters=counters, _weights=weights, _moments=moments, _keys=keys
        )


def _refuse_other_parameters(
    folder: Path, there: Mapping[str, torch.Size], here: Mapping[str, torch.Size]
) -> None:
    faults = [f"{name} is only there" for name in sorted(there.keys() - here.keys())]
    faults += [f"{name} is only here" for name in sorted(here.keys() - there.keys())]
    faults += [
        f"{name} has shape {list(there[name])} there, {list(here[name])} here"
        for name in sorted(there.keys() & here.keys())
        if there[name] != here[name]
    ]
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
        raise CheckpointError(f"{folder} holds other weights than are trained: {shown}")
