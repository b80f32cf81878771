"""Part of `train`: whole training steps of Medusa-1 and Medusa-2, against `peer.py`.

A step is what the loop does: count the targets, and for each micro-batch hidden states, forward and
backward; then clipping and AdamW, which is the same object on both sides. Ours sorts the rows of a
step by length, as the loop does; the peer takes them as they come.

Legend: L losses.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import peer
from bench.case import Case
from bench.memory import MEGABYTE, peak_bytes
from bench.rows import Row, Workload, compare, interleave
from medusa_train.data.hidden_states import HiddenSource, cached_source, online_source
from medusa_train.data.rows import Row as DataRow
from medusa_train.data.rows import part_path, read_split, write_part
from medusa_train.decode.generation import clock
from medusa_train.model.device import choose_dtype
from medusa_train.model.heads import MedusaHeads, untrained_heads
from medusa_train.model.student import Student
from medusa_train.model.vocabulary import choose_token_map
from medusa_train.train.joint import Medusa2Objective
from medusa_train.train.medusa1 import Medusa1Objective
from medusa_train.train.objective import Objective
from medusa_train.train.run import make_teacher
from medusa_train.train.torch_engine import TorchEngine

NUM_HEADS = 4  # of the quick start, and ...
HEAD_VOCAB = 8192  # ... its reduced vocabulary
HEAD_WEIGHT = 0.8
MICRO_ROWS = 4  # rows at once
ANSWERS = (32, 192)  # tokens of the shortest and of the longest possible answer

# Forward and backward of one micro-batch: rows and scales [L] -> sums [L]
Gradients = Callable[[Sequence[DataRow], Sequence[float]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to train: what the plain engine runs, or `stacked` instead."""

    objective: Objective
    engine: TorchEngine
    stacked: Gradients | None = None

    def accumulate(self, rows: Sequence[DataRow]) -> Tensor:
        """Gradients of a global step; the mean losses, [L]."""
        counts = self.objective.target_counts(rows)
        scales = [w / int(n) for w, n in zip(self.objective.weights(1.0), counts, strict=True)]
        if self.stacked is None:
            rows = sorted(rows, key=lambda row: -len(row.ids))
        micros = [rows[at : at + MICRO_ROWS] for at in range(0, len(rows), MICRO_ROWS)]
        return torch.stack([self._gradients(m, scales) for m in micros]).sum(dim=0).cpu() / counts

    def _gradients(self, rows: Sequence[DataRow], scales: Sequence[float]) -> Tensor:
        if self.stacked is not None:
            return self.stacked(rows, scales)
        return self.engine.accumulate(self.objective.batch(rows), scales)

    def clear(self) -> None:
        """Zero the gradients, which stay allocated."""
        for parameter in self.objective.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


def run(case: Case) -> list[Row]:
    """The rows of whole steps."""
    with tempfile.TemporaryDirectory() as folder:
        rows = stored_rows(case, Path(folder))
        # Medusa-2 comes last: it puts a LoRA onto the backbone
        return [*_medusa1_rows(case, rows), *_medusa2_rows(case, rows)]


def _medusa1_rows(case: Case, rows: Sequence[DataRow]) -> list[Row]:
    sides = medusa1_sides(case, rows)
    check(sides, rows, names=("online", "cached", "stacked"))
    figures = _speeds(case, sides, rows)
    stacked = figures.pop("stacked")
    return [
        compare(f"medusa1_{name}_vs_stacked", found, stacked, unit="tokens/s")
        for name, found in figures.items()
    ]


def _medusa2_rows(case: Case, rows: Sequence[DataRow]) -> list[Row]:
    sides = medusa2_sides(case)
    check(sides, rows, names=("ours", "stacked"))  # and allocates the gradients, which last
    peaks = interleave(
        {name: _peak(case, side, rows) for name, side in sides.items()},
        repeats=2,  # the same in every round
        warmup=0,
    )
    speeds = _speeds(case, sides, rows)
    return [
        compare("medusa2_memory_vs_stacked", peaks["ours"], peaks["stacked"], unit="MB"),
        compare("medusa2_vs_stacked", speeds["ours"], speeds["stacked"], unit="tokens/s"),
    ]


def check(sides: Mapping[str, Side], rows: Sequence[DataRow], *, names: Sequence[str]) -> None:
    """All must compute the same thing, or comparing them is worth nothing.

    Raises:
        RuntimeError: if their losses differ by more than the rounding of bfloat16.
    """
    losses = [sides[name].accumulate(rows) for name in names]
    for name, found in zip(names, losses, strict=True):
        if not torch.allclose(found, losses[0], rtol=2e-2, atol=1e-3):
            raise RuntimeError(f"losses of {name} {found.tolist()}, expected {losses[0].tolist()}")
        sides[name].clear()


def _speeds(
    case: Case, sides: Mapping[str, Side], rows: Sequence[DataRow]
) -> dict[str, list[float]]:
    """Supervised tokens a second of whole steps."""
    own, device = sum(sum(row.mask) for row in rows), case.backbone.device

    def speed(side: Side) -> float:
        begin = clock(device)
        side.accumulate(rows)
        side.engine.step()
        return own / (clock(device) - begin)

    workloads = {name: partial(speed, side) for name, side in sides.items()}
    return interleave(workloads, repeats=case.repeats, warmup=1)


def _peak(case: Case, side: Side, rows: Sequence[DataRow]) -> Workload:
    """Megabytes that gradients of a step take beyond what lasts."""
    return lambda: peak_bytes(lambda: side.accumulate(rows), case.backbone.device) / MEGABYTE


def medusa1_sides(case: Case, rows: Sequence[DataRow]) -> dict[str, Side]:
    """`online`, `cached` and `stacked` train the same heads, `cached_reduced` smaller ones.

    Args:
        case: the backbone.
        rows: with stored hidden states.
    """
    backbone = case.backbone
    heads = _heads(case, None)
    answers = [row.answer_ids for row in rows]
    token_map = choose_token_map(answers, size=HEAD_VOCAB, vocab_size=backbone.vocab_size)
    cached = cached_source(backbone.device)
    online = _medusa1(case, heads, online_source(backbone.hidden_states, backbone.device))
    plain = partial(peer.medusa1, backbone, heads, dtype=_dtype(case))
    return {
        "online": online,
        "cached": _medusa1(case, heads, cached),
        "cached_reduced": _medusa1(case, _heads(case, token_map), cached),
        "stacked": replace(online, stacked=plain),
    }


def medusa2_sides(case: Case) -> dict[str, Side]:
    """`ours` and `stacked` train the same heads and the same LoRA on the backbone of the case.

    The base LM head learns the original's distributions; the heads learn the ids.
    """
    backbone, dtype = case.backbone, _dtype(case)
    settings = replace(
        case.config.medusa2, hidden_states="online", soft_targets=False, head_weight=HEAD_WEIGHT
    )
    teacher = make_teacher(backbone, None, dtype)  # before a LoRA is put onto the LM head
    heads, student = _heads(case, None), Student(backbone, settings.lora, seed=0)
    original = online_source(partial(student.original_states, dtype=dtype), backbone.device)
    objective = Medusa2Objective(student, heads, original, teacher, settings, compute_dtype=dtype)
    ours = Side(objective=objective, engine=TorchEngine(objective, settings.optim))
    plain = partial(peer.medusa2, backbone, student, heads, dtype=dtype)
    return {"ours": ours, "stacked": replace(ours, stacked=plain)}


def _medusa1(case: Case, heads: MedusaHeads, source: HiddenSource) -> Side:
    objective = Medusa1Objective(
        heads,
        source,
        shared_lm_head=None,
        head_weight=HEAD_WEIGHT,
        compute_dtype=_dtype(case),
    )
    return Side(objective=objective, engine=TorchEngine(objective, case.config.medusa1.optim))


def _heads(case: Case, token_map: Tensor | None) -> MedusaHeads:
    """Untrained heads with LM heads of their own."""
    lm_head = "own" if token_map is None else "reduced"
    weight: Tensor = case.backbone.lm_head.weight  # pyright: ignore
    return untrained_heads(weight, num_heads=NUM_HEADS, lm_head=lm_head, token_map=token_map)


def _dtype(case: Case) -> torch.dtype:
    """Of the products."""
    return choose_dtype(case.config.medusa1.optim.compute_dtype, case.backbone.device)


def stored_rows(case: Case, folder: Path) -> list[DataRow]:
    """Rows of a shipped prompt and a random answer each, with their hidden states on disk."""
    count, (shortest, longest) = (4, (4, 12)) if case.tiny else (2 * MICRO_ROWS, ANSWERS)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i, prompt in enumerate(case.prompts(count, max_new_tokens=longest)):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        answer = torch.randint(0, case.backbone.valid_ids, (length,), generator=generator).tolist()
        rows.append(
            DataRow(
                id=str(i),
                kind="",
                prompt="",
                answer="",
                ids=[*prompt, *answer],
                mask=[False] * len(prompt) + [True] * length,
                finish_reason="length",
            )
        )
    states = online_source(case.backbone.hidden_states, case.backbone.device)(rows)
    write_part(part_path(folder, 0), rows, [state.cpu() for state in states])
    return read_split(folder)
