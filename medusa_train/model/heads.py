"""Medusa heads: residual blocks over the final hidden state, then an LM head.

Head k (from 0) at position t predicts token t + k + 2. Block weights and biases start at zero and
the LM head as a copy of the backbone's, so an untrained head equals the base LM head bit for bit.
Architecture after Cai et al. 2024 (arXiv 2401.10774), section 2.1.1.

Legend: P positions, K heads, V vocabulary of the heads, D hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.model.lm_head import LogitsAt
from medusa_train.model.packed import fast_linear, fast_twin
from medusa_train.model.vocabulary import to_reduced_ids
from medusa_train.ops.loss import IGNORE, SoftTargets, linear_cross_entropy

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadsShape:
    """All that is needed to build heads of the right sizes, and to refuse wrong files."""

    num_heads: int
    num_layers: int
    lm_head: Literal["own", "shared", "reduced"]
    hidden_size: int
    vocab_size: int  # of the backbone's LM head
    head_vocab_size: int  # of the heads: smaller than vocab_size only for `reduced`


class ResBlock(nn.Module):
    """`x + silu(W x + b)` with W and b starting at zero: the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        return hidden + F.silu(self.linear(hidden))


class MedusaHead(nn.Module):
    """One head. `lm_head` is [V, D]; a shared one is passed to the calls and not owned."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResBlock(shape.hidden_size) for _ in range(shape.num_layers)))
        self.lm_head = None
        if shape.lm_head != "shared":
            # NaN until copied or loaded: a forgotten weight must be seen at once
            empty = torch.full((shape.head_vocab_size, shape.hidden_size), float("nan"))
            self.lm_head = nn.Parameter(empty)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        shared: Tensor | None = None,
        soft: SoftTargets | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Summed loss of the positions that have a target: scalar, float32.

        Args:
            hidden: final-norm hidden states, [P, D].
            targets: ids in the heads' vocabulary, or `IGNORE`, [P].
            shared: the backbone's LM head for `shared` heads, [V, D].
            soft: distributions to learn instead of single ids, [p] -> [p, V].
            compute_dtype: dtype of the matrix products; None means that of `hidden`.
        """
        place = (targets != IGNORE).nonzero().squeeze(1)
        features = self.features(hidden[place], compute_dtype=compute_dtype)
        return linear_cross_entropy(
            features,
            self._weight(shared),
            targets[place],
            soft=None if soft is None else lambda at: soft(place[at]),
            compute_dtype=compute_dtype,
        )

    def features(self, hidden: Tensor, *, compute_dtype: torch.dtype | None = None) -> Tensor:
        """What the LM head reads, [P, D] -> [P, D]."""
        dtype = compute_dtype or hidden.dtype
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return self.layers(hidden.to(self._block_dtype(hidden)))

    def logits(self, hidden: Tensor, *, shared: Tensor | None = None) -> Tensor:
        """[P, D] -> [P, V], in the dtype of the weights."""
        return F.linear(self.layers(hidden.to(self._block_dtype(hidden))), self._weight(shared))

    def prepared(self, features: Tensor) -> LogitsAt:
        """Logits of own LM heads after `features` [P, D], asked for while the weights are whole."""
        weight = self._weight(None)
        return lambda at: F.linear(features[at], weight)

    def for_decoding(self, *, shared: Projection) -> Projection:
        """The same logits with frozen weights laid out for few positions: [P, D] -> [P, V].

        Args:
            shared: the backbone's LM head, for heads without one of their own.
        """
        layers = fast_twin(self.layers)
        project = shared if self.lm_head is None else fast_linear(self.lm_head)
        return lambda hidden: project(layers(hidden))

    def _weight(self, shared: Tensor | None) -> Tensor:
        weight = self.lm_head if self.lm_head is not None else shared
        if weight is None:
            raise ValueError("these heads share the backbone's LM head: pass it as `shared`")
        return weight

    def _block_dtype(self, hidden: Tensor) -> torch.dtype:
        block = next(iter(self.layers), None)
        return hidden.dtype if block is None else block.linear.weight.dtype  # pyright: ignore


class MedusaHeads(nn.Module):
    """K heads and, for `reduced`, the map from their ids to the backbone's."""

    token_map: Tensor | None

    def __init__(self, shape: HeadsShape, token_map: Tensor | None = None) -> None:
        """Build untrained heads.

        Args:
            shape: sizes; `head_vocab_size` must equal the length of `token_map`.
            token_map: backbone id of each id of the heads, ascending, [V]; `reduced` only.

        Raises:
            ValueError: if `token_map` and `shape` do not go together.
        """
        super().__init__()
        expected = shape.head_vocab_size if shape.lm_head == "reduced" else None
        found = None if token_map is None else token_map.shape[0]
        if found != expected:
            raise ValueError(f"token_map of {expected} ids expected for {shape}, got {found}")
        self.shape = shape
        self.heads = nn.ModuleList(MedusaHead(shape) for _ in range(shape.num_heads))
        self.register_buffer("token_map", token_map)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    def __getitem__(self, k: int) -> MedusaHead:
        return self.heads[k]  # pyright: ignore

    def __iter__(self) -> Iterator[MedusaHead]:
        return iter(self.heads)  # pyright: ignore

    @torch.no_grad()
    def copy_lm_head(self, lm_head: Tensor) -> None:
        """Start every head's LM head as a copy (never an alias) of the backbone's, [V, D]."""
        rows = lm_head if self.token_map is None else lm_head[self.token_map.to(lm_head.device)]
        for head in self.heads:
            if head.lm_head is not None:  # pyright: ignore
                head.lm_head.copy_(rows)  # pyright: ignore

    def to_backbone_ids(self, ids: Tensor) -> Tensor:
        """Ids of the heads' vocabulary as ids of the backbone's, any shape."""
        return ids if self.token_map is None else self.token_map[ids]

    def to_head_ids(self, ids: Tensor) -> Tensor:
        """Backbone ids as ids of the heads' vocabulary; `IGNORE` where the heads have none."""
        return ids if self.token_map is None else to_reduced_ids(ids, self.token_map)


def untrained_heads(
    weight: Tensor,
    *,
    num_heads: int,
    num_layers: int = 1,
    lm_head: Literal["own", "shared", "reduced"] = "own",
    token_map: Tensor | None = None,
) -> MedusaHeads:
    """Heads that say what the backbone's LM head says: float32, on its device.

    Args:
        weight: of the backbone's LM head, [V, D].
        num_heads: K.
        num_layers: blocks of each.
        lm_head: theirs.
        token_map: of `reduced` heads; see `MedusaHeads`.
    """
    vocab_size, hidden_size = weight.shape
    shape = HeadsShape(
        num_heads=num_heads,
        num_layers=num_layers,
        lm_head=lm_head,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        head_vocab_size=vocab_size if token_map is None else len(token_map),
    )
    heads = MedusaHeads(shape, token_map)
    heads.copy_lm_head(weight.detach())
    return heads.to(weight.device)
