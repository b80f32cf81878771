"""The key-value cache of all methods: sized to the request, written once, committed in place.

Legend: L layers, B rows, H key-value heads, S capacity, N new tokens, E size of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from medusa_train.errors import ModelError


class DecodeCache(Cache):
    """Keys and values of each row's certain tokens, and behind them those of the last forward.

    A forward writes its N new tokens behind the certain ones, of which each row may have another
    number. `commit` then keeps some of them, moved together; the rest is overwritten by the next
    forward. Storage is allocated at the first forward, from the shapes the model itself produces,
    and keeps its address after that.
    """

    def __init__(self, num_layers: int, capacity: int, *, rows: int = 1) -> None:
        """Make an empty cache.

        Args:
            num_layers: L.
            capacity: S, the most tokens a row can hold, those of a forward included.
            rows: B.
        """
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.capacity = capacity
        self.lengths = [0] * rows  # certain tokens
        # Where the new tokens of a forward go, [B, N]; None: behind rows that are all as long
        self.places: Tensor | None = None
        self.source: Any = None  # what the model has made of the prompts, if it has an encoder
        self.whole = False  # show a forward all S places, so that shapes never change
        self._keys: Tensor | None = None  # [L, B, H, S, E]
        self._values: Tensor | None = None

    @property
    def longest(self) -> int:
        """Certain tokens of the longest row."""
        return max(self.lengths)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, [B, H, N, E]; gives all of them so far."""
        if self._keys is None or self._values is None:
            self._keys, self._values = self._storage(key_states), self._storage(value_states)
        if key_states.shape[1] != self._keys.shape[2]:
            raise ModelError(
                f"layer {layer_idx} has {key_states.shape[1]} key-value heads, layer 0 has "
                f"{self._keys.shape[2]}; models with unequal layers are not supported"
            )
        end = self.capacity if self.whole else self._end(key_states.shape[2])
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self.places is None:
            begin = end - key_states.shape[2]
            keys[:, :, begin:end] = key_states
            values[:, :, begin:end] = value_states
        else:
            places = self.places[:, None, :, None]
            keys.scatter_(2, places.expand_as(key_states), key_states)
            values.scatter_(2, places.expand_as(value_states), value_states)
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these of each row's new tokens, ascending, right behind its certain ones.

        Args:
            paths: places among the N new tokens, row by row.
        """
        if any(list(path) != list(range(len(path))) for path in paths):
            self._move(paths)
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first tokens of each row; more than there are changes nothing."""
        self.lengths = [
            max(0, min(old, new)) for old, new in zip(self.lengths, lengths, strict=True)
        ]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.lengths = [self.lengths[row] for row in rows]
        if self.source is not None:
            self.source.keep_rows(rows)
        if self._keys is not None and self._values is not None:
            index = torch.tensor(list(rows), device=self._keys.device)
            self._keys, self._values = self._keys[:, index], self._values[:, index]

    def repeat_rows(self, times: int) -> None:
        """Go on with so many copies of the only row."""
        assert self._keys is not None
        assert self._values is not None
        self.lengths = self.lengths * times
        self._keys = self._keys.repeat(1, times, 1, 1, 1)
        self._values = self._values.repeat(1, times, 1, 1, 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Certain tokens (asked for by transformers)."""
        return self.longest

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys a forward sees (asked for by transformers)."""
        return self.longest + query_length, 0

    def _end(self, new: int) -> int:
        """One past the last key that a forward of `new` tokens sees."""
        end = self.longest + new
        if end > self.capacity:
            raise ModelError(f"{end} tokens do not fit a cache for {self.capacity}")
        return end

    def _move(self, paths: Sequence[Sequence[int]]) -> None:
        assert self._keys is not None
        assert self._values is not None
        longest = max(len(path) for path in paths)
        # A shorter path is filled up with places that are copied onto themselves
        source = torch.tensor(
            [
                [begin + place for place in [*path, *range(len(path), longest)]]
                for begin, path in zip(self.lengths, paths, strict=True)
            ]
        )
        target = torch.tensor(self.lengths).unsqueeze(1) + torch.arange(longest)
        for stored in (self._keys, self._values):
            rows, device = range(len(paths)), stored.device
            if len(paths) == 1:
                begin, end = int(target[0, 0]), int(target[0, -1]) + 1
                stored[:, :, :, begin:end] = stored[:, :, :, source[0].to(device)]
            else:
                row = torch.tensor(rows, device=device).unsqueeze(1)
                stored[:, row, :, target.to(device)] = stored[:, row, :, source.to(device)]

    def _storage(self, states: Tensor) -> Tensor:
        rows, heads, _, size = states.shape
        # Zeros: masks hide places that nobody has written yet, as in rows shorter than others, but
        # fresh memory may hold NaN, and a weight of zero does not take that out of a sum
        return states.new_zeros((self.num_layers, rows, heads, self.capacity, size))
