"""Drawing tokens: temperature and nucleus, from numbers that belong to the row alone.

Legend: B rows, V vocabulary.
"""

from typing import cast

import torch
from torch import Tensor

GREEDY_BELOW = 1e-4  # a lower temperature is greedy everywhere; dividing by it would overflow


def draw(logits: Tensor, uniform: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """One token a row, by inverting the cumulative distribution.

    Args:
        logits: [B, V].
        uniform: a number in [0, 1) for each row, [B].
        temperature: below `GREEDY_BELOW` the best token is taken.
        top_p: the smallest set of best tokens whose probability reaches this is kept.

    Returns:
        Ids, [B].
    """
    if temperature < GREEDY_BELOW:
        return best_ids(logits)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p == 1:  # any order will do: sorting a vocabulary costs more than a step of the model
        return _at_share(probabilities.cumsum(dim=-1), uniform)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    total = ordered.cumsum(dim=-1)
    kept = (total - ordered < top_p) & (ordered > 0)  # rounding must not reach an excluded id
    mass = total.masked_fill(~kept, 0.0).amax(dim=-1, keepdim=True)
    place = _at_share(torch.minimum(total, mass), uniform)
    return ids.gather(1, place.unsqueeze(1)).squeeze(1)


def _at_share(total: Tensor, uniform: Tensor) -> Tensor:
    """The first place at which running sums exceed a share of their last, [B, V], [B] -> [B]."""
    mass = total[:, -1:]
    place = torch.searchsorted(total, uniform.unsqueeze(1).to(total.dtype) * mass, right=True)
    last = (total < mass).sum(dim=-1, keepdim=True)  # rounding must not go beyond the last share
    return torch.minimum(place, last).squeeze(1)


def best_ids(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)`, the first of equals, [..., V] -> [...].

    On a CPU the plain call goes over a large vocabulary value by value. Here the largest value of
    each block of 128 is found first, which runs on whole vectors.
    """
    width = 128
    if logits.device.type != "cpu" or logits.shape[-1] % width:
        return logits.argmax(dim=-1)
    blocks = cast(Tensor, logits.unflatten(-1, (-1, width)))
    block = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, width)).argmax(dim=-1)
    return (block * width + inside).squeeze(-1)
