"""From rows to what a training step reads, and which rows a step reads.

Legend: B rows, T tokens, P positions that teach, Q all positions, K heads, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.data.hidden_states import HiddenSource, padded
from medusa_train.data.rows import Row
from medusa_train.errors import ConfigError
from medusa_train.model.heads import MedusaHeads
from medusa_train.ops.loss import IGNORE, head_targets


@dataclass(frozen=True, kw_only=True)
class HeadBatch:
    """What Medusa-1 reads: only positions at which some head has a target."""

    hidden: Tensor  # final-norm hidden states, [P, D]
    targets: Tensor  # ids in the heads' vocabulary or IGNORE, [K, P]
    states: Tensor  # of all positions of the rows, [Q, D]
    teachers: Tensor  # which of `states` the target itself was computed from, [K, P]; 0 without one


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """What a draft model reads: whole rows, padded on the right."""

    ids: Tensor  # [B, T]
    attend: Tensor  # False where padded, [B, T]
    targets: Tensor  # the next token where it is the model's own, in full ids, or IGNORE, [B, T]


def row_targets(row: Row, num_heads: int, *, first: int = 2) -> Tensor:
    """`head_targets` of a whole row, [K, T]."""
    ids, mask = torch.tensor(row.ids), torch.tensor(row.mask)
    return head_targets(ids, mask, num_heads, first=first)


def head_batch(rows: Sequence[Row], source: HiddenSource, heads: MedusaHeads) -> HeadBatch:
    """Hidden states and targets of some rows, without the positions that teach nothing."""
    sources, targets, teachers, hidden = source(rows), [], [], []
    ahead = torch.arange(1, len(heads) + 1).unsqueeze(1)
    before = 0
    for row, states in zip(rows, sources, strict=True):
        target = row_targets(row, len(heads))[:, row.states_start : len(row.ids) - 1]
        place = (target != IGNORE).any(dim=0).nonzero().squeeze(1)
        target = target[:, place]
        hidden.append(states[place.to(states.device)])
        targets.append(target)
        teachers.append(torch.where(target != IGNORE, before + place + ahead, 0))
        before += len(states)
    device = sources[0].device
    return HeadBatch(
        hidden=torch.cat(hidden),
        targets=heads.to_head_ids(torch.cat(targets, dim=1).to(device)),
        states=torch.cat(sources),
        teachers=torch.cat(teachers, dim=1).to(device),
    )


def token_batch(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """Ids, mask and next-token targets of some rows."""
    ids, attend = padded(rows, device)
    targets = torch.full(ids.shape, IGNORE, dtype=torch.long)
    for b, row in enumerate(rows):
        targets[b, : len(row.ids)] = row_targets(row, 1, first=1)[0]
    return TokenBatch(ids=ids, attend=attend, targets=targets.to(device))


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Whole batches in an epoch; the rest of the rows has its turn in another epoch's order.

    Raises:
        ConfigError: if there is not even one.
    """
    if num_rows < batch_size:
        raise ConfigError(
            f"batch_size={batch_size}, but there are only {num_rows} training rows: lower "
            "optim.batch_size (and micro_batch_size) or distill more prompts"
        )
    return num_rows // batch_size


def step_rows(step: int, *, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Indices of the rows of the global step `step` (from 0): a function of nothing else.

    Each epoch is a permutation of its own; since the place in the data is the step number, a
    resumed run reads what an unbroken one would.
    """
    epoch, place = divmod(step, steps_per_epoch(num_rows, batch_size))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_rows, generator=generator)
    return order[place * batch_size : (place + 1) * batch_size].tolist()
