"""What all decoding methods share: guess, check all guesses in one forward, accept, commit.

A method differs from another only in its guesses. Whatever they are, the target's own choices
decide, so a bad guess costs time and never changes an answer.

Legend: B rows, N nodes (root included), D hidden size, V vocabulary.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from medusa_train.decode.chooser import ACCEPT, DRAW, Chooser
from medusa_train.decode.forward import Reader
from medusa_train.decode.transfer import sent
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import NO_TOKEN, follow, reject
from medusa_train.ops.sample import Sampling
from medusa_train.ops.tree import Tree, chain_tree


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Candidates of one step, below a root that is certain."""

    tree: Tree
    ids: Tensor  # of all nodes but the root; `NO_TOKEN` where there is none, [B, N-1]
    laws: Tensor | None = None  # that they were drawn from, if they were, [B, N-1, V]


class Method(ABC):
    """Rows on their way, decoded with one target; `start` forgets everything before."""

    name: str
    longest_block: int  # the most tokens that a step can emit
    _most_nodes: int  # new tokens of the largest forward, root included
    lossy = False  # whether answers may differ from those of plain decoding

    def __init__(self, model: LanguageModel, *, compiled: bool = False) -> None:
        """Decode with `model`, through `torch.compile` if `compiled`.

        Raises:
            MedusaError: if it cannot be compiled.
        """
        self.model = model
        self.run = 0  # counts calls of `start`
        self.lock = threading.Lock()  # to hold around calls where threads share a method
        self._reader = Reader(model, compiled=compiled)
        self._layouts: dict[Tree, tuple[Tensor, Tensor]] = {}  # trails and depths on the device

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @property
    def max_positions(self) -> int:
        """The longest context it can serve, prompt and answer together."""
        return self.model.max_positions

    @torch.inference_mode()
    def start(
        self, prompts: Sequence[Sequence[int]], *, room: int, chooser: Chooser | None = None
    ) -> list[int]:
        """Read prompts; gives the first token of each answer.

        Args:
            prompts: token ids, [B].
            room: memory is laid out for answers of so many tokens.
            chooser: how tokens follow from logits; None for greedy.

        Raises:
            ModelError: if the model has been moved since it was wrapped.
        """
        self.model.refuse_moved()
        self.run += 1
        self._chooser = chooser or self._greedy(prompts, room)
        read = max(len(self.model.decoder_prompt(prompt)) for prompt in prompts)
        capacity = read + room + self._most_nodes
        self._hidden = self._reader.prefill(prompts, capacity=capacity)  # of the last token, [B, D]
        nothing = torch.empty((len(prompts), 1), dtype=torch.long, device=self.device)
        first = self._choose(nothing, self._hidden.unsqueeze(1), chain_tree(0))
        tokens: list[int] = first[:, 0].tolist()
        self._chooser.note([[token] for token in tokens])
        self._begin(prompts, tokens, room=room)
        return tokens

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> list[list[int]]:
        """Feed each row's newest token; gives what one forward of the target emits for each."""
        guesses = self._guess(tokens)
        root = sent(tokens, self.device).unsqueeze(1)
        ids = torch.cat([root, guesses.ids], dim=1)
        hidden = self._reader.read(ids.clamp(min=0), guesses.tree)
        paths, blocks = self._verify(ids, hidden, guesses)
        self._reader.cache.commit(paths)
        self._hidden = self._last_states(hidden, paths)
        self._chooser.note(blocks)
        self._settle(blocks)
        return blocks

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, places among the rows at hand."""
        self._reader.cache.keep_rows(rows)
        self._chooser.keep(rows)
        self._hidden = self._hidden[sent(list(rows), self.device)]
        self._keep(rows)

    @abstractmethod
    def _guess(self, tokens: Sequence[int]) -> Guesses:
        """Candidates for what follows each row's newest token."""

    # What some methods also want to know

    def _begin(  # noqa: B027
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], *, room: int
    ) -> None:
        """Prompts are read and have their first tokens; nothing is guessed yet."""

    def _settle(self, blocks: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """These tokens have become certain."""

    def _keep(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Go on with these rows only."""

    def _verify(
        self, ids: Tensor, hidden: Tensor, guesses: Guesses
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The accepted path of each row, and the tokens on it with the one that follows."""
        if guesses.laws is not None:
            return self._verify_drawn(ids, hidden, guesses, guesses.laws)
        tokens, chosen = torch.stack([ids, self._choose(ids, hidden, guesses.tree)]).tolist()
        children = guesses.tree.children
        paths = [follow(children, *row) for row in zip(tokens, chosen, strict=True)]
        return paths, blocks_of(paths, tokens, chosen)

    def _verify_drawn(
        self, ids: Tensor, hidden: Tensor, guesses: Guesses, laws: Tensor
    ) -> tuple[list[list[int]], list[list[int]]]:
        """As `_verify`, of guesses in a row that were drawn from `laws`, [B, N-1, V]."""
        chooser = self._chooser
        trail, depth = self._lead(ids, guesses.tree)
        accepted, after = reject(
            chooser.laws(self.model.logits(hidden), trail, depth),
            laws,
            ids[:, 1:],
            chooser.numbers(ACCEPT, depth[:-1]),
            chooser.numbers(DRAW, depth),
        )
        tokens, following = torch.stack([ids, after]).tolist()
        paths = [list(range(count + 1)) for count in accepted.tolist()]
        return paths, blocks_of(paths, tokens, following)

    def _choose(self, ids: Tensor, hidden: Tensor, tree: Tree) -> Tensor:
        """The target's next token at each node, [B, N] and [B, N, D] -> [B, N]."""
        if self._chooser.takes_best:
            return self.model.best(hidden)
        return self._chooser.choose(self.model.logits(hidden), *self._lead(ids, tree))

    def _lead(self, ids: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        """Tokens between the root and what follows each node, [B, N, M]; how many, [N]."""
        if tree not in self._layouts:
            depth = sent(tree.depth, self.device)
            self._layouts[tree] = tree.trails.to(self.device), depth
        index, depth = self._layouts[tree]
        return torch.where(index < 0, NO_TOKEN, ids[:, index.clamp(min=0)]), depth

    def _last_states(self, hidden: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        last = [path[-1] for path in paths]
        if len(last) == 1:
            return hidden[:, last[0]]
        rows = torch.arange(len(last), device=self.device)
        return hidden[rows, sent(last, self.device)]

    def _greedy(self, prompts: Sequence[Sequence[int]], room: int) -> Chooser:
        return Chooser(
            Sampling(),
            prompts,
            seeds=[0] * len(prompts),
            length=room,
            end_ids=(),
            vocab_size=self.model.vocab_size,
            device=self.device,
        )


def check_count(name: str, value: int) -> None:
    """Refuse what is not a whole number from 1 on.

    Raises:
        ValueError: naming it.
    """
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {value}")


def blocks_of(
    paths: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    following: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Tokens that each row emits: those on its path but the root's, and the one that follows.

    Args:
        paths: accepted nodes of each row.
        tokens: at each node, [B, N].
        following: the target's next token after each node, [B, N].
    """
    return [
        [*(row[node] for node in path[1:]), after[path[-1]]]
        for path, row, after in zip(paths, tokens, following, strict=True)
    ]
