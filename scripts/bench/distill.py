"""`distill`: many prompts answered at once, against batched `generate` of transformers.

Both answer greedily, with the same prompts, padding on the left, end ids and cap. Only tokens up
to the end of each answer count, so finished rows that go on being computed are no gain.
"""

from collections.abc import Collection, Sequence

import torch

from bench.case import Case
from bench.rows import Row, Workload, compare, interleave
from medusa_train.decode.batched import answer_batch
from medusa_train.decode.generation import clock


def run(case: Case) -> list[Row]:
    """All rows of `distill`."""
    rows, tokens = (3, 6) if case.tiny else (32, 96)
    prompts = case.prompts(rows, max_new_tokens=tokens)
    workloads = {"ours": _ours(case, prompts, tokens), "peer": _transformers(case, prompts, tokens)}
    figures = interleave(workloads, repeats=case.repeats, warmup=1)
    name = "distill_tokens_per_s"
    return [compare(name, figures["ours"], figures["peer"], unit="tokens/s")]


def _ours(case: Case, prompts: Sequence[list[int]], tokens: int) -> Workload:
    backbone = case.backbone

    def workload() -> float:
        begin = clock(backbone.device)
        answers = answer_batch(backbone, prompts, max_new_tokens=tokens, end_ids=backbone.end_ids)
        return sum(len(a.ids) for a in answers) / (clock(backbone.device) - begin)

    return workload


def _transformers(case: Case, prompts: Sequence[list[int]], tokens: int) -> Workload:
    backbone = case.backbone
    config = case.greedy(max_new_tokens=tokens, end_ids=sorted(backbone.end_ids))
    longest = max(len(prompt) for prompt in prompts)

    @torch.inference_mode()
    def workload() -> float:
        begin = clock(backbone.device)
        ids, attend = left_padded(prompts, backbone.device)
        output = backbone.model.generate(ids, attention_mask=attend, generation_config=config)
        answers = output[:, longest:].tolist()
        seconds = clock(backbone.device) - begin
        return sum(answer_length(answer, backbone.end_ids) for answer in answers) / seconds

    return workload


def left_padded(
    prompts: Sequence[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of prompts that all end at the same place, both [B, T]."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    attend = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attend[row, longest - len(prompt) :] = 1
    return ids.to(device), attend.to(device)


def answer_length(answer: Sequence[int], end_ids: Collection[int]) -> int:
    """Tokens up to the first end id, which counts; all of them where there is none."""
    return next((i + 1 for i, token in enumerate(answer) if token in end_ids), len(answer))
