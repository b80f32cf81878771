"""The reduced vocabulary: which token ids heads and draft models may guess."""

from collections.abc import Iterable

import torch
from torch import Tensor

from medusa_train.ops.loss import IGNORE


def choose_token_map(answers: Iterable[list[int]], *, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent ids of the answers, ascending; unused room goes to the lowest ids.

    Args:
        answers: token ids of each answer.
        size: how many ids to keep; all of them when it is at least `vocab_size`.
        vocab_size: ids are below this.

    Returns:
        Distinct ids in ascending order, [min(size, vocab_size)], int64.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids in answers:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[: min(size, vocab_size)].sort().values


def coverage(answers: Iterable[list[int]], token_map: Tensor) -> float:
    """Share of the answers' tokens that the map holds, 0 to 1."""
    tokens = torch.tensor([token for ids in answers for token in ids], dtype=torch.long)
    return float(torch.isin(tokens, token_map).float().mean()) if len(tokens) else 0.0


def to_reduced_ids(ids: Tensor, token_map: Tensor) -> Tensor:
    """Backbone ids as places in an ascending `token_map`, [V]; `IGNORE` where it has none."""
    index = torch.searchsorted(token_map, ids.clamp(min=0))
    index = index.clamp(max=token_map.shape[0] - 1)
    return torch.where(token_map[index] == ids, index, IGNORE)
