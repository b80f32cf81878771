"""LM heads that give their loss as well as their logits.

The loss is asked of the module itself, so that under ZeRO-3 its sharded weights are whole for it.

Legend: P positions, V vocabulary, D hidden size, R rank of a LoRA.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_train.ops.loss import SoftTargets, linear_cross_entropy

# Logits at some of the positions that were prepared for, from whole weights: [p] -> [p, V]
LogitsAt = Callable[[Tensor], Tensor]


class LmHead(nn.Linear):
    """A whole LM head that is trained."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(  # pyright: ignore
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        soft: SoftTargets | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Logits, [..., D] -> [..., V]; with `targets` [P] the summed loss of [P, D]."""
        if targets is None:
            return F.linear(hidden.to(self.weight.dtype), self.weight)
        return linear_cross_entropy(
            hidden, self.weight, targets, soft=soft, compute_dtype=compute_dtype
        )

    def prepared(self, hidden: Tensor) -> LogitsAt:
        """Logits of [P, D], asked for in parts while the weights are whole."""
        return lambda at: F.linear(hidden[at].to(self.weight.dtype), self.weight)


class LoraLmHead(nn.Module):
    """A frozen LM head with a LoRA beside it, which alone is trained."""

    def __init__(self, layer: Any, adapter: str) -> None:
        """Take over a layer.

        Args:
            layer: the LM head as peft has wrapped it.
            adapter: the name of its adapter.
        """
        super().__init__()
        self.layer = layer
        self._adapter = adapter
        # Kept whole: assigned as a parameter it would be sharded under ZeRO-3
        self._frozen: Tensor = layer.get_base_layer().weight.detach()
        self.out_features = self._frozen.shape[0]

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        soft: SoftTargets | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The summed loss of [P, D] against `targets`, [P]."""
        return linear_cross_entropy(
            hidden,
            self._frozen,
            targets,
            low_rank=self._low_rank(hidden),
            soft=soft,
            compute_dtype=compute_dtype,
        )

    def prepared(self, hidden: Tensor) -> LogitsAt:
        """Logits of [P, D], asked for in parts; the LoRA is made once."""
        (down, up), dtype = self._low_rank(hidden), self._frozen.dtype

        def logits(at: Tensor) -> Tensor:
            frozen = F.linear(hidden[at].to(dtype), self._frozen)
            return frozen.float() + F.linear(down[at], up).float()

        return logits

    def _low_rank(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `linear_cross_entropy` takes as such, [..., R] and [V, R].

        Both matrices are asked for through their modules, not read, for the sake of ZeRO-3.
        """
        first, second = self.layer.lora_A[self._adapter], self.layer.lora_B[self._adapter]
        dropped = self.layer.lora_dropout[self._adapter](hidden.float())
        identity = torch.eye(self.layer.r[self._adapter], device=hidden.device)
        return first(dropped) * self.layer.scaling[self._adapter], second(identity).T
