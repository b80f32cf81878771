"""Speculative decoding with a draft model (Leviathan et al. 2023, arXiv 2211.17192).

Legend: B rows, G guesses, V vocabulary of the target.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.decode.chooser import GUESS
from medusa_train.decode.forward import Reader
from medusa_train.decode.method import Guesses, Method, check_count
from medusa_train.decode.transfer import sent
from medusa_train.errors import ModelError
from medusa_train.model.draft import refuse_other_tokenizer
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import NO_TOKEN
from medusa_train.ops.sample import draw
from medusa_train.ops.tree import chain_tree

MOST = 16  # guesses of an adaptive draft


class DraftModel(Method):
    """The draft guesses `gamma` tokens one by one, the target checks them in one forward.

    Greedy, both take their best tokens. Otherwise the draft draws from its own law, under the same
    settings as the target, and rejection sampling keeps the target's law.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel,
        *,
        gamma: int,
        adaptive: bool = False,
        compiled: bool = False,
    ) -> None:
        """Decode with `model`, guessing with `draft`, whose ids are those of the target.

        Args:
            model: the target.
            draft: of the same tokenizer. Where one of the two has further ids at the end, such as
                padding or added tokens, the draft never guesses them.
            gamma: guesses of a step, or of the first one if `adaptive`.
            adaptive: in each row two more after a step whose guesses were all accepted, else one
                less, from 1 to `MOST` or a larger `gamma`; every answer starts again from `gamma`.
            compiled: run forwards through `torch.compile`.

        Raises:
            ValueError: if `gamma` is not a whole number from 1 on.
            ModelError: if the two lie on different devices, or have tokenizers that differ.
        """
        check_count("gamma", gamma)
        refuse_other_tokenizer(draft, model)
        if draft.device != model.device:
            raise ModelError(
                f"the draft model is on {draft.device}, the target on {model.device}: load both "
                "onto the same device"
            )
        super().__init__(model, compiled=compiled)
        self.name = "draft_model/adaptive" if adaptive else f"draft_model/gamma={gamma}"
        self.gamma, self.adaptive = gamma, adaptive
        self.longest_block = self._most_nodes = (max(gamma, MOST) if adaptive else gamma) + 1
        self._draft = draft
        self._draft_reader = Reader(draft, compiled=compiled)

    def _begin(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], *, room: int) -> None:
        self._draft.refuse_moved()
        # Each step begins with a row's last two tokens: the draft has read one of them at most
        read = [self._draft.decoder_prompt(prompt) for prompt in prompts]
        capacity = max(map(len, read)) + room + self._most_nodes
        self._draft_reader.prefill(
            [[self._readable(token) for token in prompt] for prompt in prompts],
            capacity=capacity,
            held_back=1,
        )
        self._before = [prompt[-1] for prompt in read]  # the token before the newest
        self._limits = [self.gamma] * len(prompts)  # guesses of the next step

    def _guess(self, tokens: Sequence[int]) -> Guesses:
        reader, count = self._draft_reader, max(self._limits)
        self._newest = tokens
        self._certain = [length + 2 for length in reader.cache.lengths]
        pairs = zip(self._before, tokens, strict=True)
        ids = sent([list(pair) for pair in pairs], self.device)
        guesses = torch.empty((len(tokens), 0), dtype=torch.long, device=self.device)
        laws: list[Tensor] = []
        for _ in range(count):
            ids = ids.clamp(min=0, max=self._draft.readable_ids - 1)
            hidden = reader.read(ids, chain_tree(ids.shape[1] - 1))[:, -1:]
            reader.cache.commit([range(ids.shape[1])] * len(tokens))
            ids = self._next(hidden, guesses, laws)
            guesses = torch.cat([guesses, ids], dim=1)
        return self._limited(guesses, laws)

    def _next(self, hidden: Tensor, guesses: Tensor, laws: list[Tensor]) -> Tensor:
        """The guess after a hidden state, [B, 1]; its law joins `laws` if it is drawn.

        There is none where all ids of a reduced vocabulary are held back at this place.
        """
        chooser = self._chooser
        if chooser.takes_best:
            guess = self._draft.best(hidden)
            return guess.masked_fill(guess >= self.model.valid_ids, NO_TOKEN)
        depth = sent([guesses.shape[1]], self.device)
        logits = self._draft.logits_over(hidden, self.model.vocab_size)
        trail = guesses.unsqueeze(1)
        if chooser.sampling.greedy:
            return chooser.choose(logits, trail, depth)
        law = chooser.laws(logits, trail, depth).nan_to_num(0.0)
        laws.append(law)
        guess = draw(law, chooser.numbers(GUESS, depth))
        return guess.masked_fill(law.sum(dim=-1) == 0, NO_TOKEN)

    def _readable(self, token: int) -> int:
        """Another in place of one that the target has and the draft has not, such as a role."""
        return min(token, self._draft.readable_ids - 1)

    def _limited(self, guesses: Tensor, laws: Sequence[Tensor]) -> Guesses:
        """Leave out what goes beyond the limit of a row."""
        tree, joined = chain_tree(guesses.shape[1]), torch.cat(list(laws), dim=1) if laws else None
        if min(self._limits) < guesses.shape[1]:
            limits = sent(self._limits, self.device).unsqueeze(1)
            beyond = torch.arange(guesses.shape[1], device=self.device) >= limits
            guesses = guesses.masked_fill(beyond, NO_TOKEN)
            joined = None if joined is None else joined.masked_fill(beyond.unsqueeze(-1), 0.0)
        return Guesses(tree=tree, ids=guesses, laws=joined)

    def _settle(self, blocks: Sequence[Sequence[int]]) -> None:
        """Leave in the draft's cache all certain tokens but the last two."""
        accepted = [len(block) - 1 for block in blocks]
        self._draft_reader.cache.rewind(
            [length + more - 1 for length, more in zip(self._certain, accepted, strict=True)]
        )
        self._before = [
            block[-2] if len(block) > 1 else newest
            for block, newest in zip(blocks, self._newest, strict=True)
        ]
        if self.adaptive:
            pairs = zip(self._limits, accepted, strict=True)
            most = max(self.gamma, MOST)
            self._limits = [next_limit(limit, more, most) for limit, more in pairs]

    def _keep(self, rows: Sequence[int]) -> None:
        self._draft_reader.cache.keep_rows(rows)
        self._before = [self._before[row] for row in rows]
        self._limits = [self._limits[row] for row in rows]


def next_limit(limit: int, accepted: int, most: int = MOST) -> int:
    """Guesses of an adaptive draft after a step in which so many of `limit` were accepted."""
    return min(limit + 2, most) if accepted == limit else max(limit - 1, 1)
