"""Plain decoding: one token a forward, the measure of all other methods."""

from collections.abc import Sequence

import torch

from medusa_train.decode.method import Guesses, Method
from medusa_train.ops.tree import chain_tree


class Plain(Method):
    """Guesses nothing."""

    name = "plain"
    longest_block = 1
    _most_nodes = 1

    def _guess(self, tokens: Sequence[int]) -> Guesses:
        none = torch.empty((len(tokens), 0), dtype=torch.long, device=self.device)
        return Guesses(tree=chain_tree(0), ids=none)
