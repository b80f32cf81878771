"""The key-value cache of all methods: sized to the request, written once, committed in place.

Legend: L layers, B rows, H key-value heads, S capacity, N new tokens, E size of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from medusa_train.decode.transfer import sent
from medusa_train.errors import ModelError


class DecodeCache(Cache):
    """Keys and values of each row's certain tokens, and behind them those of the last forward.

    A forward writes its N new tokens behind the certain ones, of which each row may have another
    number. `commit` then keeps some of them, moved together; the rest is overwritten by the next
    forward. Storage is allocated at the first forward, from the shapes the model itself produces,
    and keeps its address after that.
    """

    def __init__(
        self, num_layers: int, capacity: int, *, rows: int = 1, static: bool = False
    ) -> None:
        """Make an empty cache.

        Args:
            num_layers: L.
            capacity: S, the most tokens a row can hold, those of a forward included.
            rows: B.
            static: made for a compiler: forwards with `places` see all S places, so that shapes
                never change, and layers lie apart, so that it makes code for one of them only.
        """
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.capacity = capacity
        self.lengths = [0] * rows  # certain tokens
        # Where the new tokens of a forward go, [B, N]; None: behind rows that are all as long
        self.places: Tensor | None = None
        self.source: Any = None  # what the model has made of the prompts, if it has an encoder
        self._static = static
        # One tensor of all layers, [L, B, H, S, E], or one of each, [1, B, H, S, E]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Certain tokens of the longest row."""
        return max(self.lengths)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values, [B, H, N, E]; gives all of them so far."""
        if not self._keys:
            self._keys, self._values = self._storage(key_states), self._storage(value_states)
        keys, values = (
            self._of_layer(self._keys, layer_idx),
            self._of_layer(self._values, layer_idx),
        )
        if key_states.shape[1] != keys.shape[1]:
            raise ModelError(
                f"layer {layer_idx} has {key_states.shape[1]} key-value heads, layer 0 has "
                f"{keys.shape[1]}; models with unequal layers are not supported"
            )
        whole = self._static and self.places is not None
        end = self.capacity if whole else self._end(key_states.shape[2])
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

    def restart(self) -> None:
        """Begin anew in the same storage."""
        self.lengths = [0] * self.rows

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.lengths = [self.lengths[row] for row in rows]
        if self.source is not None:
            self.source.keep_rows(rows)
        self._keys = [stored[:, list(rows)] for stored in self._keys]
        self._values = [stored[:, list(rows)] for stored in self._values]

    def repeat_rows(self, times: int) -> None:
        """Go on with so many copies of the only row."""
        self.lengths = self.lengths * times
        self._keys = [stored.repeat(1, times, 1, 1, 1) for stored in self._keys]
        self._values = [stored.repeat(1, times, 1, 1, 1) for stored in self._values]

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
        longest = max(len(path) for path in paths)
        # A shorter path is filled up with places that are copied onto themselves
        device, begin = self._keys[0].device, self.lengths[0]
        source = sent(
            [
                [begin + place for place in [*path, *range(len(path), longest)]]
                for begin, path in zip(self.lengths, paths, strict=True)
            ],
            device,
        )
        target = sent([list(range(n, n + longest)) for n in self.lengths], device)
        row = torch.arange(len(paths), device=device).unsqueeze(1)
        for stored in (*self._keys, *self._values):
            if len(paths) == 1:
                stored[:, :, :, begin : begin + longest] = stored[:, :, :, source[0]]
            else:
                stored[:, row, :, target] = stored[:, row, :, source]

    def _storage(self, states: Tensor) -> list[Tensor]:
        rows, heads, _, size = states.shape
        groups, layers = (self.num_layers, 1) if self._static else (1, self.num_layers)
        shape = (layers, rows, heads, self.capacity, size)
        # Zeros: masks hide places that nobody has written yet, as in rows shorter than others, but
        # fresh memory may hold NaN, and a weight of zero does not take that out of a sum
        made = [states.new_zeros(shape) for _ in range(groups)]
        if self._static:
            for stored in made:
                torch._dynamo.mark_static_address(stored)
        return made

    def _of_layer(self, stored: list[Tensor], layer: int) -> Tensor:
        return stored[layer][0] if self._static else stored[0][layer]
