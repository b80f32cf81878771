"""The training loop. It knows steps, rows and metrics; who runs the optimiser is the engine's.

The place in the data is the step number, and nothing random happens between steps, so a run that
was stopped and resumed ends with the same weights as one that was not.

Legend: K heads.
"""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_train.config.training import OptimConfig
from medusa_train.data.batch import step_rows, steps_per_epoch
from medusa_train.data.rows import Row
from medusa_train.errors import Interrupted, TrainingError
from medusa_train.ops.schedule import lr_factor
from medusa_train.parallel import World
from medusa_train.track.progress import Meter, progress
from medusa_train.track.sinks import Sink
from medusa_train.train.checkpoint import Checkpoints, TrainState
from medusa_train.train.engine import Engine
from medusa_train.train.objectives import COUNT, LOSS, TOP1, TOP5, Objective


def total_steps(optim: OptimConfig, num_rows: int) -> int:
    """Updates of the whole run: `epochs`, cut short by `max_steps`."""
    steps = optim.epochs * steps_per_epoch(num_rows, optim.batch_size)
    return steps if optim.max_steps is None else min(steps, optim.max_steps)


@dataclass(kw_only=True)
class _Window:
    """What happened since the last log, on this process."""

    sums: Tensor  # of losses, [K], float64
    counts: Tensor  # of targets, over all processes, [K]
    tokens: int = 0  # over all processes
    seconds: float = 0.0


@dataclass(kw_only=True)
class Fit:
    """Everything one training run needs; `run` trains from `state` to the last step."""

    label: str
    engine: Engine
    objective: Objective
    rows: Sequence[Row]
    held_out: Sequence[Row]
    optim: OptimConfig
    seed: int
    world: World
    device: torch.device
    sink: Sink
    checkpoints: Checkpoints
    state: TrainState = field(default_factory=TrainState)

    def run(self) -> TrainState:
        """Train; log, evaluate and save at their intervals, and all three at the end.

        Raises:
            TrainingError: if a loss or gradient is not finite; the weights are those before it,
                and the last checkpoint is whole.
            Interrupted: after SIGTERM or SIGINT on any process, once a checkpoint is written.
        """
        total = total_steps(self.optim, len(self.rows))
        window = self._window()
        with _signals() as received, self._progress(total) as meter:
            if self.state.step == 0:
                self._evaluate()
            saved = self.state.step
            while self.state.step < total:
                norm, lr = self._step(window, total, received, saved)
                step = self.state.step
                last = step == total
                if last or step % self.optim.log_every == 0:
                    self._log(window, norm, lr)
                    window = self._window()
                if last or step % self.optim.eval_every == 0:
                    self._evaluate()
                if last or step % self.optim.save_every == 0:
                    self.checkpoints.save(self.engine, self.state)
                    saved = step
                meter.advance(note=f"loss {self._weighted(self.state.losses):.3f}")
            self._stop_if_told(self._share([0], received)[-1], saved)
        return self.state

    def _step(
        self, window: _Window, total: int, received: list[int], saved: int
    ) -> tuple[float, float]:
        """One update; gradient norm and learning rate."""
        begun = time.perf_counter()
        micros = self._micro_batches()
        mine = [row for micro in micros for row in micro]
        counts = self.objective.target_counts(mine).tolist()
        # Counts are shared before the first backward, and with them whether anyone must stop
        *counts, tokens, told = self._share([*counts, sum(_tokens(row) for row in mine)], received)
        self._stop_if_told(told, saved)
        warmup = round(self.optim.warmup_ratio * total)
        factor = lr_factor(
            self.state.step, total=total, warmup=warmup, schedule=self.optim.schedule
        )
        self.engine.set_lr(self.optim.lr * factor)
        scales = [w / max(n, 1) for w, n in zip(self.objective.weights, counts, strict=True)]
        sums = [self.engine.accumulate(self.objective.batch(rows), scales) for rows in micros]
        try:
            norm = self.engine.step()
        except TrainingError as error:
            raise TrainingError(self._where(str(error), sums, micros)) from error
        window.sums += torch.stack(sums).double().sum(dim=0)
        window.counts += torch.tensor(counts)
        window.tokens += tokens
        spent = time.perf_counter() - begun
        window.seconds += spent
        self.state.seconds += spent
        self.state.tokens += tokens
        self.state.step += 1
        return norm, self.optim.lr * factor

    def _micro_batches(self) -> list[list[Row]]:
        """This process's rows of the step; the step's rows do not depend on how many share it."""
        chosen = step_rows(
            self.state.step,
            num_rows=len(self.rows),
            batch_size=self.optim.batch_size,
            seed=self.seed,
        )
        mine = [self.rows[i] for i in chosen[self.world.rank :: self.world.size]]
        size = self.optim.micro_batch_size
        return [mine[start : start + size] for start in range(0, len(mine), size)]

    def _share(self, numbers: list[int], received: list[int]) -> list[int]:
        """Sums over all processes, followed by the highest number of a signal any received."""
        told = [0] * self.world.size
        told[self.world.rank] = received[0] if received else 0
        shared = self.world.sum(torch.tensor([*numbers, *told], device=self.device)).tolist()
        return [*shared[: len(numbers)], max(shared[len(numbers) :])]

    def _stop_if_told(self, told: int, saved: int) -> None:
        if not told:
            return
        if self.state.step > saved or self.state.step == 0:
            self.checkpoints.save(self.engine, self.state)
        name = signal.Signals(told).name
        raise Interrupted(
            f"stopped by {name} after step {self.state.step}; a checkpoint is written and the "
            "same command goes on from it",
            signal_number=told,
        )

    def _log(self, window: _Window, norm: float, lr: float) -> None:
        sums = self.world.sum(window.sums).cpu()
        self.state.losses = (sums / window.counts.clamp(min=1)).tolist()
        metrics = {
            "train/loss": self._weighted(self.state.losses),
            **{f"train/head{k}/loss": loss for k, loss in enumerate(self.state.losses)},
            "train/lr": lr,
            "train/grad_norm": norm,
            "perf/tokens_per_s": window.tokens / max(window.seconds, 1e-9),
            "data/epoch": self.state.step / steps_per_epoch(len(self.rows), self.optim.batch_size),
        }
        self.sink.log(metrics, self.state.step)

    def _evaluate(self) -> None:
        """Losses and hits on the held-out rows, shared among the processes."""
        measured = measure(
            self.objective,
            self.engine,
            self.held_out,
            micro_batch_size=self.optim.micro_batch_size,
            world=self.world,
        )
        counts = measured[COUNT].clamp(min=1)
        found = {
            name: (measured[row] / counts).tolist()
            for name, row in (("loss", LOSS), ("top1", TOP1), ("top5", TOP5))
        }
        self.state.held_out = found
        metrics = {"eval/loss": self._weighted(found["loss"])}
        for name, values in found.items():
            metrics.update({f"eval/head{k}/{name}": value for k, value in enumerate(values)})
        self.sink.log(metrics, self.state.step)
        if not math.isfinite(metrics["eval/loss"]):
            raise TrainingError(
                f"step {self.state.step}: the loss on the held-out rows is not finite. Lower "
                "optim.lr, or use optim.compute_dtype=float32"
            )

    def _weighted(self, losses: Sequence[float]) -> float:
        """The value that is optimised: NaN before the first log."""
        if not losses:
            return math.nan
        return sum(w * loss for w, loss in zip(self.objective.weights, losses, strict=True))

    def _window(self) -> _Window:
        heads = len(self.objective.weights)
        return _Window(
            sums=torch.zeros(heads, dtype=torch.float64, device=self.device),
            counts=torch.zeros(heads, dtype=torch.long),
        )

    @contextmanager
    def _progress(self, total: int) -> Iterator[Meter]:
        with progress(self.label, total, is_main=self.world.is_main, done=self.state.step) as meter:
            yield meter

    def _where(self, fault: str, sums: list[Tensor], micros: list[list[Row]]) -> str:
        """The fault with its step, and with the rows that caused it where they are ours."""
        bad = [m for m, s in zip(micros, sums, strict=True) if not bool(torch.isfinite(s).all())]
        rows = ", ".join(row.id for micro in bad[:1] for row in micro) or "of this step"
        return (
            f"step {self.state.step}: {fault}. Rows: {rows}. Lower optim.lr, or use "
            "optim.compute_dtype=float32; the same command goes on from the last checkpoint"
        )


def measure(
    objective: Objective,
    engine: Engine,
    rows: Sequence[Row],
    *,
    micro_batch_size: int,
    world: World,
) -> Tensor:
    """`Objective.measure` summed over all rows and processes, [4, K], on the CPU."""
    mine = rows[world.rank :: world.size]
    largest_share = -(-len(rows) // world.size)
    total = None
    # Weights may be sharded: every process makes as many calls, the spare ones without effect
    for start in range(0, largest_share, micro_batch_size):
        batch = mine[start : start + micro_batch_size]
        found = objective.measure(objective.batch(batch or rows[:1]), engine.gathered)
        found = found if batch else torch.zeros_like(found)
        total = found if total is None else total + found
    assert total is not None
    return world.sum(total).cpu()


def _tokens(row: Row) -> int:
    """Tokens of the model's own that a base LM head would be trained on."""
    return sum(row.mask[1:])


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them: saving needs all processes."""
    received: list[int] = []
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {
        kind: signal.signal(kind, lambda number, _: received.append(number)) for kind in kinds
    }
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
