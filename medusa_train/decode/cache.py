"""The key-value cache of all methods: sized to the request, written once, committed in place.

Legend: L layers, B rows, H key-value heads, S capacity, N new tokens, E size of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from medusa_train.errors import ModelError


class DecodeCache(Cache):
    """Keys and values of `length` certain tokens, and behind them those of the last forward.

    A forward writes its N new tokens behind the certain ones. `commit` then keeps some of them,
    moved together, and the rest is overwritten by the next forward. Storage is allocated at the
    first forward, from the shapes the model itself produces, and keeps its address after that.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        """Make an empty cache.

        Args:
            num_layers: L.
            capacity: S, the most tokens it can hold, those of a forward included.
        """
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None  # [L, B, H, S, E]
        self._values: Tensor | None = None

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, [B, H, N, E]; gives all of them so far."""
        if self._keys is None or self._values is None:
            self._keys, self._values = self._storage(key_states), self._storage(value_states)
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            raise ModelError(f"{end} tokens do not fit a cache for {self.capacity}")
        if key_states.shape[1] != self._keys.shape[2]:
            raise ModelError(
                f"layer {layer_idx} has {key_states.shape[1]} key-value heads, layer 0 has "
                f"{self._keys.shape[2]}; models with unequal layers are not supported"
            )
        self._keys[layer_idx, :, :, self.length : end] = key_states
        self._values[layer_idx, :, :, self.length : end] = value_states
        return self._keys[layer_idx, :, :, :end], self._values[layer_idx, :, :, :end]

    def commit(self, keep: Sequence[int]) -> None:
        """Keep these of the new tokens, in ascending order, right behind the certain ones."""
        if list(keep) != list(range(len(keep))):
            assert self._keys is not None
            assert self._values is not None
            source = torch.tensor(keep, device=self._keys.device) + self.length
            target = slice(self.length, self.length + len(keep))
            self._keys[:, :, :, target] = self._keys[:, :, :, source]
            self._values[:, :, :, target] = self._values[:, :, :, source]
        self.length += len(keep)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens; longer than what is there changes nothing."""
        self.length = max(0, min(self.length, length))

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with these rows of the batch only, [<= B]."""
        assert self._keys is not None
        assert self._values is not None
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]

    def repeat_rows(self, times: int) -> None:
        """Go on with so many copies of the only row."""
        assert self._keys is not None
        assert self._values is not None
        self._keys = self._keys.repeat(1, times, 1, 1, 1)
        self._values = self._values.repeat(1, times, 1, 1, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Certain tokens (asked for by transformers)."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys a forward sees (asked for by transformers)."""
        return self.length + query_length, 0

    def _storage(self, states: Tensor) -> Tensor:
        rows, heads, _, size = states.shape
        return states.new_empty((self.num_layers, rows, heads, self.capacity, size))
