"""One forward for all methods: new tokens behind a cache, under any tree's mask.

Legend: N new tokens, S capacity of the cache, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.decode.cache import DecodeCache
from medusa_train.errors import ModelError
from medusa_train.model.language_model import LanguageModel


class Block:
    """The shape of a forward's new tokens: who sees whom, and how deep each one lies.

    Masks are made once for the full capacity, aligned on the right: what a node may see depends
    only on its distance from the end of the cache, so each step merely takes a slice.
    """

    def __init__(self, model: LanguageModel, attend: Tensor, depth: Sequence[int], capacity: int):
        """Lay out a block.

        Args:
            model: whose layers will read the masks.
            attend: True where a new token (row) sees another, [N, N].
            depth: position of each new token behind the cache's end, [N].
            capacity: S, the most tokens before the block.
        """
        self.size = len(depth)
        self.capacity = capacity
        self._depth = torch.tensor(depth, device=model.device).unsqueeze(0)
        # position of every key relative to the end of the cache: -S ... -1, then the block's own
        keys = torch.cat([torch.arange(-capacity, 0), torch.tensor(depth)])
        sees = torch.cat([torch.ones(self.size, capacity, dtype=torch.bool), attend], dim=1)
        distance = torch.tensor(depth).unsqueeze(1) - keys
        self._masks = {
            kind: _additive(sees & (distance < window), model)
            for kind, window in layer_windows(model).items()
        }

    def positions(self, length: int) -> Tensor:
        """Position ids behind `length` certain tokens, [1, N]."""
        return self._depth + length

    def mask(self, length: int) -> Tensor | dict[str, Tensor]:
        """Additive mask behind `length` certain tokens, [1, 1, N, length + N]."""
        start = self.capacity - length
        sliced = {kind: mask[..., start:] for kind, mask in self._masks.items()}
        return sliced.get("", sliced)


class Reader:
    """A model reading one prompt and then blocks of tokens, with a cache of its own."""

    def __init__(self, model: LanguageModel) -> None:
        """Nothing is read yet, and nothing is ever left on the model."""
        self.model = model
        self.cache = DecodeCache(0, 0)

    def prefill(self, prompt: Sequence[int], *, capacity: int) -> Tensor:
        """Read the prompt into a fresh cache; the last hidden state, [D]."""
        self.cache = DecodeCache(self.model.config.num_hidden_layers, capacity)
        ids = torch.tensor([list(prompt)], device=self.model.device)
        positions = torch.arange(len(prompt), device=self.model.device).unsqueeze(0)
        hidden = self.model.forward(ids, positions=positions, mask=None, cache=self.cache)
        self.cache.commit(range(len(prompt)))
        return hidden[0, -1]

    def read(self, ids: Tensor, block: Block) -> Tensor:
        """Read new tokens, [N]; their hidden states, [N, D]. What of them stays, `commit` says."""
        length = self.cache.length
        return self.model.forward(
            ids.unsqueeze(0),
            positions=block.positions(length),
            mask=block.mask(length),
            cache=self.cache,
        )[0]


def chain_block(model: LanguageModel, size: int, capacity: int) -> Block:
    """A block of tokens in a row."""
    return Block(model, torch.ones(size, size).tril().bool(), range(size), capacity)


def layer_windows(model: LanguageModel) -> dict[str, int]:
    """How many positions back each type of layer sees; one entry named "" where all are alike.

    Raises:
        ModelError: if there are layers that see neither all positions nor the last few.
    """
    config = model.config
    unlimited = 2**31
    window = getattr(config, "sliding_window", None) or unlimited
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        used = getattr(config, "use_sliding_window", True)
        return {"": window if used else unlimited}
    windows = {"full_attention": unlimited, "sliding_attention": window}
    unknown = [kind for kind in kinds if kind not in windows]
    if unknown:
        raise ModelError(
            f"model type {config.model_type} has layers of type {unknown[0]}, expected "
            f"{' or '.join(windows)}; choose another model"
        )
    return {kind: windows[kind] for kind in dict.fromkeys(kinds)}


def _additive(sees: Tensor, model: LanguageModel) -> Tensor:
    """0 where seen, the lowest number of the dtype elsewhere, [1, 1, N, S + N]."""
    hidden = torch.finfo(model.dtype).min
    mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, hidden)
    return mask.to(model.device)[None, None]
