"""What is optimised: one summed cross-entropy per head; and what is measured on held-out rows.

An objective owns the trained modules and nothing else, so that all an engine shards is trained.

Legend: B rows, T tokens, P positions, K heads, V vocabulary (of one LM head), D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.data.batch import HeadBatch, TokenBatch, head_batch, row_targets, token_batch
from medusa_train.data.hidden_states import HiddenSource
from medusa_train.data.rows import Row
from medusa_train.model.draft import DraftModel
from medusa_train.model.heads import MedusaHeads
from medusa_train.ops.loss import IGNORE, LOGITS_BYTES, softmax_slices
from medusa_train.ops.metrics import target_ranks

# Makes the whole weights of a module readable on this process while it is entered
Gather = Callable[[nn.Module], AbstractContextManager[Any]]

# The backbone's logits after hidden states, over the heads' vocabulary: [Q, D] -> [Q, V]
Teacher = Callable[[Tensor], Tensor]

# Rows of what `measure` returns
LOSS, TOP1, TOP5, COUNT = range(4)


class Objective(nn.Module):
    """Sums per head; the loop divides them by the counts of the whole global step.

    The loss of a step is `sum_k weights[k] * S_k / max(N_k, 1)`, where S_k and N_k are the sum and
    the count of head k over all micro-batches of all processes.
    """

    weights: tuple[float, ...]  # of each head in the loss, [K]

    def batch(self, rows: Sequence[Row]) -> Any:
        """What `losses` reads of some rows, on the device."""
        raise NotImplementedError

    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """Supervised pairs of some rows per head, [K], int64, on the CPU; no model is run."""
        raise NotImplementedError

    def losses(self, batch: Any) -> Iterator[Tensor]:
        """Summed cross-entropy of each head in turn, made only when asked for.

        Running backward on one before asking for the next keeps one head's gradients in flight.
        """
        raise NotImplementedError

    def measure(self, batch: Any, gather: Gather) -> Tensor:
        """Sums of loss, top-1 hits and top-5 hits, and target counts, [4, K], float64."""
        raise NotImplementedError

    def forward(self, batch: Any) -> Tensor:
        """All of `losses`, [K]; for engines that want one graph."""
        return torch.stack(list(self.losses(batch)))

    def train(self, mode: bool = True) -> "Objective":
        """Never in training mode: dropout would make a resumed run differ from an unbroken one."""
        return super().train(False)


class Medusa1Objective(Objective):
    """Heads on the hidden states of a frozen backbone."""

    def __init__(
        self,
        heads: MedusaHeads,
        source: HiddenSource,
        *,
        shared_lm_head: Tensor | None,
        head_weight: float,
        compute_dtype: torch.dtype,
        teacher: Teacher | None = None,
    ) -> None:
        """Keep the heads; the backbone stays outside, behind `source`.

        Args:
            heads: trained, float32.
            source: gives the hidden states of rows.
            shared_lm_head: the backbone's LM head for `shared` heads, [V, D]; else None.
            head_weight: head k weighs `head_weight ** k`.
            compute_dtype: dtype of the matrix products.
            teacher: the backbone's logits over the heads' vocabulary, [Q, D] -> [Q, V]: heads then
                learn its whole distributions instead of the ids that came out; None for the ids.
        """
        super().__init__()
        self.heads = heads
        self.weights = tuple(head_weight**k for k in range(len(heads)))
        self._source = source
        # Detached, or assigning it would register a parameter
        self._shared = None if shared_lm_head is None else shared_lm_head.detach()
        self._teacher = teacher
        self._dtype = compute_dtype

    def batch(self, rows: Sequence[Row]) -> HeadBatch:
        """Hidden states and targets of the positions that teach something."""
        return head_batch(rows, self._source, self.heads)

    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """As `Objective.target_counts`."""
        counts = torch.zeros(len(self.heads), dtype=torch.long)
        for row in rows:
            targets = row_targets(row, len(self.heads))[:, row.states_start : len(row.ids) - 1]
            if self.heads.token_map is not None:
                targets = self.heads.to_head_ids(targets.to(self.heads.token_map.device)).cpu()
            counts += (targets != IGNORE).sum(dim=1)
        return counts

    def losses(self, batch: HeadBatch) -> Iterator[Tensor]:
        """As `Objective.losses`."""
        taught = None if self._teacher is None else self._distributions(batch.states)
        for k, head in enumerate(self.heads.heads):
            yield head(
                batch.hidden,
                batch.targets[k],
                shared=self._shared,
                soft=None if taught is None else taught[batch.teachers[k]],
                compute_dtype=self._dtype,
            )

    @torch.no_grad()
    def _distributions(self, states: Tensor) -> Tensor:
        """What the backbone itself says after each state, [Q, D] -> [Q, V]; once for all heads."""
        assert self._teacher is not None
        return softmax_slices(self._teacher(states))

    @torch.no_grad()
    def measure(self, batch: HeadBatch, gather: Gather) -> Tensor:
        """As `Objective.measure`."""
        shared = None if self._shared is None else self._shared.to(self._dtype)
        columns = []
        for head, targets in zip(self.heads.heads, batch.targets, strict=True):

            def logits(hidden: Tensor, head: Any = head) -> Tensor:
                return head.logits(hidden, shared=shared)

            with gather(head):
                columns.append(
                    _measure(logits, self._vocab_size, batch.hidden, targets, self._dtype)
                )
        return torch.stack(columns, dim=1)

    @property
    def _vocab_size(self) -> int:
        return self.heads.shape.head_vocab_size


class DraftObjective(Objective):
    """A draft model as a language model of the target's own answers: one "head", one ahead."""

    weights = (1.0,)

    def __init__(
        self, draft: DraftModel, *, compute_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.draft = draft
        self._dtype = compute_dtype
        self._device = device
        self.eval()

    def batch(self, rows: Sequence[Row]) -> TokenBatch:
        """Whole rows, padded."""
        return token_batch(rows, self._device)

    def target_counts(self, rows: Sequence[Row]) -> Tensor:
        """As `Objective.target_counts`."""
        counts = torch.zeros(1, dtype=torch.long)
        for row in rows:
            targets = row_targets(row, 1, first=1)
            if self.draft.token_map is not None:
                targets = self.draft.to_draft_ids(targets.to(self.draft.token_map.device)).cpu()
            counts += (targets != IGNORE).sum()
        return counts

    def losses(self, batch: TokenBatch) -> Iterator[Tensor]:
        """As `Objective.losses`."""
        hidden, targets = self._supervised(batch)
        yield self.draft.lm_head(hidden, targets, compute_dtype=self._dtype)

    @torch.no_grad()
    def measure(self, batch: TokenBatch, gather: Gather) -> Tensor:
        """As `Objective.measure`."""
        hidden, targets = self._supervised(batch)
        head = self.draft.lm_head
        with gather(head):
            # Not called as a module: sharded weights must stay whole over all chunks
            return _measure(
                head.forward, head.out_features, hidden, targets, self._dtype
            ).unsqueeze(1)

    def _supervised(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Hidden states and draft ids of the positions with a target: [P, D], [P]."""
        targets = self.draft.to_draft_ids(batch.targets)
        keep = targets != IGNORE
        attention_mask = None if bool(batch.attend.all()) else batch.attend
        with _products_in(self._dtype, batch.ids.device):
            hidden = self.draft.decoder(
                input_ids=batch.ids, attention_mask=attention_mask, use_cache=False
            ).last_hidden_state
        return hidden[keep].float(), targets[keep]


def _measure(
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
    hidden: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """One head's column of `Objective.measure`, [4], holding a chunk of logits at a time."""
    keep = targets != IGNORE
    hidden, targets = hidden[keep], targets[keep]
    total = torch.zeros(4, dtype=torch.float64, device=hidden.device)
    size = max(1, LOGITS_BYTES // (4 * vocab_size))
    for start in range(0, len(targets), size):
        chunk = targets[start : start + size]
        with _products_in(dtype, hidden.device):
            logits = logits_of(hidden[start : start + size].float()).float()
        ranks = target_ranks(logits, chunk)
        total[LOSS] += F.cross_entropy(logits, chunk, reduction="sum")
        total[TOP1] += (ranks < 1).sum()
        total[TOP5] += (ranks < 5).sum()
        total[COUNT] += len(chunk)
    return total


def _products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in `dtype`, everything else as the weights are."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
