"""Medusa decoding: the heads guess a tree, the target checks all of it in one forward.

Legend: B rows, N nodes, P positions, K heads, V vocabulary, D hidden size.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.decode.method import Guesses, Method, blocks_of
from medusa_train.decode.transfer import sent
from medusa_train.errors import ModelError
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import DELTA, EPSILON, longest_path, typical
from medusa_train.ops.sample import best_ids
from medusa_train.ops.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Typical acceptance (Cai et al. 2024, section 2.3.1), with the paper's numbers. Lossy.

    Raises:
        ValueError: naming a number that is out of range.
    """

    epsilon: float = EPSILON
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must be from 0 to 1, got {self.epsilon}")
        if not 0 <= self.delta < float("inf"):
            raise ValueError(f"delta must be a finite number, 0 or more, got {self.delta}")


class Medusa(Method):
    """Heads read only the last accepted hidden state; the LM head reads every node once."""

    def __init__(
        self,
        model: LanguageModel,
        heads: MedusaHeads,
        tree: Tree,
        *,
        guesses: "HeadGuesses | None" = None,
        typical: Typical | None = None,
        compiled: bool = False,
    ) -> None:
        """Decode with `model`, guessing with `heads` along `tree`.

        Args:
            model: the target.
            heads: on its device, in its dtype.
            tree: at most as deep as there are heads.
            guesses: those of the same heads for a tree at least as deep, where there are some:
                laying out the heads' weights for decoding again costs a copy of them.
            typical: accept what is likely enough instead of what plain decoding would say.
            compiled: run forwards through `torch.compile`.

        Raises:
            ModelError: if heads do not fit the model, or the tree not the heads.
        """
        _check(model, heads, tree)
        super().__init__(model, compiled=compiled)
        ranks = tree.ranks_by_depth
        self.name = "medusa" if typical is None else "medusa/typical"
        self.lossy = typical is not None
        self.longest_block = len(ranks) + 1
        self.tree = tree
        self._typical = typical
        self._most_nodes = len(tree.depth)
        self._guesses = (guesses or HeadGuesses(model, heads, ranks)).limited(ranks)
        starts = [sum(ranks[:depth]) for depth in range(len(ranks))]
        places = [starts[len(path) - 1] + path[-1] for path in tree.paths]
        # Of each node in the guesses
        self._places = sent(places, self.device)
        self._parents = sent(tree.parent, self.device)

    def _guess(self, tokens: Sequence[int]) -> Guesses:
        return Guesses(tree=self.tree, ids=self._guesses(self._hidden)[:, self._places])

    def _verify(
        self, ids: Tensor, hidden: Tensor, guesses: Guesses
    ) -> tuple[list[list[int]], list[list[int]]]:
        if self._typical is None:
            return super()._verify(ids, hidden, guesses)
        tree, rule, chooser = guesses.tree, self._typical, self._chooser
        trail, depth = self._lead(ids, tree)
        logits = self.model.logits(hidden)
        passed, scores = typical(
            chooser.laws(logits, trail, depth),
            ids,
            self._parents,
            epsilon=rule.epsilon,
            delta=rule.delta,
        )
        chosen = chooser.choose(logits, trail, depth)
        tokens, following = torch.stack([ids, chosen]).tolist()
        rows = zip(passed.tolist(), scores.tolist(), strict=True)
        paths = [longest_path(tree.parent, *row) for row in rows]
        return paths, blocks_of(paths, tokens, following)


def _check(model: LanguageModel, heads: MedusaHeads, tree: Tree) -> None:
    shape, ranks = heads.shape, tree.ranks_by_depth
    made = "heads for {} {{}}, the model has {{}}: use heads of this very model"
    rules = (
        (shape.hidden_size, model.hidden_size, made.format("hidden size")),
        (shape.vocab_size, model.vocab_size, made.format("a vocabulary of")),
        (heads.dtype, model.dtype, "heads in {}, the model is in {}: use heads.to(model.dtype)"),
        (heads.device, model.device, "heads on {}, the model is on {}: use heads.to(model.device)"),
    )
    for found, expected, text in rules:
        if found != expected:
            raise ModelError(text.format(found, expected))
    if len(ranks) > shape.num_heads:
        raise ModelError(
            f"a tree {len(ranks)} deep needs as many heads, there are {shape.num_heads}: cut it"
        )
    most = most_ranks(model, heads)
    if ranks and max(ranks) > most:
        raise ModelError(
            f"the tree asks a head for {max(ranks)} tokens, each has {most}: leave out higher ranks"
        )


def most_ranks(model: LanguageModel, heads: MedusaHeads) -> int:
    """How many different tokens a head can guess; ranks of a tree lie below."""
    size = heads.shape.head_vocab_size
    return size if heads.token_map is not None else min(size, model.valid_ids)


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
        """Target ids, head by head, each head's from best to worst: [B, D] -> [B, sum of ranks]."""
        if not self._ranks:
            return torch.empty((len(hidden), 0), dtype=torch.long, device=hidden.device)
        return torch.cat([self._best(hidden, k) for k in range(len(self._ranks))], dim=-1)

    def each_head(self, hidden: Tensor) -> Tensor:
        """The same for many positions, all heads with as many guesses: [P, D] -> [K, P, ranks]."""
        return torch.stack([self._best(hidden, k) for k in range(len(self._ranks))])

    def _best(self, hidden: Tensor, k: int) -> Tensor:
        """[P, D] -> [P, ranks of head k]."""
        logits = self._heads[k](hidden)
        if self._valid is not None:
            logits[:, self._valid :] = float("-inf")  # padding
        if self._ranks[k] == 1:
            return self._to_backbone_ids(best_ids(logits).unsqueeze(-1))
        return self._to_backbone_ids(logits.topk(self._ranks[k]).indices)
