"""`random:llama`: a two-layer random Llama with a byte tokenizer, the same on every machine."""

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama(
    *, hidden_size: int = 64, num_layers: int = 2, seed: int = 0, **config: object
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A random model whose greedy text varies, and its tokenizer.

    Args:
        hidden_size: a multiple of 4.
        num_layers: decoder layers.
        seed: of the weights.
        config: further fields of `LlamaConfig`.
    """
    tokenizer = byte_tokenizer()
    settings = {
        "vocab_size": 320,  # above the tokenizer's size, as padded LM heads are
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**settings))  # pyright: ignore
    return model.float(), tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three special tokens and a chat template."""
    alphabet = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = ByteLevelDecoder()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
    )
