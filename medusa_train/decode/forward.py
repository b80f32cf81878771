"""One forward for all methods: new tokens behind a cache, under any tree's mask.

Legend: B rows, N new tokens, C capacity before the block, S keys that a forward sees, H attention
heads whose masks differ (of most models: 1), D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_train.decode.cache import DecodeCache
from medusa_train.decode.transfer import sent
from medusa_train.errors import ModelError
from medusa_train.model.language_model import LanguageModel
from medusa_train.ops.tree import Tree


class Block:
    """The shape of a forward's new tokens: who sees whom, and how deep each one lies.

    What a node may see depends only on its distance from the end of the cache. So masks are made
    once, wide enough for any end, and each step merely takes a window of them.
    """

    def __init__(self, model: LanguageModel, tree: Tree, capacity: int):
        """Lay out a block.

        Args:
            model: whose layers will read the masks.
            tree: of the new tokens, [N].
            capacity: C, the most tokens before the block.
        """
        self.size = len(tree.depth)
        self.capacity = capacity
        self._last_position = model.max_positions - 1
        depth = torch.tensor(tree.depth)
        self._depth = depth.to(model.device)
        # Keys by their position relative to the end of the cache: -C ... -1, then the block's own,
        # then C that nobody sees
        keys = torch.cat([torch.arange(-capacity, 0), depth, torch.zeros(capacity)])
        sees = torch.zeros(self.size, len(keys), dtype=torch.bool)
        sees[:, :capacity] = True
        sees[:, capacity : capacity + self.size] = tree.attend()
        distance = depth.unsqueeze(1) - keys
        self._masks = {
            kind: _additive(sees & (distance < window), distance, model)
            for kind, window in layer_windows(model).items()
        }

    def positions(self, lengths: Tensor) -> Tensor:
        """Position ids behind certain tokens, [B] -> [B, N].

        Nodes beyond the context, whose tokens cannot be part of an answer, get its last position.
        """
        return (lengths.unsqueeze(1) + self._depth).clamp(max=self._last_position)

    def mask(self, lengths: Sequence[int], size: int) -> Tensor | dict[str, Tensor]:
        """Additive masks of the first `size` keys behind certain tokens, [B or 1, H, N, S]."""
        if len(set(lengths)) == 1:
            start = self.capacity - lengths[0]
            # Attention on a GPU may want its mask to begin at an even address: a copy does
            cut = {
                kind: mask[..., start : start + size].contiguous()
                for kind, mask in self._masks.items()
            }
            masks = {kind: mask.unsqueeze(0) for kind, mask in cut.items()}
        else:
            starts = self.capacity - sent(lengths, self._depth.device)
            windows = {kind: mask.unfold(-1, size, 1) for kind, mask in self._masks.items()}
            masks = {k: w[:, :, starts].permute(2, 0, 1, 3) for k, w in windows.items()}
        return masks.get("", masks)


class Reader:
    """A model reading prompts and then blocks of tokens, with a cache of its own."""

    def __init__(self, model: LanguageModel, *, compiled: bool = False) -> None:
        """Nothing is read yet, and nothing is ever left on the model.

        Args:
            model: reads.
            compiled: run blocks through `torch.compile`, with shapes that do not change.

        Raises:
            MedusaError: if they cannot be compiled.
        """
        if compiled:
            model.refuse_compiled()
        self.model = model
        self.cache = DecodeCache(0, 0)
        self._compiled = compiled
        self._blocks: dict[Tree, Block] = {}  # for capacities of at least the cache's

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, capacity: int, held_back: int = 0
    ) -> Tensor:
        """Read prompts into a fresh cache; their last hidden states, [B, D].

        Prompts are padded on the right: nothing sees the padding, and what follows overwrites it.

        Args:
            prompts: token ids.
            capacity: the most tokens that will be certain or new at a time, in any row.
            held_back: leave so many of the decoder's last tokens for later.
        """
        if self._compiled:
            capacity = -(-capacity // COMPILED_STEP) * COMPILED_STEP
        source = self.model.source(prompts)
        prompts = [self.model.decoder_prompt(prompt) for prompt in prompts]
        prompts = [prompt[: len(prompt) - held_back] for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        layers = self.model.config.num_hidden_layers
        if self._compiled and (self.cache.capacity, self.cache.rows) == (capacity, len(prompts)):
            self.cache.restart()  # a compiler's graphs belong to its storage
        else:
            self.cache = DecodeCache(layers, capacity, rows=len(prompts), static=self._compiled)
        self.cache.source = source
        device = self.model.device
        if longest == 0:
            return torch.empty((len(prompts), self.model.hidden_size), device=device)
        ids = sent([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device)
        # A draft may have a shorter context than its target
        positions = torch.arange(longest, device=device).clamp(max=self.model.max_positions - 1)
        positions = positions.expand(len(prompts), -1)
        hidden = self.model.forward(ids, positions=positions, mask=None, cache=self.cache)
        self.cache.commit([range(length) for length in lengths])
        last = sent(lengths, device) - 1
        return hidden[torch.arange(len(prompts), device=device), last]

    def read(self, ids: Tensor, tree: Tree) -> Tensor:
        """Read new tokens, [B, N]; their hidden states, [B, N, D]. What stays, `commit` says."""
        cache, block = self.cache, self._block(tree)
        lengths = sent(cache.lengths, ids.device)
        ragged = len(set(cache.lengths)) > 1
        if ragged or self._compiled:
            cache.places = lengths.unsqueeze(1) + torch.arange(block.size, device=ids.device)
        size = cache.capacity if self._compiled else cache.longest + block.size
        hidden = self.model.forward(
            ids,
            positions=block.positions(lengths),
            mask=block.mask(cache.lengths, size),
            cache=cache,
            compiled=self._compiled,
        )
        cache.places = None
        return hidden

    def _block(self, tree: Tree) -> Block:
        block = self._blocks.get(tree)
        if block is None or block.capacity < self.cache.capacity:
            block = self._blocks[tree] = Block(self.model, tree, self.cache.capacity)
        return block


# Compiled forwards see caches of a multiple of so many places: each new size compiles anew
COMPILED_STEP = 512


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


def _additive(sees: Tensor, distance: Tensor, model: LanguageModel) -> Tensor:
    """The position bias where seen, the lowest number of the dtype elsewhere, [H, N, C + N + C]."""
    bias = model.position_bias(distance)
    return bias.masked_fill(~sees.to(bias.device), torch.finfo(model.dtype).min)
