"""Attention for a few new tokens under a mask, with grouped key-value heads read once.

transformers repeats keys and values for every query head whenever there is a mask and more than one
new token, which is what checking drafts looks like. Here the query heads of a group become
further rows of one product instead.

Legend: B rows, H query heads, G key-value heads, N new tokens, S keys, E size of a head.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "grouped_sdpa"


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' own function for `sdpa`: [B, H, N, E] -> [B, N, H, E].

    Args:
        module: the attention layer.
        query: [B, H, N, E].
        key: [B, G, S, E]; H is a multiple of G.
        value: [B, G, S, E].
        attention_mask: additive, [B or 1, 1, N, S]; without one transformers' function is called.
        dropout: as there.
        scaling: of the scores; None means `E ** -0.5`.
        kwargs: as there.
    """
    rows, heads, tokens, size = query.shape
    groups = key.shape[1]
    plain = groups == heads or attention_mask is None or attention_mask.shape[1] != 1
    if plain or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    share = heads // groups
    attended = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, groups, share * tokens, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, share, 1),  # pyright: ignore
        scale=scaling,
    )
    return attended.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous(), None


def use_grouped_attention(decoder: PreTrainedModel) -> None:
    """Let a decoder of one's own use `grouped_sdpa` where it used `sdpa`."""
    replaceable = getattr(decoder, "_supports_attention_backend", False)  # Falcon's is not
    if replaceable and decoder.config._attn_implementation == "sdpa":
        decoder.config._attn_implementation = NAME


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)
