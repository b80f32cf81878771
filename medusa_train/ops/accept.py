"""Which candidates of a tree are accepted, one decision for each node.

`follow` accepts what the target itself chose. With the best tokens that is greedy decoding; with
tokens drawn from the target's law it is lossless sampling: candidates that were fixed before the
draw cannot bend the law, and the drawn token is emitted whether it was among them or not.
`reject` is for candidates that were drawn themselves (Leviathan et al. 2023, arXiv 2211.17192),
`typical` the paper's lossy rule.

Legend: B rows, N nodes (root included), G guesses in a row, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.ops.sample import draw

NO_TOKEN = -1  # in place of a candidate that is missing: never accepted

EPSILON, DELTA = 0.09, 0.3  # of typical acceptance, as in the paper


def follow(
    children: Sequence[Sequence[int]], tokens: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Follow the target's own choices down the tree until none of the children is that token.

    Args:
        children: of each node, [N].
        tokens: at each node; the root's is certain already, [N].
        chosen: the target's next token after each node, [N].

    Returns:
        The nodes on the way, from the root (always there) to the last accepted one.
    """
    path = [0]
    while True:
        node = path[-1]
        match = next((child for child in children[node] if tokens[child] == chosen[node]), None)
        if match is None:
            return path
        path.append(match)


def reject(
    target: Tensor, draft: Tensor, guesses: Tensor, accept: Tensor, again: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of guesses in a row; the emitted tokens follow the target's law exactly.

    A guess x is accepted with probability min(1, target(x) / draft(x)). In place of the first that
    is not, a token is drawn from the positive part of `target - draft`.

    Args:
        target: its law before each guess and after the last, [B, G + 1, V].
        draft: the very laws that the guesses were drawn from; zeros where there is no guess,
            [B, G, V].
        guesses: ids, or `NO_TOKEN`, [B, G].
        accept: numbers in [0, 1), [B, G].
        again: numbers in [0, 1) for the token that follows the accepted ones, [B, G + 1].

    Returns:
        How many guesses are accepted, [B], and the token that follows if the first n are,
        [B, G + 1].
    """
    index = guesses.clamp(min=0).unsqueeze(-1)
    wanted = target[:, :-1].gather(-1, index).squeeze(-1)
    offered = draft.gather(-1, index).squeeze(-1)
    # u < p / q without the division; a guess that the target never says is never accepted
    passed = (accept.to(wanted.dtype) * offered < wanted) & (guesses != NO_TOKEN)
    accepted = passed.int().cumprod(dim=-1).sum(dim=-1)
    rest = (target[:, :-1] - draft).clamp(min=0)
    # Equal laws leave nothing but rounding; their guess is accepted, so what is drawn is not read
    empty = rest.sum(dim=-1, keepdim=True) <= 0
    rest = torch.where(empty, target[:, :-1], rest)
    return accepted, draw(torch.cat([rest, target[:, -1:]], dim=1), again)


def typical(
    target: Tensor,
    tokens: Tensor,
    parent: Tensor,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> tuple[Tensor, Tensor]:
    """The paper's rule: x is accepted if p(x) > min(epsilon, delta * exp(-entropy of p)).

    It does not keep the target's law.

    Args:
        target: its law after each node, [B, N, V].
        tokens: at each node, or `NO_TOKEN`, [B, N].
        parent: of each node, any for the root, [N].
        epsilon: hard bound of the probability.
        delta: scale of the bound that depends on the entropy.

    Returns:
        Whether each node passes by itself, [B, N] (the root always), and the logarithm of its
        probability, [B, N] (the root's is 0).
    """
    entropy = -torch.xlogy(target, target).sum(dim=-1)
    bound = (delta * torch.exp(-entropy)).clamp(max=epsilon)
    before = parent.clamp(min=0)
    share = target[:, before].gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    passed = (share > bound[:, before]) & (tokens != NO_TOKEN)
    passed[:, 0], share[:, 0] = True, 1.0
    return passed, share.log()


def longest_path(
    parent: Sequence[int], passed: Sequence[bool], scores: Sequence[float]
) -> list[int]:
    """The longest path from the root over nodes that pass; among equals the likeliest.

    Args:
        parent: of each node, before it in the order, -1 for the root, [N].
        passed: of each node; the root's is not read, [N].
        scores: logarithm of each node's probability, [N].
    """
    lengths, totals = [0], [0.0]
    for node in range(1, len(parent)):
        above = parent[node]
        reached = passed[node] and lengths[above] >= 0
        lengths.append(lengths[above] + 1 if reached else -1)
        totals.append(totals[above] + scores[node] if reached else 0.0)
    node = max(range(len(parent)), key=lambda n: (lengths[n], totals[n]))
    path = [node]
    while path[-1] != 0:
        path.append(parent[path[-1]])
    return path[::-1]
