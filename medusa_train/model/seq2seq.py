"""Encoder-decoder models of the T5 family, as the decoding methods want them.

The encoder reads a prompt once. The decoder begins with a start token and reads, beside its own
tokens, what the encoder has made of the prompt.

T5 knows places by a bias that attention adds to its scores, by how far back a key lies. The model
itself counts that distance from the end of the cache, which is wrong for rows of unequal length and
for candidates side by side. So the bias becomes part of the mask, which knows each token's depth,
and the decoder that runs here is a twin which leaves it there.

Legend: B rows, P tokens of the longest prompt, T new tokens, S keys, H heads, D hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from medusa_train.errors import ModelError
from medusa_train.model.backbone import all_end_ids, quiet_transformers
from medusa_train.model.device import choose_device, choose_dtype
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.source import resolve

NAME = "sdpa_biased_by_mask"


class Source:
    """Prompts as the encoder has left them; belongs to one cache and loses rows with it."""

    def __init__(self, states: Tensor, attend: Tensor) -> None:
        """Keep encoder states, [B, P, D], and which of them are no padding, [B, P]."""
        self.states = states
        mask = torch.zeros(attend.shape, dtype=states.dtype, device=states.device)
        lowest = torch.finfo(states.dtype).min
        self.mask = mask.masked_fill_(~attend, lowest)[:, None, None]  # additive, [B, 1, 1, P]
        self.attended = DynamicCache()  # their keys and values, made by the first forward

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(list(rows), device=self.states.device)
        self.states, self.mask = self.states[index], self.mask[index]
        self.attended.batch_select_indices(index)


class Seq2SeqModel(LanguageModel):
    """A frozen T5 or one of its kin, and its tokenizer."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str
    ) -> None:
        """Freeze `model` and refuse what would be decoded wrongly.

        Raises:
            ModelError: if the model is built in another way than T5.
        """
        model.eval().requires_grad_(False)
        self._biased = _biased_attention(model, name)
        self.start_id = model.generation_config.decoder_start_token_id  # pyright: ignore
        if self.start_id is None:
            raise ModelError(
                f"{name}: no decoder_start_token_id in its configuration, so it is unknown how an "
                "answer begins; T5 has its padding id there"
            )
        lm_head: Any = model.get_output_embeddings()
        super().__init__(model.get_decoder(), lm_head, valid_ids=len(tokenizer))
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.end_ids = all_end_ids(model, tokenizer)
        # Only T5 with tied embeddings does so
        scaled = getattr(self.config, "scale_decoder_outputs", False)
        self._scale = self.hidden_size**-0.5 if scaled else 1.0
        twin: Any = self._decoder
        twin.config._attn_implementation = NAME
        # Else it would compute a bias for every forward, which `biased_sdpa` does not use
        twin.block[0].layer[0].SelfAttention.has_relative_attention_bias = False
        _check_logits(model, self, name)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with the end token that the tokenizer puts behind it."""
        return self.tokenizer(text)["input_ids"]  # pyright: ignore

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, for people."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)  # pyright: ignore

    def decoder_prompt(self, prompt: Sequence[int]) -> Sequence[int]:
        """The start token; nothing where there is no prompt that could be answered."""
        return [self.start_id] if prompt else []

    def source(self, prompts: Sequence[Sequence[int]]) -> Source:
        """Let the encoder read prompts, which are padded on the right behind its mask."""
        longest = max(len(prompt) for prompt in prompts)
        filled = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        attend = torch.arange(longest, device=self.device) < lengths.unsqueeze(1)
        encoder: Any = self.model.get_encoder()
        ids = torch.tensor(filled, device=self.device)
        return Source(encoder(input_ids=ids, attention_mask=attend).last_hidden_state, attend)

    def position_bias(self, distance: Tensor) -> Tensor:
        """What is added to the scores of keys so far back, [...] -> [H, ...]."""
        size = int(distance.max()) + 1
        by_place = self._biased.compute_bias(1, size, past_seen_tokens=size - 1)[0, :, 0]
        by_distance = by_place.flip(-1)
        return by_distance[:, distance.long().clamp(min=0).to(by_distance.device)]

    def refuse_compiled(self) -> None:
        """Always: the bias in its masks changes with every forward.

        Raises:
            ModelError: with what to do instead.
        """
        raise ModelError(
            f"{self.name}: encoder-decoder models do not run through torch.compile; decode with "
            "compiled=False"
        )

    def forward(
        self, ids: Tensor, *, positions: Tensor, mask: Any, cache: Any, compiled: bool = False
    ) -> Tensor:
        """As of any model; the mask holds the position bias, [B or 1, H, T, S].

        Args:
            ids: [B, T].
            positions: not read.
            mask: may be None for a single token that nothing precedes.
            cache: has the `Source` of its rows.
            compiled: not read, see `refuse_compiled`.
        """
        if mask is None:  # a token that sees itself alone does so at any bias
            mask = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=ids.device)
        source: Source = cache.source
        caches = {self._cache_argument: EncoderDecoderCache(cache, source.attended)}
        decoder: Any = self._decoder
        return decoder(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=source.states,
            encoder_attention_mask=source.mask,
            use_cache=True,
            **caches,
        ).last_hidden_state

    def hidden_states(self, ids: Tensor, attend: Tensor) -> Tensor:
        """Refused: nothing is trained on encoder-decoder models.

        Raises:
            ModelError: always.
        """
        raise ModelError(f"{self.name}: heads and drafts are trained on causal models only")

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]; padding ids get minus infinity."""
        return super().logits(hidden if self._scale == 1 else hidden * self._scale)


def load_seq2seq(name: str, *, dtype: str = "auto", device: str = "auto") -> Seq2SeqModel:
    """Load a model of the T5 family and its tokenizer.

    Args:
        name: a hub name or a folder.
        dtype: a torch dtype; `auto` is bfloat16 where the device computes in it.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ModelError: if it cannot be found, read or used.
        ConfigError: if there is no such device.
    """
    source, place = resolve(name), choose_device(device)
    if source.gguf_file is not None:
        raise ModelError(f"{name}: a GGUF file; expected a hub name or a folder of transformers")
    where = {"local_files_only": source.only_here()}
    try:
        with quiet_transformers(bars=source.is_remote):
            tokenizer = AutoTokenizer.from_pretrained(source.location, **where)
            model = AutoModelForSeq2SeqLM.from_pretrained(
                source.location, dtype=choose_dtype(dtype, place), **where
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{name} cannot be loaded as an encoder-decoder model: {reason} "
            "(expected the hub name or folder of a model like T5)"
        ) from error
    return Seq2SeqModel(model.to(place), tokenizer, name=name)  # pyright: ignore


def biased_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' own function for `sdpa`, of a mask that holds the position bias already.

    Args:
        module: the attention layer.
        query: [B, H, T, E].
        key: [B, H, S, E].
        value: [B, H, S, E].
        attention_mask: additive, [B or 1, H or 1, T or 1, S].
        dropout: none, when decoding.
        scaling: of the scores.
        kwargs: as there; a position bias among them is not added again.
    """
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, biased_sdpa)


def _biased_attention(model: PreTrainedModel, name: str) -> Any:
    """The one layer of the decoder with a position bias, which all share.

    Raises:
        ModelError: if there is none, or more.
    """
    layers = [module for module in model.get_decoder().modules() if _has_bias(module)]
    blocks: Any = getattr(model.get_decoder(), "block", None)
    if not blocks or layers != [blocks[0].layer[0].SelfAttention]:
        raise ModelError(
            f"{name}: model type {model.config.model_type} is not built like T5, whose decoder "
            "layers share one relative position bias; other encoder-decoder models are not "
            "supported"
        )
    return layers[0]


def _has_bias(module: nn.Module) -> bool:
    return bool(getattr(module, "has_relative_attention_bias", False))


@torch.no_grad()
def _check_logits(model: PreTrainedModel, wrapped: Seq2SeqModel, name: str) -> None:
    """Refuse a model whose own logits are others than those that would be decoded from.

    Raises:
        ModelError: naming the model type.
    """
    prompt = [3, 5, 4]
    ids = torch.tensor([[wrapped.start_id, 4, 3, 5]], device=wrapped.device)
    expected = model(
        input_ids=torch.tensor([prompt], device=wrapped.device), decoder_input_ids=ids
    ).logits
    places = torch.arange(ids.shape[1], device=wrapped.device)
    distance = places.unsqueeze(1) - places
    lowest = torch.finfo(wrapped.dtype).min
    mask = wrapped.position_bias(distance).masked_fill(distance < 0, lowest).unsqueeze(0)
    cache: Any = DynamicCache()
    cache.source = wrapped.source([prompt])
    found = wrapped.logits(wrapped.forward(ids, positions=places, mask=mask, cache=cache))
    real = slice(wrapped.valid_ids)
    if not torch.allclose(found[..., real], expected[..., real], rtol=2e-2, atol=2e-2):
        raise ModelError(
            f"{name}: model type {model.config.model_type} computes its logits in another way than "
            "T5; such a model is not supported"
        )
