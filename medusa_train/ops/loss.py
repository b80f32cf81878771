"""Which token each head must predict, and the cross-entropy of it in memory that does not grow.

Legend: T tokens of a row, P positions, K heads, V vocabulary (of one LM head), D hidden size.
"""

from typing import Any, cast

import torch
from torch import Tensor

IGNORE = -100  # "no target here", as in torch.nn.functional.cross_entropy

LOGITS_BYTES = 64 * 2**20  # a chunk of logits is at most this large
CACHE_BYTES = 2 * 2**20  # and on a CPU its softmax is taken in slices that stay in the cache


def head_targets(ids: Tensor, supervised: Tensor, num_heads: int, *, first: int = 2) -> Tensor:
    """Target of every head at every position of one row: head k at t predicts `ids[t + k + 2]`.

    A pair (t, k) is supervised iff its *target* token is, so the last prompt position, which
    makes the first draft at run time, is included. With six tokens `a b c D E F` of which the
    upper-case ones are supervised, and two heads:

        position   0  1  2  3  4  5
        token      a  b  c  D  E  F
        head 0     -  D  E  F  -  -      (two ahead; the base LM head does one ahead: c D E F)
        head 1     D  E  F  -  -  -      (three ahead)

    Args:
        ids: token ids of one row, [T].
        supervised: True where the token is an answer of the model, [T].
        num_heads: K.
        first: how far ahead head 0 looks; 2 for Medusa heads, 1 for a draft or base LM head.

    Returns:
        Target ids, `IGNORE` where there is none, [K, T].
    """
    length = ids.shape[0]
    labels = torch.where(supervised, ids, IGNORE)
    targets = torch.full((num_heads, length), IGNORE, dtype=torch.long, device=ids.device)
    for k in range(num_heads):
        shift = first + k
        if shift < length:
            targets[k, : length - shift] = labels[shift:]
    return targets


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    soft: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Summed cross-entropy of `hidden @ weight.T` against `targets`, never holding all logits.

    The logits exist for a chunk of positions at a time; their gradient is turned at once into
    that of `hidden` and `weight` (only of those that need one), so backward costs no second
    pass. Softmax and sums run in float32 whatever the dtype of the products.

    Args:
        hidden: [P, D].
        weight: LM head, [V, D].
        targets: ids below V, or `IGNORE`, [P].
        soft: whole distributions to learn instead of single ids, [P, V]; only those of positions
            that have a target count.
        compute_dtype: dtype of the matrix products; None means that of `hidden`.

    Returns:
        Scalar float32 sum over the positions that have a target; 0 when none has.
    """
    keep = targets != IGNORE
    if not bool(keep.all()):
        hidden, targets = hidden[keep], targets[keep]
        soft = None if soft is None else soft[keep]
    dtype = compute_dtype or hidden.dtype
    return cast(Tensor, _LinearCrossEntropy.apply(hidden, weight, targets, soft, dtype))  # pyright: ignore[reportUnknownMemberType]


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is made in forward, since the loss is a scalar and scales it linearly."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        soft: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_c = weight.detach().to(dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = max(1, LOGITS_BYTES // (dtype.itemsize * weight.shape[0]))
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden_c = hidden[chunk].detach().to(dtype)
            logits = hidden_c @ weight_c.T
            wanted = targets[chunk] if soft is None else soft[chunk]
            total += _loss_then_gradient(logits, wanted)
            if grad_hidden is not None:
                grad_hidden[chunk] = logits @ weight_c
            if grad_weight is not None:
                grad_weight += logits.T @ hidden_c
        ctx.save_for_backward(
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        )
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden: Tensor | None
        grad_weight: Tensor | None
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            None if grad_hidden is None else grad_hidden.mul_(scale),
            None if grad_weight is None else grad_weight.mul_(scale),
            None,
            None,
            None,
        )


def softmax_slices(logits: Tensor) -> Tensor:
    """Distributions of logits, [P, V], in their dtype and place; the softmax runs in float32."""
    for part in torch.split(logits, _slice_rows(logits)):
        part.copy_(part.float().softmax(dim=1))
    return logits


def _loss_then_gradient(logits: Tensor, wanted: Tensor) -> Tensor:
    """Summed cross-entropy of logits, [P, V], which are overwritten by its gradient.

    `wanted` holds ids, [P], or distributions, [P, V].
    """
    total = logits.new_zeros((), dtype=torch.float32)
    rows = _slice_rows(logits)
    for part, goal in zip(torch.split(logits, rows), torch.split(wanted, rows), strict=True):
        exact = part.float()
        # The best token's share is never tiny, so its logarithm is exact where others' underflow
        share = exact.softmax(dim=1)
        log_sum = exact.amax(dim=1) - share.amax(dim=1).log()
        if goal.dim() == 2:
            soft = goal.float()
            total += (log_sum * soft.sum(dim=1) - (soft * exact).sum(dim=1)).sum()
            share.mul_(soft.sum(dim=1, keepdim=True)).sub_(soft)
        else:
            index = goal.unsqueeze(1)
            total += (log_sum - exact.gather(1, index).squeeze(1)).sum()
            share.scatter_add_(1, index, share.new_full((1, 1), -1.0).expand_as(index))
        part.copy_(share)
    return total


def _slice_rows(logits: Tensor) -> int:
    """How many rows at a time: on a CPU as many as stay in the cache, else all."""
    if logits.device.type != "cpu":
        return max(1, len(logits))
    return max(1, CACHE_BYTES // (4 * logits.shape[1]))
