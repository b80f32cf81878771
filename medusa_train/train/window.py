"""What happened in training since the last log, and the metrics made of it.

Legend: L losses.
"""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_train.parallel import World


@dataclass(kw_only=True)
class Window:
    """Sums over the steps of a window, and of its last step the rate and the gradient norms."""

    sums: Tensor  # of losses, on this process, [L], float64
    counts: Tensor  # of their targets, over all processes, [L]
    own_tokens: int = 0  # of the model's own, in the rows that were read, over all processes
    all_tokens: int = 0  # with those of the prompts
    seconds: float = 0.0
    lr: float = 0.0
    norms: dict[str, float] = field(default_factory=dict)  # of the gradient before clipping

    def losses(self, world: World) -> list[float]:
        """Mean of each unweighted loss, over all processes, [L]; 0 where there was no target."""
        return (world.sum(self.sums).cpu() / self.counts.clamp(min=1)).tolist()

    def metrics(self) -> dict[str, float]:
        """Gradient norms, share of supervised tokens, and how many of them a second."""
        norms = {
            "train/grad_norm" + ("" if name == "all" else f"/{name}"): norm
            for name, norm in self.norms.items()
        }
        return {
            **norms,
            "perf/tokens_per_s": self.own_tokens / max(self.seconds, 1e-9),
            "data/supervised_share": self.own_tokens / max(self.all_tokens, 1),
        }


def empty_window(names: Sequence[str], device: torch.device) -> Window:
    """Nothing happened yet to these losses."""
    return Window(
        sums=torch.zeros(len(names), dtype=torch.float64, device=device),
        counts=torch.zeros(len(names), dtype=torch.long),
    )


def reset_peak_memory(device: torch.device) -> None:
    """Forget what earlier stages used, where that can be forgotten: on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gb(device: torch.device) -> float:
    """The most that was in use at once, in GB (1e9 bytes).

    On a GPU what torch had allocated there; on the CPU what the process held since it began.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
