"""Speculative decoding with a draft model (Leviathan et al. 2023, arXiv 2211.17192), greedy."""

from collections.abc import Sequence

import torch

from medusa_train.decode.forward import Reader, chain_block
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.accept import greedy_path


class DraftModel:
    """The draft guesses `gamma` tokens one by one, the target checks them in one forward."""

    def __init__(self, model: LanguageModel, draft: LanguageModel, *, gamma: int) -> None:
        """Decode with `model`, guessing with `draft`, whose best tokens are ids of the target."""
        self.name = f"draft_model/gamma={gamma}"
        self.gamma = gamma
        self.device = model.device
        self.longest_block = gamma + 1
        self.max_positions = min(model.max_positions, draft.max_positions) - gamma
        self._model, self._draft = model, draft
        self._target_reader, self._draft_reader = Reader(model), Reader(draft)
        self._children = (*((i + 1,) for i in range(gamma)), ())

    def start(self, prompt: Sequence[int], *, room: int) -> int:
        """Read the prompt with both models; gives the first token."""
        capacity = len(prompt) + room + self.gamma + 1
        self._verify = chain_block(self._model, self.gamma + 1, capacity)
        self._catch_up = [chain_block(self._draft, size, capacity) for size in (1, 2)]
        self._unread: list[int] = []  # certain tokens that the draft has not read yet
        self._draft_reader.prefill(prompt, capacity=capacity)
        return int(self._model.best(self._target_reader.prefill(prompt, capacity=capacity)))

    def step(self, token: int) -> list[int]:
        """Feed the newest token; gives the accepted guesses and one token more."""
        drafts = self._guess(token)
        ids = torch.cat([torch.tensor([token], device=self.device), *drafts])
        best = self._model.best(self._target_reader.read(ids, self._verify))
        tokens, best = torch.stack([ids, best]).tolist()
        path = greedy_path(self._children, tokens, best)
        self._target_reader.cache.commit(path)
        self._settle(accepted=len(path) - 1, drafts=tokens[1:])
        return [*tokens[1 : len(path)], best[path[-1]]]

    def _guess(self, token: int) -> list[torch.Tensor]:
        """`gamma` guesses, each [1], left on the device."""
        self._unread.append(token)
        ids = torch.tensor(self._unread, device=self.device)
        self._certain = self._draft_reader.cache.length + len(self._unread)
        drafts: list[torch.Tensor] = []
        for _ in range(self.gamma):
            hidden = self._draft_reader.read(ids, self._catch_up[len(ids) - 1])
            self._draft_reader.cache.commit(range(len(ids)))
            ids = self._draft.best(hidden[-1:])
            drafts.append(ids)
        return drafts

    def _settle(self, *, accepted: int, drafts: list[int]) -> None:
        """Take rejected guesses out of the draft's cache; the last guess was never in it."""
        self._draft_reader.cache.rewind(self._certain + accepted)
        self._unread = drafts[-1:] if accepted == self.gamma else []
