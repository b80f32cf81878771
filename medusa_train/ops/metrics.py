"""Ranks of the right tokens. Metrics travel as (sum, count), are reduced, then divided.

Legend: P positions, K heads, V vocabulary, D hidden size.
"""

import torch
from torch import Tensor

from medusa_train.ops.loss import IGNORE

MISSED = 10**6  # the rank of a target that is not among the guesses asked for


def target_ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """How many tokens score above the target, 0 being the best; `IGNORE` where there is no target.

    Ties go against the target except for the first of equals, as `torch.topk` and `argmax` give
    them: a token of a lower id with the same score counts as above.

    Args:
        logits: [P, V].
        targets: ids below V, or `IGNORE`, [P].

    Returns:
        Ranks, [P], int64.
    """
    known = targets != IGNORE
    index = targets.clamp(min=0).unsqueeze(1)
    score = logits.gather(1, index)
    ids = torch.arange(logits.shape[1], device=logits.device)
    above = (logits > score) | ((logits == score) & (ids < index))
    return torch.where(known, above.sum(dim=1), IGNORE)


def top_k_hits(ranks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Hits among the best k and the number of targets, per head.

    Args:
        ranks: as `target_ranks` gives them, [..., P].
        k: how many guesses count.

    Returns:
        (hits, targets), both int64 of shape [...].
    """
    known = ranks != IGNORE
    return (known & (ranks < k)).sum(dim=-1), known.sum(dim=-1)
