"""Which token each head must predict, and the cross-entropy of it in memory that does not grow.

Legend: T tokens of a row, P positions, K heads, V vocabulary (of one LM head), D hidden size,
R rank of a low-rank change of the LM head.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

IGNORE = -100  # "no target here", as in torch.nn.functional.cross_entropy

# Distributions to learn at some positions, given as places among P: [p] -> [p, V]
SoftTargets = Callable[[Tensor], Tensor]

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
    low_rank: tuple[Tensor, Tensor] | None = None,
    soft: SoftTargets | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Summed cross-entropy of `hidden @ weight.T` against `targets`, never holding all logits.

    The logits exist for a chunk of positions at a time; their gradient is turned at once into
    that of the inputs (only of those that need one), so backward costs no second pass. Softmax
    and sums run in float32 whatever the dtype of the products.

    Args:
        hidden: [P, D].
        weight: LM head, [V, D].
        targets: ids below V, or `IGNORE`, [P].
        low_rank: a LoRA of the LM head, as `(down, up)`, [P, R] and [V, R]: `down @ up.T` is
            added to the logits. Its gradient costs no [V, D].
        soft: whole distributions to learn instead of single ids, asked for a chunk at a time and
            only where a target counts; the value is then the divergence KL(soft || model), which
            has the gradient of the cross-entropy and is 0 at best.
        compute_dtype: dtype of the matrix products; None means that of `hidden`.

    Returns:
        Scalar float32 sum over the positions that have a target; 0 when none has.
    """
    place = (targets != IGNORE).nonzero().squeeze(1)
    down, up = low_rank or (None, None)
    if len(place) < len(targets):
        hidden, targets = hidden[place], targets[place]
        down = None if down is None else down[place]

    def goals(chunk: slice) -> Tensor:
        return targets[chunk] if soft is None else soft(place[chunk])

    dtype = compute_dtype or hidden.dtype
    return cast(Tensor, _LinearCrossEntropy.apply(hidden, weight, down, up, goals, dtype))  # pyright: ignore[reportUnknownMemberType]


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is made in forward, since the loss is a scalar and scales it linearly."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        down: Tensor | None,
        up: Tensor | None,
        goals: Callable[[slice], Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        # Each input as (tensor in `dtype`, gradient or None)
        inputs = [hidden, weight] if down is None or up is None else [hidden, weight, down, up]
        needed = ctx.needs_input_grad
        new = torch.empty_like if len(hidden) else torch.zeros_like  # chunks fill them all
        grads = [
            new(tensor, dtype=torch.float32) if need else None
            for tensor, need in zip(inputs, needed, strict=False)
        ]
        cast_ups = [tensor.detach().to(dtype) for tensor in inputs[1::2]]
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = max(1, LOGITS_BYTES // (dtype.itemsize * weight.shape[0]))
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            lefts = [tensor[chunk].detach().to(dtype) for tensor in inputs[::2]]
            logits = lefts[0] @ cast_ups[0].T
            for left, right in zip(lefts[1:], cast_ups[1:], strict=True):
                logits.addmm_(left, right.T)
            total += _loss_then_gradient(logits, goals(chunk))
            for i, (left, right) in enumerate(zip(lefts, cast_ups, strict=True)):
                grad_left, grad_right = grads[2 * i : 2 * i + 2]
                if grad_left is not None:
                    grad_left[chunk] = logits @ right
                if grad_right is not None:
                    # The first assigns: a pass over [V, D] is not free
                    add = grad_right.copy_ if start == 0 else grad_right.add_
                    add(logits.T @ left)
        kept = [
            None if grad is None else grad.to(tensor.dtype)
            for grad, tensor in zip(grads, inputs, strict=True)
        ]
        ctx.save_for_backward(*kept)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        grads = [None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors]
        return (*grads, *[None] * (6 - len(grads)))


def softmax_slices(logits: Tensor) -> Tensor:
    """Distributions of logits, [P, V], in their dtype and place; the softmax runs in float32."""
    for part in torch.split(logits, _slice_rows(logits)):
        part.copy_(part.float().softmax(dim=1))
    return logits


def _loss_then_gradient(logits: Tensor, wanted: Tensor) -> Tensor:
    """Summed loss of logits, [P, V], which are overwritten by its gradient.

    `wanted` holds ids, [P], for the cross-entropy, or distributions, [P, V], for the divergence.
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
            soft = soft / soft.sum(dim=1, keepdim=True)  # lower precision rounds the sum off 1
            total += (log_sum - (soft * exact).sum(dim=1)).sum() + torch.xlogy(soft, soft).sum()
            share.sub_(soft)
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
