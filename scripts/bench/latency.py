"""`latency`: what a step costs by context and tree, beside the least that the machine allows.

The floor of a step is the larger of two times: reading all weights and the cached keys and values
once at the machine's measured bandwidth, and its arithmetic at the measured rate of large matrix
products. `value / peer` of a row is thus the distance to the limit.

Legend: N new tokens of a step (nodes and root), C context, L layers, E size of an attention head.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot
from torch import nn

from bench.case import Case
from bench.decode import decoding_heads, random_prompt, step_ms, tree_method
from bench.rows import Row, Workload, compare, interleave
from medusa_train.decode.generation import clock
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel

CONTEXTS = (64, 512, 2048)
NODES = (1, 2, 4, 8, 16, 32, 64)
STEPS = 3  # in a row, in each round


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What it does at best, measured here and now."""

    bytes_per_s: float
    flops_per_s: float


def run(case: Case) -> list[Row]:
    """Rows `step_cC_nN` in milliseconds, N counting nodes (0 for plain)."""
    machine, heads = measure_machine(case), decoding_heads(case.backbone)
    rows = []
    for context in (16,) if case.tiny else CONTEXTS:
        nodes_of = (0, 1, 4) if case.tiny else (0, *NODES)
        floors = {
            nodes: 1e3
            * floor_seconds(case.backbone, heads if nodes else None, machine, nodes + 1, context)
            for nodes in nodes_of
        }
        workloads = {
            f"step_c{context}_n{nodes}": _workload(case, heads, nodes, context)
            for nodes in nodes_of
        }
        figures = interleave(workloads, repeats=case.repeats, warmup=1)
        rows += [
            compare(name, spent, [floor] * len(spent), unit="ms/step")
            for (name, spent), floor in zip(figures.items(), floors.values(), strict=True)
        ]
    return rows


def _workload(case: Case, heads: MedusaHeads, nodes: int, context: int) -> Workload:
    """Steps behind `context` random tokens."""
    method = tree_method(case.backbone, heads, nodes, compiled=case.compiled)
    prompt = random_prompt(case.backbone, context)
    room = (case.repeats + 1) * STEPS * method.longest_block + 1
    return step_ms(method, prompt, steps=STEPS, room=room)


def floor_seconds(
    backbone: Backbone, heads: MedusaHeads | None, machine: Machine, tokens: int, context: int
) -> float:
    """The least time of a step of N tokens.

    Args:
        backbone: each weight but the embeddings is read once and does two operations a token.
        heads: read for one position; None without.
        machine: its limits.
        tokens: N.
        context: C; keys and values of all layers are read, and attended to by every token.
    """
    weights = linear_elements(backbone.decoder) + backbone.lm_head.weight.numel()  # pyright: ignore
    extra = 0 if heads is None else sum(p.numel() for p in heads.parameters())
    config = backbone.config
    layers, size = config.num_hidden_layers, head_size(backbone)
    cached = 2 * layers * config.num_key_value_heads * size * (context + tokens)
    attention = 4 * layers * config.num_attention_heads * size * (context + tokens) * tokens
    item = backbone.dtype.itemsize
    read = item * (weights + extra + cached) / machine.bytes_per_s
    computed = (2 * (weights * tokens + extra) + attention) / machine.flops_per_s
    return max(read, computed)


def linear_elements(module: nn.Module) -> int:
    """Weights of matrix products, embeddings left out."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def head_size(model: LanguageModel) -> int:
    """E."""
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def measure_machine(case: Case) -> Machine:
    """Bandwidth of reading a large tensor; rate of large products in the backbone's dtype."""
    device, dtype = case.backbone.device, case.backbone.dtype
    elements, size = (2**18, 64) if case.tiny else (2**28, 2048)
    stored = torch.ones(elements, dtype=torch.uint8, device=device).view(torch.int64)
    square = torch.ones((size, size), dtype=dtype, device=device)
    reading = _best_seconds(case, stored.sum)
    computing = _best_seconds(case, partial(torch.mm, square, square))
    return Machine(bytes_per_s=elements / reading, flops_per_s=2 * size**3 / computing)


def _best_seconds(case: Case, work: Callable[[], object]) -> float:
    device, spent = case.backbone.device, []
    for _ in range(6):
        begin = clock(device)
        work()
        spent.append(clock(device) - begin)
    return min(spent)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the latency of each context by nodes, measured and at best."""
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    lines: dict[int, list[tuple[int, float, float]]] = {}
    for row in rows:
        if found := re.fullmatch(r"step_c(\d+)_n(\d+)", row.name):
            context, nodes = map(int, found.groups())
            lines.setdefault(context, []).append((nodes, row.value, row.peer))
    for context, points in lines.items():
        nodes, measured, floor = zip(*points, strict=True)
        (line,) = axes.plot(nodes, measured, marker="o", label=f"context {context}")
        axes.plot(nodes, floor, linestyle="--", color=line.get_color(), label="  its floor")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set(xlabel="nodes of the tree (0: plain decoding)", ylabel="ms a step", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
