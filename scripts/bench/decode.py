"""`decode`: answers to one prompt at a time, and what a tree costs per step.

The peers are `generate` of transformers on the same weights, in the same dtype, with the same
prompts. All answers have the same length: the end id is one that no model can choose.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from bench.case import Case
from bench.rows import Row, Workload, compare, interleave
from medusa_train.decode import DraftModel, Medusa, Method, Plain, generate
from medusa_train.decode.generation import clock
from medusa_train.decode.medusa import most_ranks
from medusa_train.evaluate.speed import step_clock
from medusa_train.model.backbone import Backbone, quiet_transformers
from medusa_train.model.draft import cut_config
from medusa_train.model.heads import MedusaHeads, untrained_heads
from medusa_train.model.language_model import LanguageModel
from medusa_train.model.vocabulary import choose_token_map
from medusa_train.ops.tree import Path, Tree, build_tree

GAMMA = 4  # guesses of the draft model in a step
DRAFT_LAYERS = 4  # of the target, as they are
TREE_NODES = (8, 16)
NUM_HEADS = 4  # the heads of the quick start ...
HEAD_VOCAB = 8192  # ... and their vocabulary


def run(case: Case) -> list[Row]:
    """All rows of `decode`."""
    return [*_answers(case), *_overheads(case)]


def _answers(case: Case) -> list[Row]:
    count, tokens = (1, 6) if case.tiny else (3, 48)
    prompts = case.prompts(count, max_new_tokens=tokens + GAMMA + 1)
    backbone = case.backbone
    draft, guide = cut_draft(backbone, DRAFT_LAYERS)
    ours = {
        "plain_vs_transformers": Plain(backbone, compiled=case.compiled),
        "draft_vs_assisted": DraftModel(backbone, guide, gamma=GAMMA, compiled=case.compiled),
    }
    peers = {"plain_vs_transformers": None, "draft_vs_assisted": draft}
    workloads: dict[str, Workload] = {}
    for name, method in ours.items():
        workloads[name] = _speed(case, prompts, tokens, _ours(case, method, tokens))
        workloads[f"{name}/peer"] = _speed(
            case, prompts, tokens, _transformers(case, peers[name], tokens)
        )
    with quiet_transformers():  # assisted generation warns of calls that it makes itself
        figures = interleave(workloads, repeats=case.repeats, warmup=1)
    return [compare(name, figures[name], figures[f"{name}/peer"], unit="tokens/s") for name in ours]


def _speed(
    case: Case, prompts: Sequence[list[int]], tokens: int, answer: Callable[[list[int]], int]
) -> Workload:
    """Tokens per second over all prompts, prefill included."""

    def workload() -> float:
        begin = clock(case.backbone.device)
        for prompt in prompts:
            found = answer(prompt)
            if found != tokens:
                raise RuntimeError(f"an answer has {found} tokens, expected {tokens}")
        return len(prompts) * tokens / (clock(case.backbone.device) - begin)

    return workload


def _ours(case: Case, method: Method, tokens: int) -> Callable[[list[int]], int]:
    def answer(prompt: list[int]) -> int:
        return len(generate(method, prompt, max_new_tokens=tokens, end_ids={case.never}).ids)

    return answer


def _transformers(
    case: Case, assistant: PreTrainedModel | None, tokens: int
) -> Callable[[list[int]], int]:
    config = case.greedy(max_new_tokens=tokens, end_ids=[case.never])
    extra = {} if assistant is None else {"assistant_model": assistant}
    if assistant is not None:
        # As many guesses in every step as ours, and none held back
        assistant.generation_config.num_assistant_tokens = GAMMA
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0

    @torch.inference_mode()
    def answer(prompt: list[int]) -> int:
        ids = torch.tensor([prompt], device=case.backbone.device)
        attend = torch.ones_like(ids)
        output = case.backbone.model.generate(
            ids, attention_mask=attend, generation_config=config, **extra
        )
        return len(output[0].tolist()) - len(prompt)

    return answer


def cut_draft(backbone: Backbone, num_layers: int) -> tuple[PreTrainedModel, LanguageModel]:
    """The first layers of the target as its draft: for transformers, and for this package."""
    cut = cut_layers(backbone.model, num_layers)
    decoder, lm_head = cut.get_decoder(), cut.get_output_embeddings()
    return cut, LanguageModel(decoder, lm_head, valid_ids=backbone.valid_ids)


def cut_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The first layers of a model, at most all, with its norm and LM head, on shared memory."""
    config = cut_config(model.config, num_layers)
    with torch.random.fork_rng(devices=[]):
        cut = type(model)(config)
    missing = cut.load_state_dict(model.state_dict(), strict=False, assign=True).missing_keys
    if missing:
        raise RuntimeError(f"the target has no {missing[0]} to give to its draft model")
    cut.generation_config = copy.deepcopy(model.generation_config)
    return cut.to(model.device).eval().requires_grad_(False)  # buffers were not in the state


def _overheads(case: Case) -> list[Row]:
    steps, rounds = 2 if case.tiny else 12, case.repeats + 1
    room = rounds * steps * (NUM_HEADS + 1) + 1
    prompt = case.prompts(1, max_new_tokens=room)[0]
    heads = decoding_heads(case.backbone)
    workloads = {}
    for nodes in (0, *TREE_NODES):
        method = tree_method(case.backbone, heads, nodes, compiled=case.compiled)
        name = f"medusa_overhead_{nodes}_nodes"
        workloads[name] = step_ms(method, prompt, steps=steps, room=room)
    figures = interleave(workloads, repeats=case.repeats, warmup=1)
    plain = figures.pop("medusa_overhead_0_nodes")
    return [compare(name, spent, plain, unit="ms/step") for name, spent in figures.items()]


def step_ms(method: Method, prompt: Sequence[int], *, steps: int, room: int) -> Workload:
    """Milliseconds of a step, the mean of so many in a row; every round goes on from the last."""
    clock = step_clock(method, prompt, room=room)
    return lambda: 1e3 * clock(steps)


def decoding_heads(model: LanguageModel, *, vocab_size: int = HEAD_VOCAB) -> MedusaHeads:
    """Heads as the quick start has them; what they guess does not change what a step costs."""
    heads = untrained_heads(
        model.lm_head.weight,  # pyright: ignore
        num_heads=NUM_HEADS,
        lm_head="reduced",
        token_map=choose_token_map([], size=vocab_size, vocab_size=model.vocab_size),
    )
    return heads.to(model.dtype).eval().requires_grad_(False)


def tree_method(
    model: LanguageModel, heads: MedusaHeads, nodes: int, *, compiled: bool = False
) -> Method:
    """Medusa with a bushy tree of so many nodes; plain decoding where there are none."""
    if nodes == 0:
        return Plain(model, compiled=compiled)
    return Medusa(model, heads, bushy_tree(model, heads, nodes), compiled=compiled)


def random_prompt(model: LanguageModel, length: int) -> list[int]:
    """So many tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.valid_ids, (length,), generator=generator).tolist()


def bushy_tree(model: LanguageModel, heads: MedusaHeads, nodes: int) -> Tree:
    """`bushy_paths`, laid out for these heads."""
    most = most_ranks(model, heads)
    return build_tree(bushy_paths(nodes), num_heads=len(heads), max_rank=most)


def bushy_paths(nodes: int) -> list[Path]:
    """A tree of a usual form, deep on the best guesses: rank r counts as r + 1 along a path."""
    found: list[tuple[int, Path]] = [(0, ())]
    for cost, path in found:  # grows on the way, by at most a level of depth at a time
        if len(path) < NUM_HEADS:
            found += [(cost + rank + 1, (*path, rank)) for rank in range(8)]
    return [path for _, path in sorted(found)[1 : nodes + 1]]
