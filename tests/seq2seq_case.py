"""Tiny models of the T5 family, drafts for them, and the plain truth to meet.

Legend: B rows.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from decoding_case import VOCAB

from medusa_train.model.seq2seq import Seq2SeqModel
from medusa_train.model.tiny import byte_tokenizer

_SMALL = dict(
    vocab_size=VOCAB + 5,  # above the tokenizer's size, as those of T5 are
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=4,
    num_decoder_layers=3,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    pad_token_id=VOCAB - 1,
    decoder_start_token_id=VOCAB - 1,
    eos_token_id=None,
)
_UNTIED = dict(tie_word_embeddings=False, feed_forward_proj="gated-gelu")

# name -> (configuration class, model class, settings)
KIN: dict[str, tuple[str, str, dict]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", {}),
    "t5-v1.1": ("T5Config", "T5ForConditionalGeneration", _UNTIED),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", _UNTIED),
    "longt5": ("LongT5Config", "LongT5ForConditionalGeneration", _UNTIED),
}


def make_t5(kin: str = "t5", **settings: Any) -> Any:
    """A random model in fp32 that never ends an answer by itself.

    Its weights are made such that places matter and answers vary.
    """
    config, model, special = KIN[kin]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, model)(
            getattr(transformers, config)(**{**_SMALL, **special, **settings})
        )
        torch.manual_seed(1)
        if special is _UNTIED:  # transformers ties what it makes anew whatever its settings say
            made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.lm_head.weight) / 4)
        for name, weight in made.named_parameters():
            if name.endswith("relative_attention_bias.weight"):
                weight.data.normal_(std=2)
            elif name.endswith(".q.weight"):
                weight.data *= 4
        made.decoder.final_layer_norm.weight.data.normal_()
    return made.float().eval()


def make_seq2seq(kin: str = "t5", **settings: Any) -> Seq2SeqModel:
    """The same with the byte tokenizer."""
    return Seq2SeqModel(make_t5(kin, **settings), byte_tokenizer(), name=f"tiny {kin}")


def noisy(target: Seq2SeqModel, noise: float) -> Seq2SeqModel:
    """A copy of the target with noise in every weight: the less, the more often it is right."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return Seq2SeqModel(model, target.tokenizer, name="noisy")


def transformers_answer(
    target: Seq2SeqModel, prompt: Sequence[int], length: int, **settings: Any
) -> list[int]:
    """What `transformers.generate` answers by greedy search, the start token left out."""
    ids = torch.tensor([list(prompt)])
    model: Any = target.model
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        num_beams=1,
        suppress_tokens=list(range(target.valid_ids, target.vocab_size)),
        **settings,
    )
    return answer[0, 1:].tolist()
