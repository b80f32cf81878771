"""Does every lossless method say what `transformers.generate` says, token for token?

    python scripts/exactness.py --heads outputs/quickstart/medusa1/heads
    python scripts/exactness.py --heads outputs/quickstart/medusa1/heads --dtype bfloat16

In float32 every answer must be equal. In half precision answers may part where the target hardly
prefers one of two tokens: each such place is shown with the distance of the two logits.
The exit status is 1 if an answer differs anywhere but at a near-tie.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported

import torch
from bench.case import DEFAULT_MODEL
from bench.decode import bushy_paths, cut_draft, decoding_heads
from rich.console import Console
from rich.progress import track
from rich.table import Table

from medusa_train.config.load import load
from medusa_train.data.prompts import encode_prompts, prompts_by_split
from medusa_train.decode import DraftModel, Lookup, Medusa, Method, Plain, generate_batch
from medusa_train.decode.medusa import most_ranks
from medusa_train.errors import MedusaError
from medusa_train.evaluate.near_ties import NEAR, gap_of
from medusa_train.evaluate.statistics import first_difference
from medusa_train.model.backbone import Backbone, load_backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.weights import load_heads
from medusa_train.ops.tree import Path as RankPath
from medusa_train.ops.tree import build_tree, chain

RANDOM_VOCAB = 2000  # of the random heads


def trees(num_heads: int) -> dict[str, list[RankPath]]:
    """Eight shapes, from one node to 64, for so many heads."""
    wide = [(rank,) for rank in range(8)]
    combed = [*chain(num_heads), *((0,) * depth + (1,) for depth in range(num_heads))]
    bushy = {nodes: bushy_paths(nodes) for nodes in (4, 12, 24, 64)}
    return {
        "single": [(0,)],
        "chain": chain(num_heads),
        "wide": wide,
        "comb": combed,
        **{
            f"{nodes} nodes": [path for path in paths if len(path) <= num_heads]
            for nodes, paths in bushy.items()
        },
    }


@dataclass(frozen=True, kw_only=True)
class Found:
    """Answers of one method against the reference."""

    name: str
    differing: int
    gaps: list[float]  # at the first difference of each, in spacings of the dtype
    tokens_per_step: float


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all methods; the exit status."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


def _run(options: argparse.Namespace) -> int:
    config = load("model=smollm2_135m", f"model.dtype={options.dtype}")
    backbone = load_backbone(replace(config.model, name=options.model))
    kinds = {"random heads": random_heads(backbone)}
    if options.heads is not None:
        kinds["trained heads"] = load_heads(
            options.heads, dtype=backbone.dtype, device=backbone.device, backbone=backbone
        )
    splits = prompts_by_split(config.prompts)
    prompts = [*splits["test"], *splits["calibration"]][: options.prompts]
    encoded = encode_prompts(prompts, backbone, system=None, max_new_tokens=options.max_new_tokens)
    ids = [each.ids for each in encoded]
    truth = [
        _reference(backbone, prompt, options.max_new_tokens)
        for prompt in track(ids, "transformers.generate", console=Console(stderr=True))
    ]
    found = []
    for name, method in methods(backbone, kinds):
        found.append(_compare(name, method, backbone, ids, truth, options))
        print(f"{name}: {found[-1].differing} answers differ", file=sys.stderr)
    _print(found, backbone, len(ids), options)
    return int(not all(gap <= NEAR for each in found for gap in each.gaps))


def methods(backbone: Backbone, kinds: dict[str, MedusaHeads]) -> Iterator[tuple[str, Method]]:
    """Plain, every tree with each kind of heads, a draft model and prompt lookup."""
    yield "plain", Plain(backbone)
    for kind, loaded in kinds.items():
        for name, paths in trees(len(loaded)).items():
            most = most_ranks(backbone, loaded)
            tree = build_tree(paths, num_heads=len(loaded), max_rank=most)
            yield f"medusa, {kind}, {name}", Medusa(backbone, loaded, tree)
    _, draft = cut_draft(backbone, 3)
    yield "draft model, gamma 3", DraftModel(backbone, draft, gamma=3)
    yield "draft model, adaptive", DraftModel(backbone, draft, gamma=3, adaptive=True)
    yield "lookup", Lookup(backbone)


def random_heads(backbone: Backbone) -> MedusaHeads:
    """Heads that guess at random: what they say must not matter."""
    heads = decoding_heads(backbone, vocab_size=RANDOM_VOCAB)
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        noise = 0.05 * torch.randn(parameter.shape, generator=generator)
        parameter.data += noise.to(parameter.device, parameter.dtype)
    return heads


@torch.inference_mode()
def _reference(backbone: Backbone, prompt: Sequence[int], length: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=backbone.device)
    output = backbone.model.generate(  # pyright: ignore
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=sorted(backbone.end_ids),
        pad_token_id=0,
        suppress_tokens=list(range(backbone.valid_ids, backbone.vocab_size)) or None,  # padding
    )
    return output[0, len(prompt) :].tolist()


def _compare(
    name: str,
    method: Method,
    backbone: Backbone,
    prompts: Sequence[list[int]],
    truth: Sequence[list[int]],
    options: argparse.Namespace,
) -> Found:
    gap = gap_of(backbone, {str(row): prompt for row, prompt in enumerate(prompts)})
    gaps, differing, tokens, steps = [], 0, 0, 0
    for start in range(0, len(prompts), options.batch_size):
        rows = range(start, min(start + options.batch_size, len(prompts)))
        answers = generate_batch(
            method,
            [prompts[row] for row in rows],
            max_new_tokens=options.max_new_tokens,
            end_ids=backbone.end_ids,
        )
        for row, answer in zip(rows, answers, strict=True):
            tokens += len(answer.ids) - 1
            steps += answer.steps
            place = first_difference(answer.ids, truth[row])
            if place is not None:
                differing += 1
                pair = answer.ids[place : place + 1] + truth[row][place : place + 1]
                gaps.append(gap(str(row), truth[row][:place], *pair) if len(pair) == 2 else 1e9)
    return Found(name=name, differing=differing, gaps=gaps, tokens_per_step=tokens / max(steps, 1))


def _print(
    found: Sequence[Found], backbone: Backbone, prompts: int, options: argparse.Namespace
) -> None:
    table = Table(
        title=f"{backbone.name}, {options.dtype}, {backbone.device}: "
        f"{prompts} prompts, {options.max_new_tokens} tokens",
        caption=f"gaps in spacings of {options.dtype}; up to {NEAR:g} is a near-tie",
    )
    table.add_column("method", no_wrap=True)
    for column in ("tokens per step", "differing answers", "largest gap"):
        table.add_column(column, justify="right")
    for each in found:
        largest = f"{max(each.gaps):.2f}" if each.gaps else ""
        table.add_row(each.name, f"{each.tokens_per_step:.2f}", str(each.differing), largest)
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--heads", type=Path, metavar="DIR", help="trained heads; none: random only"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as model.name of a recipe")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=_count, default=50)
    parser.add_argument("--max-new-tokens", type=_count, default=32)
    parser.add_argument(
        "--batch-size", type=_count, default=10, help="rows at once; 1 for one by one"
    )
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {count}")
    return count


if __name__ == "__main__":
    sys.exit(main())
