"""Trees of candidate tokens: checked once, laid out for one forward of the target.

A tree is a set of rank paths: `(0,)` is head 0's best guess, `(0, 2)` that guess followed by head
1's third best. Node 0 is the root, the token that is already certain.

Legend: N nodes, root included.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Nodes by depth, then by rank path; a parent always comes before its children."""

    paths: tuple[Path, ...]  # of the drafted nodes: node i + 1 is paths[i]
    parent: tuple[int, ...]  # -1 for the root, [N]
    depth: tuple[int, ...]  # 0 for the root, [N]
    children: tuple[tuple[int, ...], ...]  # [N]

    @property
    def nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.paths)

    @property
    def ranks_by_depth(self) -> list[int]:
        """How many guesses of each head the tree reads; head k serves depth k + 1."""
        deepest = self.depth[-1]
        return [1 + max(p[-1] for p in self.paths if len(p) == d + 1) for d in range(deepest)]

    @cached_property
    def trails(self) -> Tensor:
        """Nodes from below the root to each node, itself included; -1 fills, [N, depth]."""
        trails = [[-1] * self.depth[-1]]
        for node in range(1, len(self.parent)):
            trails.append(list(trails[self.parent[node]]))
            trails[node][self.depth[node] - 1] = node
        return torch.tensor(trails, dtype=torch.long).reshape(len(trails), self.depth[-1])

    def attend(self) -> Tensor:
        """True where a node (row) sees another (column): itself and its ancestors, [N, N]."""
        size = len(self.parent)
        seen = torch.eye(size, dtype=torch.bool)
        for node in range(1, size):
            seen[node] |= seen[self.parent[node]]
        return seen


def build_tree(choices: Iterable[Sequence[int]], *, num_heads: int, max_rank: int) -> Tree:
    """Check rank paths and lay them out.

    Args:
        choices: rank paths in any order, at least one.
        num_heads: the longest path allowed.
        max_rank: ranks must be below this, the size of the heads' vocabulary.

    Raises:
        ValueError: naming the offending path.
    """
    given = [tuple(path) for path in choices]
    if not given:
        raise ValueError("the tree has no paths; give at least one such as [0]")
    for path in given:
        shown = list(path)
        if not path or not all(type(rank) is int for rank in path):
            raise ValueError(f"tree path {shown} must be one or more whole numbers")
        if min(path) < 0 or max(path) >= max_rank:
            raise ValueError(f"tree path {shown} has a rank outside 0 ... {max_rank - 1}")
        if len(path) > num_heads:
            raise ValueError(f"tree path {shown} is {len(path)} deep, there are {num_heads} heads")
    paths = sorted(set(given), key=lambda path: (len(path), path))
    if len(paths) < len(given):
        twice = next(path for path in paths if given.count(path) > 1)
        raise ValueError(f"tree path {list(twice)} stands twice")
    index = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    for path in paths:
        if path[:-1] not in index:
            raise ValueError(f"tree path {list(path)} lacks its parent {list(path[:-1])}")
    parent = (-1, *(index[path[:-1]] for path in paths))
    children = tuple(tuple(c for c, p in enumerate(parent) if p == node) for node in index.values())
    return Tree(
        paths=tuple(paths),
        parent=parent,
        depth=(0, *(len(path) for path in paths)),
        children=children,
    )


@cache
def chain_tree(length: int) -> Tree:
    """A tree of so many guesses in a row; of none, the root alone."""
    return Tree(
        paths=tuple(chain(length)),
        parent=tuple(range(-1, length)),
        depth=tuple(range(length + 1)),
        children=(*((node + 1,) for node in range(length)), ()),
    )


def chain(length: int) -> list[Path]:
    """Rank paths of the best guess of each of the first `length` heads, as serving engines use."""
    return [(0,) * depth for depth in range(1, length + 1)]
