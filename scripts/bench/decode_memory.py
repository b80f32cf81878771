"""`memory`: what decoding holds, of weights and for one request. No clock: the same in every run.

`weights_*` are weights as they are loaded and what decoding makes of them beside: on a CPU in
bfloat16 a rearranged copy (see `model/packed.py`). `memory_*` is what one answer takes at most, on
top of all weights, against the keys and values that it needs.
"""

from collections.abc import Callable
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from bench.case import Case
from bench.decode import DRAFT_LAYERS, GAMMA, bushy_tree, cut_draft, decoding_heads
from bench.latency import head_size
from bench.memory import MEGABYTE, memory_use, peak_bytes
from bench.rows import Row, compare
from medusa_train.decode import DraftModel, Medusa, Method, Plain
from medusa_train.decode.medusa import HeadGuesses
from medusa_train.evaluate.describe import count_bytes
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.language_model import LanguageModel

NODES = (4, 16, 64)
STEPS = 4
ROOM = 1024  # tokens of the answer


def run(case: Case) -> list[Row]:
    """All rows of `memory`."""
    heads = decoding_heads(case.backbone)
    _, draft = cut_draft(case.backbone, DRAFT_LAYERS)
    return [*_weights(case, heads, draft), *_requests(case, heads, draft)]


def _weights(case: Case, heads: MedusaHeads, draft: LanguageModel) -> list[Row]:
    """What is held, and for heads the most while it is made, against the weights as loaded."""
    backbone = case.backbone
    tree = bushy_tree(backbone, heads, max(NODES))  # as deep as there are heads
    used = partial(memory_use, device=backbone.device)
    of_heads = used(lambda: Medusa(backbone, heads, tree))
    return [
        _beside("weights_backbone", used(partial(_wrap, backbone)).kept, *_modules(backbone)),
        _beside("weights_heads", of_heads.kept, heads),
        _beside("weights_heads_peak", of_heads.peak, heads),
        _beside("weights_draft", used(partial(_wrap, draft)).kept, *_modules(draft)),
    ]


def _beside(name: str, more: int, *modules: nn.Module) -> Row:
    loaded = count_bytes(*modules) / MEGABYTE
    return _row(name, loaded + more / MEGABYTE, loaded)


def _wrap(model: LanguageModel) -> LanguageModel:
    return LanguageModel(*_modules(model))


def _modules(model: LanguageModel) -> tuple[PreTrainedModel, nn.Module]:
    return model.decoder, model.lm_head


def _requests(case: Case, heads: MedusaHeads, draft: LanguageModel) -> list[Row]:
    """Peaks of an answer with each method, against the keys and values that it needs."""
    backbone, room = case.backbone, 16 if case.tiny else ROOM
    prompt = case.prompts(1, max_new_tokens=room)[0]
    read = len(prompt) + room
    rows = []
    for nodes in (0, 4) if case.tiny else (0, *NODES):
        make = _maker(case, heads, nodes)
        peak = _peak(case, make, prompt, room)
        rows.append(_row(f"memory_n{nodes}", peak, cached_mb(backbone, read + nodes + 1)))
    make = partial(DraftModel, backbone, draft, gamma=GAMMA, compiled=case.compiled)
    needed = sum(cached_mb(model, read + GAMMA + 1) for model in (backbone, draft))
    return [*rows, _row("memory_draft", _peak(case, make, prompt, room), needed)]


def _maker(case: Case, heads: MedusaHeads, nodes: int) -> Callable[[], Method]:
    """Makes the method of a tree of so many nodes, without weights of its own."""
    backbone, compiled = case.backbone, case.compiled
    if nodes == 0:
        return partial(Plain, backbone, compiled=compiled)
    tree = bushy_tree(backbone, heads, nodes)
    guesses = HeadGuesses(backbone, heads, tree.ranks_by_depth)
    return partial(Medusa, backbone, heads, tree, guesses=guesses, compiled=compiled)


def _peak(case: Case, make: Callable[[], Method], prompt: list[int], room: int) -> float:
    """Megabytes; of a new method, so that its cache and masks are among them."""

    def answer() -> Method:
        method = make()
        tokens = method.start([prompt], room=room)
        for _ in range(STEPS):
            tokens = [block[-1] for block in method.step(tokens)]
        return method

    answer()  # what is made once in a process is none of one request
    return peak_bytes(answer, case.backbone.device) / MEGABYTE


def cached_mb(model: LanguageModel, positions: int) -> float:
    """Megabytes of the keys and values of so many positions."""
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * head_size(model) * model.dtype.itemsize * positions / MEGABYTE


def _row(name: str, held: float, peer: float) -> Row:
    return compare(name, [held] * 2, [peer] * 2, unit="MB")
