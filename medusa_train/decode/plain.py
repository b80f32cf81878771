"""Plain greedy decoding: one token a forward, the measure of all other methods."""

from collections.abc import Sequence

import torch

from medusa_train.decode.forward import Reader, chain_block
from medusa_train.model.language_model import LanguageModel


class Plain:
    """One token a step."""

    name = "plain"

    def __init__(self, model: LanguageModel) -> None:
        """Decode with `model`."""
        self.device = model.device
        self.longest_block = 1
        self.max_positions = model.max_positions
        self._model = model
        self._reader = Reader(model)

    def start(self, prompt: Sequence[int], *, room: int) -> int:
        """Read the prompt; gives the first token."""
        capacity = len(prompt) + room
        self._block = chain_block(self._model, 1, capacity)
        hidden = self._reader.prefill(prompt, capacity=capacity)
        return int(self._model.best(hidden))

    def step(self, token: int) -> list[int]:
        """Feed the newest token; gives the next one."""
        hidden = self._reader.read(torch.tensor([token], device=self.device), self._block)
        self._reader.cache.commit([0])
        return [int(self._model.best(hidden[0]))]
