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
    wanted: Tensor  # where there is a target, in the heads' vocabulary or not, [K, P]
    spans: list[tuple[int, int]]  # among P, the positions of each row that decoding starts from
    states: Tensor  # of all positions of the rows, [Q, D]
    teachers: Tensor  # which of `states` the target itself was computed from, [K, P]; 0 without one


@dataclass(frozen=True, kw_only=True)
class JointBatch:
    """What Medusa-2 reads: whole rows, and the positions at which some loss has a target."""

    ids: Tensor  # padded on the right, [B, T]
    attend: Tensor  # False where padded, [B, T]
    place: Tensor  # of the positions in the flattened rows, [P]
    base_targets: Tensor  # the next token where it is the model's own, or IGNORE, [P]
    targets: Tensor  # of the heads, in their vocabulary, or IGNORE, [K, P]
    wanted: Tensor  # where there is a target, in the heads' vocabulary or not, [K, P]
    spans: list[tuple[int, int]]  # among P, the positions of each row that decoding starts from
    states: Tensor  # of the original model at all positions of the rows, [Q, D]
    teachers: Tensor  # which of `states` each target was computed from, base first, [1 + K, P]


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
    sources, targets, teachers, hidden, spans = source(rows), [], [], [], []
    ahead = torch.arange(1, len(heads) + 1).unsqueeze(1)
    before = taken = 0
    for row, states in zip(rows, sources, strict=True):
        target, place = _taught(row, row_targets(row, len(heads)))
        hidden.append(states[place.to(states.device)])
        targets.append(target)
        teachers.append(torch.where(target != IGNORE, before + place + ahead, 0))
        spans.append(_decoding_span(row, place, target[0], taken))
        before += len(states)
        taken += len(place)
    device = sources[0].device
    joined = torch.cat(targets, dim=1).to(device)
    return HeadBatch(
        hidden=torch.cat(hidden),
        targets=heads.to_head_ids(joined),
        wanted=joined != IGNORE,
        spans=spans,
        states=torch.cat(sources),
        teachers=torch.cat(teachers, dim=1).to(device),
    )


def joint_batch(
    rows: Sequence[Row], source: HiddenSource, heads: MedusaHeads, device: torch.device
) -> JointBatch:
    """Whole rows with the targets of the base LM head and of the heads.

    `source` gives the hidden states of the original model.
    """
    ids, attend = padded(rows, device)
    sources, places, targets, teachers, spans = source(rows), [], [], [], []
    ahead = torch.arange(len(heads) + 1).unsqueeze(1)
    before = taken = 0
    for b, (row, states) in enumerate(zip(rows, sources, strict=True)):
        target, place = _taught(row, row_targets(row, len(heads) + 1, first=1))
        places.append(b * ids.shape[1] + row.states_start + place)
        targets.append(target)
        teachers.append(torch.where(target != IGNORE, before + place + ahead, 0))
        spans.append(_decoding_span(row, place, target[1], taken))
        before += len(states)
        taken += len(place)
    base, *others = torch.cat(targets, dim=1).to(device)
    joined = torch.stack(others)
    return JointBatch(
        ids=ids,
        attend=attend,
        place=torch.cat(places).to(device),
        base_targets=base,
        targets=heads.to_head_ids(joined),
        wanted=joined != IGNORE,
        spans=spans,
        states=torch.cat(sources),
        teachers=torch.cat(teachers, dim=1).to(device),
    )


def _taught(row: Row, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Targets at the positions that have any, [L, P], and these, from `states_start`, [P]."""
    targets = targets[:, row.states_start : len(row.ids) - 1]
    place = (targets != IGNORE).any(dim=0).nonzero().squeeze(1)
    return targets[:, place], place


def _decoding_span(row: Row, place: Tensor, head0: Tensor, taken: int) -> tuple[int, int]:
    """First and last + 1 of the positions in the batch that decoding would start a step from.

    From the last one of the prompt on, as long as head 0 has a target. `taken` positions of other
    rows come before.
    """
    starts = (place + row.states_start >= row.answer_start - 1) & (head0 != IGNORE)
    known = starts.nonzero().squeeze(1).tolist()
    return (taken + known[0], taken + known[-1] + 1) if known else (taken, taken)


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
