"""Prompt lookup: what followed the last tokens when they stood in prompt or answer before.

No model guesses. Answers that repeat their prompt, such as edits and summaries, gain from it.
Method: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence

from medusa_train.decode.method import Guesses, Method, check_count
from medusa_train.decode.transfer import sent
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import NO_TOKEN
from medusa_train.ops.tree import chain_tree

GAMMA = 10  # guesses of a step at most, where nobody says otherwise


class Lookup(Method):
    """Guesses up to `gamma` tokens that followed the newest n-gram where it last stood."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        gamma: int = GAMMA,
        longest_ngram: int = 3,
        compiled: bool = False,
    ) -> None:
        """Decode with `model`.

        Args:
            model: the target.
            gamma: the most guesses of a step.
            longest_ngram: tokens that are looked up; fewer where they are not found.
            compiled: run forwards through `torch.compile`.

        Raises:
            ValueError: if one is not a whole number from 1 on.
        """
        check_count("gamma", gamma)
        check_count("longest_ngram", longest_ngram)
        super().__init__(model, compiled=compiled)
        self.name = f"lookup/gamma={gamma}"
        self.gamma, self.longest_ngram = gamma, longest_ngram
        self.longest_block = self._most_nodes = gamma + 1

    def _begin(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], *, room: int) -> None:
        self._texts = [Text(self.longest_ngram) for _ in prompts]
        for text, prompt, token in zip(self._texts, prompts, tokens, strict=True):
            text.extend([*prompt, token])

    def _guess(self, tokens: Sequence[int]) -> Guesses:
        found = [text.continuation(self.gamma) for text in self._texts]
        size = max(len(row) for row in found)
        filled = [[*row, *[NO_TOKEN] * (size - len(row))] for row in found]
        ids = sent(filled, self.device).reshape(len(found), size)
        return Guesses(tree=chain_tree(size), ids=ids)

    def _settle(self, blocks: Sequence[Sequence[int]]) -> None:
        for text, block in zip(self._texts, blocks, strict=True):
            text.extend(block)

    def _keep(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]


class Text:
    """Tokens, and where each n-gram of them last stood with something behind it."""

    def __init__(self, longest_ngram: int) -> None:
        """Empty."""
        self.ids: list[int] = []
        self._behind: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest_ngram)]

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens."""
        for token in ids:
            end = len(self.ids)
            for size, behind in enumerate(self._behind, start=1):
                if size <= end:
                    behind[tuple(self.ids[end - size :])] = end
            self.ids.append(token)

    def continuation(self, most: int) -> list[int]:
        """So many tokens that followed the longest known n-gram at the end; none if none is known.

        Where they reach the end of the text they go on with themselves, as a text that runs in
        circles does.
        """
        for size in range(len(self._behind), 0, -1):
            place = self._behind[size - 1].get(tuple(self.ids[-size:]))
            if place is not None and size <= len(self.ids):
                followed = self.ids[place:]
                return [followed[i % len(followed)] for i in range(most)]
        return []
