"""A model that says one known text, and heads that know it too: tiny, exact, with end or without.

The next token follows from the last one alone, so that every answer is the text from its beginning.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from command_case import TIMEOUT, environment
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads, untrained_heads
from medusa_train.model.tiny import byte_tokenizer, tiny_llama
from medusa_train.model.weights import save_heads

CHAT = [sys.executable, "-m", "medusa_train.chat"]

# No byte stands twice in it: characters of one to four bytes, with a token for each byte
SAID = "The qué€st😀in?"


def speaker(
    *, ends: bool = True, context: int = 2048
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A model that says `SAID`, and then ends its answer or says it again, and so on."""
    tokenizer = byte_tokenizer()
    size = len(tokenizer) + 61
    model, _ = tiny_llama(
        hidden_size=size, num_layers=1, vocab_size=size, max_position_embeddings=context
    )
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.mul_(1e-3)  # just enough for positions to matter at all
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(_successors(tokenizer, size, ends=ends))
    return model, tokenizer


def knowing_heads(lm_head: Tensor, *, wrong: Sequence[int] = ()) -> MedusaHeads:
    """Three heads that know what a speaker says, but for those that are `wrong`."""
    heads = untrained_heads(lm_head, num_heads=3)
    for k, head in enumerate(heads):
        power = 1 if k in wrong else k + 2
        head.lm_head.data.copy_(torch.linalg.matrix_power(lm_head, power))  # pyright: ignore
    return heads


def make_speaker(*, ends: bool = True, context: int = 2048) -> Backbone:
    """The same as a backbone."""
    return Backbone(*speaker(ends=ends, context=context), name="speaker")


def save_run(folder: Path, *, ends: bool = True, wrong: Sequence[int] = ()) -> Path:
    """A model and its heads in `folder`, as a run leaves them; gives the folder of the run."""
    model, tokenizer = speaker(ends=ends, context=1_000_000)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    heads = knowing_heads(model.lm_head.weight.detach(), wrong=wrong)
    run = folder / "run"
    save_heads(run / "medusa1" / "heads", heads, base_model=str(folder / "model"))
    return run


def piped_chat(folder: Path, lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with these lines in its pipe."""
    return subprocess.run(
        [*CHAT, *arguments],
        cwd=folder,
        env=environment(),
        input=lines,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def _successors(tokenizer: PreTrainedTokenizerFast, size: int, *, ends: bool) -> Tensor:
    """An LM head: one in the row of each token, in the column of the one before it."""
    text: list[int] = tokenizer(SAID)["input_ids"]  # pyright: ignore
    (newline,) = tokenizer("\n")["input_ids"]  # pyright: ignore  with it the template ends
    end = [tokenizer.eos_token_id] if ends else [text[0]]
    lm_head = torch.zeros((size, size))
    for token, following in zip([newline, *text], [*text, *end], strict=True):
        lm_head[following, token] = 1
    return lm_head
