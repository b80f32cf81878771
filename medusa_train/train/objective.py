"""What is optimised, as any engine and the loop see it; and what held-out rows say of it.

An objective owns the trained modules. What a frozen backbone gives stays outside where it can.

Legend: B rows, P positions, L losses, K heads, V vocabulary (of one LM head), D hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.data.rows import Row
from medusa_train.model.lm_head import LogitsAt
from medusa_train.ops.loss import IGNORE, LOGITS_BYTES
from medusa_train.ops.metrics import MISSED, target_ranks, top_k_hits
from medusa_train.ops.tree_growth import predict

# Makes the whole weights of a module readable on this process while it is entered
Gather = Callable[[nn.Module], AbstractContextManager[Any]]

# The original LM head's logits after hidden states, over the learner's vocabulary: [Q, D] -> [Q, V]
Teacher = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that share a learning rate: `lr_factor` times that of the run."""

    name: str
    parameters: list[nn.Parameter]
    lr_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What some held-out rows say; sums and counts, so that those of others can be added."""

    losses: Tensor  # summed cross-entropy against the ids, [L], float64
    counts: Tensor  # its targets, [L], float64
    # Of each row, for each position that decoding would start a step from, the rank of the right
    # token among a head's guesses: MISSED if it is beyond its vocabulary, IGNORE without a target
    ranks: list[Tensor]  # [K, P]
    others: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (sum, count)

    @property
    def means(self) -> list[float]:
        """Mean loss of each, [L]; 0 where there was no target."""
        return (self.losses / self.counts.clamp(min=1)).tolist()

    def hits(self, k: int) -> list[float]:
        """Share of targets among each head's best k guesses, [K]; 0 where there was no target."""
        if not self.ranks:
            return []
        hits, counts = top_k_hits(torch.cat(self.ranks, dim=1), k)
        return (hits / counts.clamp(min=1)).tolist()


def joined(parts: Sequence[Measured]) -> Measured:
    """All of them as one."""
    names = parts[0].others if parts else {}
    return Measured(
        losses=torch.stack([part.losses for part in parts]).sum(dim=0),
        counts=torch.stack([part.counts for part in parts]).sum(dim=0),
        ranks=[rank for part in parts for rank in part.ranks],
        others={
            name: (
                sum(part.others[name][0] for part in parts),
                sum(part.others[name][1] for part in parts),
            )
            for name in names
        },
    )


class Objective(nn.Module, ABC):
    """Sums of losses; the loop divides them by the counts of the whole global step.

    The loss of a step is `sum_l weights[l] * S_l / max(N_l, 1)`, where S_l and N_l are the sum and
    the count of loss l over all micro-batches of all processes.
    """

    names: tuple[str, ...]  # of the losses, such as `head0`, [L]
    score_name = "tokens_per_step"  # what `score` gives

    @abstractmethod
    def weights(self, progress: float) -> tuple[float, ...]:
        """Of each loss in that of a step, [L], at a share of the run from 0 to 1."""

    @abstractmethod
    def groups(self) -> list[ParameterGroup]:
        """Everything that is trained."""

    @abstractmethod
    def batch(self, rows: Sequence[Row]) -> Any:
        """What `trunk` and `losses` read of some rows, on the device."""

    @abstractmethod
    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """Supervised pairs of some rows per loss, [L], int64, on the CPU; no model is run."""

    @abstractmethod
    def trunk(self, batch: Any) -> Tensor:
        """The hidden states that all losses read, [P, D]; with a graph if they are trained too."""

    @abstractmethod
    def losses(self, trunk: Tensor, batch: Any) -> Iterator[Tensor]:
        """Each summed loss in turn, made only when asked for.

        Running backward on one before asking for the next keeps one head's gradients in flight.
        """

    @abstractmethod
    def measure(self, batch: Any, gather: Gather) -> Measured:
        """The held-out view of a batch; without gradients."""

    def score(self, measured: Measured) -> float:
        """What checkpoints are compared by, the higher the better."""
        return predict(measured.ranks)

    def forward(self, batch: Any) -> Tensor:
        """All of `losses`, [L]; for engines that want one graph."""
        return torch.stack(list(self.losses(self.trunk(batch), batch)))

    def train(self, mode: bool = True) -> "Objective":
        """Never in training mode as a whole: a model's own dropout is no part of any recipe."""
        return super().train(False)


def measure_head(
    logits_at: LogitsAt, vocab_size: int, targets: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy, scalar float64, and rank of each target, [P]; a chunk at a time.

    Args:
        logits_at: calls no module: under ZeRO-3 all processes must call one equally often, and
            they have unequal numbers of chunks.
        vocab_size: V.
        targets: ids below V, or `IGNORE`, [P].
        dtype: of the matrix products.
    """
    place = (targets != IGNORE).nonzero().squeeze(1)
    total = torch.zeros((), dtype=torch.float64, device=targets.device)
    ranks = torch.full_like(targets, IGNORE)
    size = max(1, LOGITS_BYTES // (4 * vocab_size))
    for at in place.split(size):
        with products_in(dtype, targets.device):
            logits = logits_at(at).float()
        total += F.cross_entropy(logits, targets[at], reduction="sum")
        ranks[at] = target_ranks(logits, targets[at])
    return total, ranks


def ranks_by_row(ranks: Tensor, wanted: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """`Measured.ranks` from those of a batch.

    Args:
        ranks: `IGNORE` where the head's vocabulary has no such id or there is no target, [K, P].
        wanted: where there is a target, in the vocabulary or not, [K, P].
        spans: of each row, the first position that decoding would start from and the one after
            the last.
    """
    full = torch.where(wanted & (ranks == IGNORE), MISSED, ranks).cpu()
    return [full[:, first:last] for first, last in spans]


def products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in `dtype`, everything else as the weights are."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
