"""From logits to the next token: penalties, temperature and filters, and drawing.

Processing follows transformers in order and meaning: repetition penalty, then temperature, top-k,
top-p and min-p. Probabilities are float32 whatever the logits are.

Legend: B rows, V vocabulary.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import cast

import torch
from torch import Tensor

GREEDY_BELOW = 1e-4  # a lower temperature is greedy everywhere; dividing by it would overflow
SEED_RULE = "a whole number of 64 bits"
EXTREME = 1e6  # beyond it scores of float32 are no numbers any more


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token follows from logits. As it stands: greedy, nothing processed."""

    temperature: float = 0.0
    top_k: int = 0  # keep so many of the best tokens; 0 keeps all
    top_p: float = 1.0  # keep the best tokens until their probability reaches this
    min_p: float = 0.0  # keep tokens with at least this share of the best one's probability
    repetition_penalty: float = 1.0  # of every token in prompt and answer
    min_new_tokens: int = 0  # no end id before the answer has so many tokens
    banned_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            (0 <= self.temperature <= EXTREME, "temperature", f"from 0 to {EXTREME:g}"),
            (_whole(self.top_k) and self.top_k >= 0, "top_k", "0 (off) or more, a whole number"),
            (0 < self.top_p <= 1, "top_p", "more than 0, at most 1"),
            (0 <= self.min_p < 1, "min_p", "0 (off) or more, below 1"),
            (
                1 / EXTREME <= self.repetition_penalty <= EXTREME,
                "repetition_penalty",
                f"from {1 / EXTREME:g} to {EXTREME:g}",
            ),
            (
                _whole(self.min_new_tokens) and self.min_new_tokens >= 0,
                "min_new_tokens",
                "0 or more, a whole number",
            ),
            (all(_whole(i) and i >= 0 for i in self.banned_ids), "banned_ids", "token ids"),
            (is_seed(self.seed), "seed", SEED_RULE),
        )
        for holds, name, wanted in rules:
            if not holds:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken rather than one drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def processes(self) -> bool:
        """Whether logits depend on more than the model."""
        return self.repetition_penalty != 1 or self.min_new_tokens > 0 or len(self.banned_ids) > 0


def is_seed(value: object) -> bool:
    """Whether random numbers can begin from it."""
    return isinstance(value, Integral) and -(2**63) <= int(value) < 2**63


def _whole(value: object) -> bool:
    return isinstance(value, Integral)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make seen tokens less likely: positive logits are divided, negative ones multiplied.

    Args:
        logits: [..., V].
        seen: True for ids that are in prompt or answer already, [..., V].
        penalty: of Keskar et al. 2019 (arXiv 1909.05858); below 1 it rewards.
    """
    lower = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, lower, logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law that the next token is drawn from, float32, [..., V] -> [..., V].

    Of a temperature below `GREEDY_BELOW` it is all on the best token.
    """
    if sampling.greedy:
        best = best_ids(logits).unsqueeze(-1)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    law = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        law = _nucleus(law, sampling.top_p)
    if sampling.min_p > 0:
        best = law.amax(dim=-1, keepdim=True)
        law = law.masked_fill(law < sampling.min_p * best, 0.0)
    return law / law.sum(dim=-1, keepdim=True)


def _nucleus(law: Tensor, top_p: float) -> Tensor:
    """The fewest best tokens whose probability reaches `top_p`; the rest gets none."""
    ordered, ids = law.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(law).scatter_(-1, ids, kept)


def draw(law: Tensor, uniform: Tensor) -> Tensor:
    """A token each, by inverting the running sum; one without probability is never drawn.

    Args:
        law: probabilities, or any weights that are not negative, [..., V].
        uniform: a number in [0, 1) each, [...].

    Returns:
        Ids, [...].
    """
    total = law.double().cumsum(dim=-1)  # sums that never fall: no step without probability
    mass = total[..., -1:]
    share = uniform.unsqueeze(-1).to(total.dtype) * mass
    place = torch.searchsorted(total, share, right=True)
    last = (total < mass).sum(dim=-1, keepdim=True)  # rounding must not go beyond the last share
    return torch.minimum(place, last).squeeze(-1)


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
