"""Part of `train`: memory and speed of the loss of Medusa-1, against all logits in one tensor.

Ours is what the plain engine runs: `TorchEngine.accumulate`, head by head. The peer is the usual
transcription of the paper: the logits of all heads stacked, [K, B, T, V], then cross-entropy, then
one backward. Both use the same weights, hidden states, targets and dtype of products.

Memory is the peak of one forward and backward above what is there before: the weights, their
`.grad` (allocated before, for both sides, since they last from step to step) and the hidden states.

Legend: B rows, T tokens, P positions (B * T), K heads, V vocabulary, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.case import Case
from bench.memory import MEGABYTE, peak_bytes
from bench.rows import Row, compare, interleave
from medusa_train.data.batch import HeadBatch
from medusa_train.decode.generation import clock
from medusa_train.model.device import choose_dtype
from medusa_train.model.heads import untrained_heads
from medusa_train.train.engine import TorchEngine
from medusa_train.train.medusa1 import Medusa1Objective

NUM_HEADS = 5
HEAD_WEIGHT = 0.8
ROWS = 4  # B


@dataclass(frozen=True, kw_only=True)
class Training:
    """Heads, their optimiser, and one batch of random hidden states and targets."""

    engine: TorchEngine
    objective: Medusa1Objective
    batch: HeadBatch
    shared: Tensor | None  # the LM head of `shared` heads, [V, D]
    dtype: torch.dtype  # of the products

    @property
    def scales(self) -> list[float]:
        """What each head's sum is multiplied with: its weight over its targets, [K]."""
        return [weight / self.batch.targets.shape[1] for weight in self.objective.weights(0.0)]

    def ours(self) -> Tensor:
        """Forward and backward as the plain engine does it; the sums, [K]."""
        return self.engine.accumulate(self.batch, self.scales)

    def stacked(self) -> Tensor:
        """Forward and backward with all logits at once; the sums, [K]."""
        rows = self.batch.hidden.unflatten(0, (ROWS, -1))
        low = self.dtype != torch.float32
        with torch.autocast(rows.device.type, dtype=self.dtype, enabled=low):
            heads = self.objective.heads.heads
            logits = torch.stack([head.logits(rows, shared=self.shared) for head in heads])  # pyright: ignore
        sums = [
            F.cross_entropy(logits[k].flatten(0, 1).float(), targets, reduction="sum")
            for k, targets in enumerate(self.batch.targets)
        ]
        joined = torch.stack(sums)
        (joined * joined.new_tensor(self.scales)).sum().backward()
        return joined.detach()

    def check(self) -> None:
        """Both sides must compute the same thing, or comparing them is worth nothing."""
        found, expected = self.ours(), self.stacked()
        if not torch.allclose(found, expected, rtol=1e-2):
            raise RuntimeError(f"losses {found.tolist()}, expected {expected.tolist()}")


def run(case: Case) -> list[Row]:
    """The rows of the loss alone."""
    many, few = (32, 16) if case.tiny else (2048, 512)
    rows = []
    for lm_head, suffix in (("own", ""), ("shared", "_shared")):
        rows += _memory_rows(case, lm_head, positions=many, suffix=suffix)
        rows.append(_speed_row(case, lm_head, positions=few, suffix=suffix))
    return rows


def _memory_rows(case: Case, lm_head: str, *, positions: int, suffix: str) -> list[Row]:
    five = build_training(case, lm_head, num_heads=NUM_HEADS, positions=positions)
    one = build_training(case, lm_head, num_heads=1, positions=positions)
    device = case.backbone.device
    figures = interleave(
        {
            "ours": lambda: peak_bytes(five.ours, device) / MEGABYTE,
            "one": lambda: peak_bytes(one.ours, device) / MEGABYTE,
            "stacked": lambda: peak_bytes(five.stacked, device) / MEGABYTE,
        },
        repeats=case.repeats,
        warmup=0,
    )
    return [
        compare(f"loss_memory_k5_over_k1{suffix}", figures["ours"], figures["one"], unit="MB"),
        compare(f"loss_memory_vs_stacked{suffix}", figures["ours"], figures["stacked"], unit="MB"),
    ]


def _speed_row(case: Case, lm_head: str, *, positions: int, suffix: str) -> Row:
    """Whole training steps on given hidden states; one micro-batch, then the optimiser."""
    training = build_training(case, lm_head, num_heads=NUM_HEADS, positions=positions)
    training.check()

    def speed(gradients: str) -> float:
        begin = clock(case.backbone.device)
        getattr(training, gradients)()
        training.engine.step()
        return positions / (clock(case.backbone.device) - begin)

    figures = interleave(
        {"ours": lambda: speed("ours"), "stacked": lambda: speed("stacked")},
        repeats=case.repeats,
        warmup=1,
    )
    name = f"train_tokens_per_s{suffix}"
    return compare(name, figures["ours"], figures["stacked"], unit="tokens/s")


def build_training(
    case: Case, lm_head: str, *, num_heads: int, positions: int, vocab_size: int | None = None
) -> Training:
    """Untrained heads on the backbone's LM head, their gradients allocated.

    Args:
        case: the backbone.
        lm_head: `own` or `shared`.
        num_heads: K.
        positions: P.
        vocab_size: V, at most the backbone's: its first rows; None for all.
    """
    backbone = case.backbone
    dtype = choose_dtype(case.config.medusa1.optim.compute_dtype, backbone.device)
    weight: Tensor = backbone.lm_head.weight.detach()[:vocab_size]  # pyright: ignore
    heads = untrained_heads(weight, num_heads=num_heads, lm_head=lm_head)  # pyright: ignore
    objective = Medusa1Objective(
        heads,
        _no_source,
        shared_lm_head=weight if lm_head == "shared" else None,
        head_weight=HEAD_WEIGHT,
        compute_dtype=dtype,
    )
    training = Training(
        engine=TorchEngine(objective, case.config.medusa1.optim),
        objective=objective,
        batch=_batch(case, num_heads, positions, len(weight)),
        shared=weight if lm_head == "shared" else None,
        dtype=dtype,
    )
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return training


def _batch(case: Case, num_heads: int, positions: int, vocab_size: int) -> HeadBatch:
    """Random hidden states and targets, every position taught: what they are costs the same."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((positions, case.backbone.hidden_size), generator=generator)
    targets = torch.randint(0, vocab_size, (num_heads, positions), generator=generator)
    hidden = hidden.to(device=case.backbone.device, dtype=case.backbone.dtype)
    targets = targets.to(case.backbone.device)
    return HeadBatch(
        hidden=hidden,
        targets=targets,
        wanted=torch.ones_like(targets, dtype=torch.bool),
        spans=[(0, positions)],
        states=hidden,
        teachers=torch.zeros_like(targets),
    )


def _no_source(rows: Sequence[object]) -> list[Tensor]:
    raise RuntimeError("the benchmark brings its own hidden states")
