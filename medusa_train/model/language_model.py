"""What every decoding method asks of a model: hidden states, logits, the best next token.

Legend: B rows, T tokens, P positions, V vocabulary, D hidden size, H attention heads, S keys.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_train.errors import ModelError
from medusa_train.model.attention import use_grouped_attention
from medusa_train.model.compat import cache_argument
from medusa_train.model.compiled import compile_for_decoding, refuse_compile
from medusa_train.model.packed import fast_twin, plain_twin
from medusa_train.ops.sample import best_ids


class LanguageModel:
    """A decoder, the LM head after it, and for a reduced vocabulary the map to target ids.

    The LM head is applied apart from the decoder, so that it runs only where logits are read.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        lm_head: nn.Module,
        *,
        valid_ids: int | None = None,
        token_map: Tensor | None = None,
    ) -> None:
        """Wrap a decoder.

        Args:
            decoder: ends with the final norm.
            lm_head: a linear layer, [D] -> [V].
            valid_ids: ids from this one on are padding of the LM head and are never chosen.
            token_map: target id of each id of the LM head, [V]; None where they are the same.
        """
        self.decoder = decoder
        self.lm_head = lm_head
        self.token_map = token_map
        self.config = decoder.config.get_text_config()
        rows = int(lm_head.weight.shape[0])  # pyright: ignore
        self.vocab_size = rows
        self.valid_ids = min(rows, valid_ids or rows) if token_map is None else rows
        self.hidden_size = int(self.config.hidden_size)
        self._decoder, self._lm_head = fast_twin(decoder), fast_twin(lm_head)
        use_grouped_attention(self._decoder)  # pyright: ignore
        self._rows_decoder: Callable[..., Any] = self._decoder
        self._softcap = getattr(self.config, "final_logit_softcapping", None)
        self._cache_argument = cache_argument(type(decoder))
        self._wrapped_as = _whereabouts(lm_head)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.decoder.get_input_embeddings().weight.device  # pyright: ignore

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.lm_head.weight.dtype  # pyright: ignore

    @property
    def readable_ids(self) -> int:
        """Ids below this have an embedding."""
        return int(self.decoder.get_input_embeddings().weight.shape[0])  # pyright: ignore

    @property
    def max_positions(self) -> int:
        """The longest context, prompt and answer together.

        With longrope only as far as all positions turn alike: beyond, a forward turns every token
        by its furthest one, so that a guess or a longer row would change what others say.
        """
        longest = getattr(self.config, "max_position_embeddings", None) or 2**31
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            inside = getattr(self.config, "original_max_position_embeddings", None)
            longest = min(
                longest, rope.get("original_max_position_embeddings") or inside or longest
            )
        return int(longest)

    def decoder_prompt(self, prompt: Sequence[int]) -> Sequence[int]:
        """What the decoder itself reads before it answers a prompt: here all of it."""
        return prompt

    def source(self, prompts: Sequence[Sequence[int]]) -> Any:
        """What it reads beside its own tokens in every forward, with `keep_rows`: here nothing."""
        return None

    def position_bias(self, distance: Tensor) -> Tensor:
        """What masks add to scores of keys so far back, [...] -> [H or 1, ...]: here nothing."""
        return torch.zeros((1, *distance.shape), dtype=self.dtype, device=self.device)

    def refuse_moved(self) -> None:
        """Refuse a model that was moved or cast since: what was made for it then is of no use now.

        Raises:
            ModelError: with what it was and is.
        """
        now = _whereabouts(self.lm_head)
        if now != self._wrapped_as:
            (dtype, device), (was_dtype, was_device) = now, self._wrapped_as
            raise ModelError(
                f"the model is {dtype} on {device} now, and was {was_dtype} on {was_device} when "
                "it was wrapped: wrap it again after moving it, and make methods anew"
            )

    def refuse_compiled(self) -> None:
        """Refuse `compiled` forwards where they cannot be.

        Raises:
            ConfigError: if the compiler is missing or switched off.
        """
        refuse_compile(self.device, "decode.compile")

    def forward(
        self, ids: Tensor, *, positions: Tensor, mask: Any, cache: Any, compiled: bool = False
    ) -> Tensor:
        """One forward over new tokens: final-norm hidden states, [B, T, D].

        Args:
            ids: [B, T].
            positions: [B, T].
            mask: additive, [B or 1, H or 1, T, S], or one by layer type.
            cache: keys and values of the S - T tokens before; the new ones are added to it.
            compiled: run it through `torch.compile`.
        """
        cached = {self._cache_argument: cache}
        decoder = self._compiled_decoder if compiled else self._decoder
        return decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **cached
        ).last_hidden_state

    @cached_property
    def _compiled_decoder(self) -> Callable[..., Any]:
        # Not the fast twin: the compiler cannot see into rearranged weights
        twin = plain_twin(self.decoder)
        use_grouped_attention(twin)  # pyright: ignore
        return compile_for_decoding(twin)

    def hidden_states(self, ids: Tensor, attend: Tensor) -> Tensor:
        """Final-norm hidden states of right-padded rows, without a cache, [B, T] -> [B, T, D]."""
        attention_mask = None if bool(attend.all()) else attend
        return self._rows_decoder(
            input_ids=ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]; padding ids get minus infinity."""
        logits = self.cap(self._lm_head(hidden))
        if self.valid_ids < self.vocab_size:
            logits[..., self.valid_ids :] = float("-inf")
        return logits

    def logits_over(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits in the ids of a target; minus infinity where this model has none.

        Args:
            hidden: [..., D].
            vocab_size: V of the target.

        Returns:
            [..., V].
        """
        own = self.logits(hidden)
        if self.token_map is None and own.shape[-1] == vocab_size:
            return own
        ids = self.token_map
        if ids is None:
            ids = torch.arange(min(own.shape[-1], vocab_size), device=own.device)
        full = own.new_full((*own.shape[:-1], vocab_size), float("-inf"))
        full[..., ids] = own[..., : len(ids)]
        return full

    def cap(self, logits: Tensor) -> Tensor:
        """What some models do to the products of their LM head, any shape."""
        return (
            logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
        )

    def best(self, hidden: Tensor) -> Tensor:
        """The greedy next token of each position in target ids, [..., D] -> [...]."""
        ids = best_ids(self.logits(hidden))
        return ids if self.token_map is None else self.token_map[ids]


def _whereabouts(lm_head: nn.Module) -> tuple[torch.dtype, torch.device]:
    weight: Any = lm_head.weight
    return weight.dtype, weight.device


def check_head(model: PreTrainedModel, wrapped: LanguageModel, name: str) -> None:
    """Refuse a model whose logits are more than its LM head on the final hidden state.

    Raises:
        ModelError: naming the model type.
    """
    ids = torch.arange(4, device=wrapped.device).unsqueeze(0)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[..., : wrapped.valid_ids]
        hidden = wrapped.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))
        found = wrapped.logits(hidden)[..., : wrapped.valid_ids]
    if not torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2):
        raise ModelError(
            f"{name}: the logits of model type {model.config.model_type} are not its LM head on "
            "the final hidden state; such a model is not supported"
        )


def check_positions(wrapped: LanguageModel, name: str) -> None:
    """Refuse a model that counts positions by itself, as with ALiBi: siblings in a tree share one.

    Such a model gives the very same numbers wherever each token is said to lie.

    Raises:
        ModelError: naming the model type.
    """
    places = torch.arange(4, device=wrapped.device).unsqueeze(0)
    everything = torch.ones_like(places)  # without a mask, gaps would mean that new rows begin
    with torch.no_grad():
        here, there = (
            wrapped.decoder(
                input_ids=places,
                attention_mask=everything,
                position_ids=places * spacing,
                use_cache=False,
            ).last_hidden_state
            for spacing in (1, 2)
        )
    if torch.equal(here, there):
        raise ModelError(
            f"{name}: model type {wrapped.config.model_type} takes no position ids, as with ALiBi; "
            "trees of candidates need them, choose a model with rotary or learned positions"
        )
