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
    sources = source(rows)
    states = torch.cat(sources)
    taught = _taught(rows, len(heads), first=2)
    joined = taught.targets.to(states.device)
    return HeadBatch(
        hidden=states[taught.stored.to(states.device)],
        targets=heads.to_head_ids(joined),
        wanted=joined != IGNORE,
        spans=taught.spans,
        states=states,
        teachers=taught.teachers.to(states.device),
    )


def joint_batch(
    rows: Sequence[Row], source: HiddenSource, heads: MedusaHeads, device: torch.device
) -> JointBatch:
    """Whole rows with the targets of the base LM head and of the heads.

    `source` gives the hidden states of the original model.
    """
    ids, attend = padded(rows, device)
    taught = _taught(rows, len(heads) + 1, first=1)
    base, *others = taught.targets.to(device)
    joined = torch.stack(others)
    return JointBatch(
        ids=ids,
        attend=attend,
        place=(taught.row * ids.shape[1] + taught.place).to(device),
        base_targets=base,
        targets=heads.to_head_ids(joined),
        wanted=joined != IGNORE,
        spans=taught.spans,
        states=torch.cat(source(rows)),
        teachers=taught.teachers.to(device),
    )


@dataclass(frozen=True, kw_only=True)
class _Taught:
    """The positions of some rows at which something has a target, and the targets there.

    `stored` counts among the Q positions of all rows that have a stored hidden state.
    """

    targets: Tensor  # [L, P]
    row: Tensor  # of each position, [P]
    place: Tensor  # in its row, [P]
    stored: Tensor  # [P]
    teachers: Tensor  # the position that each target was computed from, as in `stored`, [L, P]
    spans: list[tuple[int, int]]  # among P, the positions of each row that decoding starts from


def _taught(rows: Sequence[Row], num_losses: int, *, first: int) -> _Taught:
    """What `num_losses` losses are taught by some rows, the first looking `first` tokens ahead."""
    targets, row_of, places, stored, spans = [], [], [], [], []
    before = taken = 0
    for b, row in enumerate(rows):
        end = len(row.ids) - 1  # nothing follows the last token
        target = row_targets(row, num_losses, first=first)[:, row.states_start : end]
        place = (target != IGNORE).any(dim=0).nonzero().squeeze(1)
        target = target[:, place]
        targets.append(target)
        row_of.append(torch.full_like(place, b))
        places.append(row.states_start + place)
        stored.append(before + place)
        head0 = target[2 - first]  # two ahead
        spans.append(_decoding_span(row, places[-1], head0, taken))
        before += end - row.states_start
        taken += len(place)
    joined, at = torch.cat(targets, dim=1), torch.cat(stored)
    ahead = torch.arange(first - 1, first - 1 + num_losses).unsqueeze(1)
    return _Taught(
        targets=joined,
        row=torch.cat(row_of),
        place=torch.cat(places),
        stored=at,
        teachers=torch.where(joined != IGNORE, at + ahead, 0),
        spans=spans,
    )


def _decoding_span(row: Row, place: Tensor, head0: Tensor, taken: int) -> tuple[int, int]:
    """First and last + 1 of the positions in the batch that decoding would start a step from.

    From the last one of the prompt on, as long as head 0 has a target. `taken` positions of other
    rows come before.
    """
    starts = (place >= row.answer_start - 1) & (head0 != IGNORE)
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
