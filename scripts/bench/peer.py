"""The losses of the paper as one would write them down: whole rows, all logits, one backward.

Every position goes through every LM head, padding and prompt too; cross-entropy then ignores what
has no target. The logits of all heads are one tensor. Products are in the given dtype, weights and
losses in float32.

Legend: B rows, T tokens, K heads, L losses, V vocabulary, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_train.data.hidden_states import padded
from medusa_train.data.rows import Row
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.student import Student
from medusa_train.ops.loss import IGNORE
from medusa_train.train.objective import products_in


def medusa1(
    backbone: Backbone,
    heads: MedusaHeads,
    rows: Sequence[Row],
    scales: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """Forward and backward of heads on a frozen backbone.

    Args:
        backbone: run as it was loaded.
        heads: with LM heads of their own.
        rows: one micro-batch.
        scales: what each head's sum is multiplied with, [K].
        dtype: of the products.

    Returns:
        The summed losses, [K].
    """
    ids, attend = padded(rows, backbone.device)
    labels = _labels(rows, ids)
    with torch.no_grad():
        hidden = backbone.decoder(
            input_ids=ids, attention_mask=attend, use_cache=False
        ).last_hidden_state
    with products_in(dtype, ids.device):
        logits = torch.stack([head.logits(hidden) for head in heads])
    return _backward([_ahead(logits[k], labels, k + 2) for k in range(len(heads))], scales)


def medusa2(
    backbone: Backbone,
    student: Student,
    heads: MedusaHeads,
    rows: Sequence[Row],
    scales: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """Forward and backward of heads and a LoRA, the base LM head learning the original's logits.

    Args:
        backbone: which the student's LoRA was put onto.
        student: in training.
        heads: with LM heads of their own.
        rows: one micro-batch.
        scales: what each sum is multiplied with, base first, [1 + K].
        dtype: of the products.

    Returns:
        The summed losses, base first, [1 + K].
    """
    ids, attend = padded(rows, student.device)
    labels = _labels(rows, ids)
    with torch.no_grad():
        states = student.original_states(ids, attend, dtype=dtype)
        taught = F.linear(states.to(dtype), backbone.lm_head.weight.detach().to(dtype))  # pyright: ignore
    with products_in(dtype, ids.device):
        hidden = student.hidden_states(ids, attend)
        base = backbone.model.get_output_embeddings()(hidden)
        logits = torch.stack([head.logits(hidden) for head in heads])
    divergence = F.kl_div(
        base.float().log_softmax(dim=-1), taught.float().softmax(dim=-1), reduction="none"
    ).sum(dim=-1)
    own = labels[:, 1:] != IGNORE
    sums = [(divergence[:, :-1] * own).sum()]
    sums += [_ahead(logits[k], labels, k + 2) for k in range(len(heads))]
    return _backward(sums, scales)


def _labels(rows: Sequence[Row], ids: Tensor) -> Tensor:
    """The ids that are the model's own, else `IGNORE`, [B, T]."""
    labels = torch.full_like(ids, IGNORE)
    for b, row in enumerate(rows):
        own = torch.tensor(row.mask, device=ids.device)
        labels[b, : len(row.ids)] = torch.where(own, ids[b, : len(row.ids)], IGNORE)
    return labels


def _ahead(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    """Summed cross-entropy of logits, [B, T, V], against the ids so many places further on."""
    return F.cross_entropy(
        logits[:, :-shift].flatten(0, 1).float(), labels[:, shift:].flatten(), reduction="sum"
    )


def _backward(sums: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    joined = torch.stack(list(sums))
    (joined * joined.new_tensor(scales)).sum().backward()
    return joined.detach()
