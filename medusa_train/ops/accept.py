"""Which candidates of a tree are accepted. Greedy: exactly what plain greedy decoding would say."""

from collections.abc import Sequence


def greedy_path(
    children: Sequence[Sequence[int]], tokens: Sequence[int], best: Sequence[int]
) -> list[int]:
    """Follow the target's own choices down the tree until none of the children is that token.

    Args:
        children: of each node, [N].
        tokens: at each node; the root's is certain already, [N].
        best: the target's greedy next token after each node, [N].

    Returns:
        The nodes on the way, from the root (always there) to the last accepted one.
    """
    path = [0]
    while True:
        node = path[-1]
        match = next((child for child in children[node] if tokens[child] == best[node]), None)
        if match is None:
            return path
        path.append(match)
