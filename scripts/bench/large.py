"""Part of the GPU check: what a tree costs on a model of the shape of Llama 7B.

Its weights are random and made on the device, and nothing is read or saved. Heads, trees and
rounds are those of `decode`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.decode import NUM_HEADS, decoding_heads, random_prompt, tree_method
from bench.rows import Workload, compare, interleave
from medusa_train.decode import Method
from medusa_train.evaluate.speed import step_clock
from medusa_train.model.language_model import LanguageModel

NODES = (1, 8, 16, 32, 64)
CONTEXT = 512
BOUND = 1.15  # a step with the largest tree over a plain one, at most
NEEDED = 22 * 2**30  # bytes of a card on which weights, caches and graphs have room
SHAPES = {
    "cuda": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "cpu": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
    },
}
ROUNDS, STEPS = 8, 3  # rounds that count, and steps in a row in each
WARM_STEPS = 3  # the first compiles, the second records a graph, the third plays it
COMPILING = 60.0  # seconds after which no further size is compiled


def measure(device: str, numbers: dict[str, Any]) -> None:
    """Fill in `overhead_N_nodes` and, on a GPU, `overhead_N_nodes_compiled`, as rows of `decode`.

    Compiling each size of tree takes long: the largest comes first, and what there is no time for
    is left out.
    """
    model = random_model(device)
    heads = decoding_heads(model)
    parameters = [*model.decoder.parameters(), *model.lm_head.parameters()]
    numbers |= {"parameters": sum(p.numel() for p in parameters), "context": CONTEXT}
    make = partial(tree_method, model, heads)
    numbers |= _rows({nodes: _clock(make(nodes)) for nodes in (0, *NODES)}, "")
    if device == "cuda":
        numbers |= _rows(_compiled(make), "_compiled")


def too_slow(numbers: Mapping[str, Any]) -> list[str]:
    """Rows of the largest tree that are above their bound."""
    names = [f"overhead_{max(NODES)}_nodes{how}" for how in ("", "_compiled")]
    return [name for name in names if name in numbers and not numbers[name]["ratio"] <= BOUND]


def random_model(device: str) -> LanguageModel:
    """Made where it will run, in bfloat16 from the start."""
    with torch.device(device):
        config = LlamaConfig(**SHAPES[device], tie_word_embeddings=False)  # pyright: ignore
        llama = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    llama.eval().requires_grad_(False)
    return LanguageModel(llama.get_decoder(), llama.get_output_embeddings())


def _clock(method: Method) -> Workload:
    """Milliseconds of a step behind the context, once warmed up."""
    prompt = random_prompt(method.model, CONTEXT)
    steps = WARM_STEPS + (ROUNDS + 1) * STEPS
    clock = step_clock(method, prompt, room=steps * (NUM_HEADS + 1) + 1)
    clock(WARM_STEPS)
    return lambda: 1e3 * clock(STEPS)


def _compiled(make: Callable[..., Method], sizes: Sequence[int] = NODES) -> dict[int, Workload]:
    begin, clocks = time.monotonic(), {}
    largest = max(sizes)
    for nodes in (0, largest, *(size for size in sizes if size != largest)):
        if nodes in (0, largest) or time.monotonic() - begin < COMPILING:
            clocks[nodes] = _clock(make(nodes, compiled=True))
    return clocks


def _rows(clocks: Mapping[int, Workload], how: str) -> dict[str, Any]:
    """By name, each without it."""
    named = {f"overhead_{nodes}_nodes{how}": clock for nodes, clock in clocks.items()}
    figures = interleave(named, repeats=ROUNDS, warmup=1)
    plain = figures.pop(f"overhead_0_nodes{how}")
    rows = [compare(name, spent, plain, unit="ms/step") for name, spent in figures.items()]
    return {row.name: {k: v for k, v in asdict(row).items() if k != "name"} for row in rows}
