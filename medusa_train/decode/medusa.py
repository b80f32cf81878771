"""Medusa decoding: the heads guess a tree, the target checks all of it in one forward, greedy."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.decode.forward import Block, Reader
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import greedy_path
from medusa_train.ops.tree import Tree


class Medusa:
    """Heads read only the last accepted hidden state; the LM head reads every node once."""

    name = "medusa"

    def __init__(
        self,
        model: LanguageModel,
        heads: MedusaHeads,
        tree: Tree,
        *,
        guesses: "HeadGuesses | None" = None,
    ) -> None:
        """Decode with `model`, guessing with `heads` along `tree`.

        `guesses` are those of the same heads for a tree at least as deep, where there are some:
        laying out the heads' weights for decoding again costs a copy of them.
        """
        self.device = model.device
        self.longest_block = len(tree.ranks_by_depth) + 1
        self.tree = tree
        self.max_positions = model.max_positions - len(tree.ranks_by_depth)
        self._model = model
        self._reader = Reader(model)
        ranks = tree.ranks_by_depth
        self._guesses = (guesses or HeadGuesses(model, heads, ranks)).limited(ranks)
        starts = [sum(tree.ranks_by_depth[:d]) for d in range(len(tree.ranks_by_depth))]
        places = [starts[len(path) - 1] + path[-1] for path in tree.paths]
        self._places = torch.tensor(places, device=self.device)  # of each node in the guesses

    def start(self, prompt: Sequence[int], *, room: int) -> int:
        """Read the prompt; gives the first token."""
        tree = self.tree
        capacity = len(prompt) + room + len(tree.depth)
        self._block = Block(self._model, tree.attend(), tree.depth, capacity)
        self._hidden = self._reader.prefill(prompt, capacity=capacity)
        return int(self._model.best(self._hidden))

    def step(self, token: int) -> list[int]:
        """Feed the newest token; gives the accepted guesses and one token more."""
        root = torch.tensor([token], device=self.device)
        ids = torch.cat([root, self._guesses(self._hidden)[self._places]])
        hidden = self._reader.read(ids, self._block)
        tokens, best = torch.stack([ids, self._model.best(hidden)]).tolist()
        path = greedy_path(self.tree.children, tokens, best)
        self._reader.cache.commit(path)
        self._hidden = hidden[path[-1]]
        return [*(tokens[node] for node in path[1:]), best[path[-1]]]


class HeadGuesses:
    """The best tokens of each head after a hidden state."""

    def __init__(
        self, model: LanguageModel, heads: MedusaHeads, ranks_by_depth: Sequence[int]
    ) -> None:
        """Ask head k for its best `ranks_by_depth[k]` tokens."""
        self._ranks = ranks_by_depth
        self._to_backbone_ids = heads.to_backbone_ids
        self._heads = [
            heads[k].for_decoding(shared=model.logits) for k in range(len(ranks_by_depth))
        ]
        self._valid = model.valid_ids if heads.token_map is None else None

    def limited(self, ranks_by_depth: Sequence[int]) -> "HeadGuesses":
        """The same heads, or the first of them, asked for other numbers of tokens."""
        other = copy.copy(self)
        other._ranks = ranks_by_depth
        return other

    def __call__(self, hidden: Tensor) -> Tensor:
        """Target ids, head by head, each head's from best to worst: [D] -> [sum of ranks]."""
        heads = range(len(self._ranks))
        return torch.cat([self._best(hidden.unsqueeze(0), k)[0] for k in heads])

    def each_head(self, hidden: Tensor) -> Tensor:
        """The same for many positions, all heads with as many guesses: [P, D] -> [K, P, ranks]."""
        return torch.stack([self._best(hidden, k) for k in range(len(self._ranks))])

    def _best(self, hidden: Tensor, k: int) -> Tensor:
        """[P, D] -> [P, ranks of head k]."""
        logits = self._heads[k](hidden)[:, : self._valid]
        if self._ranks[k] == 1:
            return self._to_backbone_ids(logits.argmax(dim=-1, keepdim=True))
        return self._to_backbone_ids(logits.topk(self._ranks[k]).indices)
