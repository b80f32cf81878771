"""Growing a tree from joint acceptance counts, and what a tree is worth.

Heads are not independent: where head 0 is right, head 1 is right more often. So a path's worth is
counted as a whole on held-out answers, and only blended with the product of the heads' own
accuracies, which orders the paths that were never seen.

Legend: P positions, K heads.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from medusa_train.ops.loss import IGNORE
from medusa_train.ops.metrics import MISSED
from medusa_train.ops.tree import Path

PRIOR_POSITIONS = 10.0  # the product of accuracies counts as so many positions

# Of the tree by which heads are compared while they train
PREDICTED_NODES = 16
PREDICTED_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class PathCounts:
    """What held-out answers say about paths."""

    positions: int
    joint: Counter[Path]  # positions at which the whole path is right
    marginal: Tensor  # share of positions at which head k's guess of that rank is right, [K, ranks]

    def worth(self, path: Path) -> float:
        """Estimated share of steps in which the whole path is accepted; falls along a path."""
        prior = 1.0
        for head, rank in enumerate(path):
            prior *= float(self.marginal[head, rank])
        counted = self.joint[path] + PRIOR_POSITIONS * prior
        return counted / (self.positions + PRIOR_POSITIONS)


def count_paths(ranks: Sequence[Tensor], *, max_rank: int) -> PathCounts:
    """Count every path that is right at some position.

    Args:
        ranks: of each row as `rank_rows` gives them, [K, P].
        max_rank: ranks from this one on are not considered.
    """
    joint: Counter[Path] = Counter()
    every = torch.cat(list(ranks), dim=1)
    for position in _positions(every):
        right = _right(position, max_rank)
        joint.update(right[:depth] for depth in range(1, len(right) + 1))
    positions = every.shape[1]
    hits = torch.stack([(every == rank).sum(dim=1) for rank in range(max_rank)], dim=1)
    return PathCounts(positions=positions, joint=joint, marginal=hits / max(1, positions))


def grow(counts: PathCounts, nodes: int) -> list[Path]:
    """The `nodes` worthiest paths, worthiest first; every beginning of them is a tree.

    Since a path is never worth more than its parent, greedy growth is optimal for the counts.
    """
    num_heads, ranks = counts.marginal.shape
    heap: list[tuple[float, int, Path]]
    heap = [(-counts.worth((rank,)), 1, (rank,)) for rank in range(ranks)]
    heapq.heapify(heap)
    grown: list[Path] = []
    while heap and len(grown) < nodes:
        _, depth, path = heapq.heappop(heap)
        grown.append(path)
        if depth < num_heads:
            for rank in range(ranks):
                child = (*path, rank)
                heapq.heappush(heap, (-counts.worth(child), depth + 1, child))
    return grown


def simulate(ranks: Sequence[Tensor], paths: Sequence[Path]) -> float:
    """Tokens per step that greedy decoding of the same answers takes with a tree: exact counting.

    The held-out answers are greedy, so what a step accepts is known from the ranks alone: the
    longest right path in the tree. The next step starts behind it.

    Args:
        ranks: of each row, [K, P].
        paths: of the tree.

    Returns:
        Mean tokens per step, the certain one included; 1.0 without any position.
    """
    tokens, steps = _tokens_and_steps(ranks, paths)
    return tokens / steps if steps else 1.0


def predict(ranks: Sequence[Tensor]) -> float:
    """Tokens per step to expect of a good tree of `PREDICTED_NODES` nodes, from held-out answers.

    One number to compare heads by while they train. The tree of each half of the rows is grown on
    the other half, so that no tree is judged by the positions that chose it.

    Args:
        ranks: of each row, [K, P].
    """
    tokens = steps = 0
    halves = ranks[::2], ranks[1::2]
    for judged, grown_on in (halves, halves[::-1]) if halves[1] else ((ranks, ranks),):
        paths = grow(count_paths(grown_on, max_rank=PREDICTED_RANKS), PREDICTED_NODES)
        found = _tokens_and_steps(judged, paths)
        tokens, steps = tokens + found[0], steps + found[1]
    return tokens / steps if steps else 1.0


def _tokens_and_steps(ranks: Sequence[Tensor], paths: Sequence[Path]) -> tuple[int, int]:
    """Of decoding all answers with a tree."""
    tree, tokens, steps = set(paths), 0, 0
    longest = max(len(path) for path in paths)
    for row in ranks:
        for accepted in _accepted(_positions(row), tree, longest):
            tokens += accepted + 1
            steps += 1
    return tokens, steps


def _positions(ranks: Tensor) -> list[list[int]]:
    """Ranks, [K, P], position by position."""
    return cast(list[list[int]], ranks.T.tolist())  # pyright: ignore[reportUnknownMemberType]


def _accepted(positions: list[list[int]], tree: set[Path], longest: int) -> Iterator[int]:
    """Accepted drafts of each step of one answer."""
    at = 0
    while at < len(positions):
        right = _right(positions[at], MISSED)
        accepted = 0
        while accepted < min(len(right), longest) and right[: accepted + 1] in tree:
            accepted += 1
        yield accepted
        at += accepted + 1


def _right(position: list[int], max_rank: int) -> Path:
    """The ranks of a position up to the first head that misses."""
    right: list[int] = []
    for rank in position:
        if rank == IGNORE or rank >= max_rank:
            break
        right.append(rank)
    return tuple(right)
