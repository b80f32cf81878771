"""The training loop. It knows steps, rows and metrics; who runs the optimiser is the engine's.

The place in the data is the step number, and all that is random in a step follows from it, so a
run that was stopped and resumed ends with the same weights as one that was not.

Legend: L losses.
"""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_train.config.training import OptimConfig
from medusa_train.data.batch import step_rows, steps_per_epoch
from medusa_train.data.rows import Row
from medusa_train.errors import Interrupted, TrainingError
from medusa_train.ops.schedule import lr_factor
from medusa_train.parallel import World
from medusa_train.track.progress import progress
from medusa_train.track.sinks import Sink
from medusa_train.train.checkpoint import Checkpoints, TrainState
from medusa_train.train.engine import Engine
from medusa_train.train.held_out import figures, measure, metrics
from medusa_train.train.objective import Objective
from medusa_train.train.randomness import own_randomness, seed_from
from medusa_train.train.signals import stop_signals
from medusa_train.train.window import Window, empty_window, peak_memory_gb, reset_peak_memory


def total_steps(optim: OptimConfig, num_rows: int) -> int:
    """Updates of the whole run: `epochs`, cut short by `max_steps`."""
    steps = optim.epochs * steps_per_epoch(num_rows, optim.batch_size)
    return steps if optim.max_steps is None else min(steps, optim.max_steps)


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
    _saved: int = field(init=False)  # step of the last checkpoint
    _saved_at: float = field(init=False)  # by this process's clock, in seconds

    def __post_init__(self) -> None:
        self._saved, self._saved_at = self.state.step, time.monotonic()

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return total_steps(self.optim, len(self.rows))

    def run(self) -> TrainState:
        """Train; log, evaluate and save at their intervals, and all three at the end.

        Raises:
            TrainingError: if a loss or gradient is not finite; the weights are those before it,
                and the last checkpoint is whole.
            Interrupted: after SIGTERM or SIGINT on any process, once a checkpoint is written.
        """
        window, done = empty_window(self.objective.names, self.device), self.state.step
        reset_peak_memory(self.device)
        with (
            stop_signals() as received,
            own_randomness(self.device),
            progress(self.label, self.total, is_main=self.world.is_main, done=done) as meter,
        ):
            if self.state.step == 0:
                self._evaluate()
            while self.state.step < self.total:
                overdue = self._step(window, received)
                step, last = self.state.step, self.state.step == self.total
                if last or step % self.optim.log_every == 0:
                    self._log(window)
                    window = empty_window(self.objective.names, self.device)
                best = (last or step % self.optim.eval_every == 0) and self._evaluate()
                if best or last or overdue or step % self.optim.save_every == 0:
                    self._save(best=best)
                meter.advance(note=self._note())
            self._stop_if_told(self._share([], received)[-1])
        return self.state

    def _step(self, window: Window, received: list[int]) -> bool:
        """One update; whether a checkpoint is due by the clock."""
        begun = time.perf_counter()
        micros = self._micro_batches()
        found = [self.objective.target_counts(rows) for rows in micros]
        mine = [row for micro in micros for row in micro]
        tallies = (
            sum(_own_tokens(row) for row in mine),
            sum(len(row.ids) for row in mine),
            sum(not bool(count.any()) for count in found),
            int(self._is_overdue()),
        )
        # Shared before the first backward, and with them whether all must save or stop
        *counts, own, tokens, empty, overdue, told = self._share(
            [*torch.stack(found).sum(dim=0).tolist(), *tallies], received
        )
        self._stop_if_told(told)
        window.lr = self._set_lr()
        if any(counts):  # else momentum alone would move weights that nothing was said of
            sums, window.norms = self._update(micros, counts)
            window.sums += sums
        window.counts += torch.tensor(counts)
        window.own_tokens += own
        window.all_tokens += tokens
        spent = time.perf_counter() - begun
        window.seconds += spent
        self.state.seconds += spent
        self.state.tokens += own
        self.state.empty_batches += empty
        self.state.step += 1
        return overdue > 0

    def _update(
        self, micros: list[list[Row]], counts: list[int]
    ) -> tuple[Tensor, dict[str, float]]:
        """Gradients of this process's micro-batches, then the step; its losses [L] and norms."""
        weights = self.objective.weights(self.state.step / self.total)
        scales = [w / max(n, 1) for w, n in zip(weights, counts, strict=True)]
        sums = []
        places = range(self.world.rank, len(micros) * self.world.size, self.world.size)
        for place, rows in zip(places, micros, strict=True):
            # The same numbers for the same rows, however many processes share them
            seed_from([self.seed, self.state.step, place], self.device)
            sums.append(self.engine.accumulate(self.objective.batch(rows), scales))
        try:
            norms = self.engine.step()
        except TrainingError as error:
            raise TrainingError(self._where(str(error), sums, micros)) from error
        return torch.stack(sums).double().sum(dim=0), norms

    def _micro_batches(self) -> list[list[Row]]:
        """This process's share; which rows lie together does not depend on how many share them.

        Rows of like length do, which saves padding. The longest come first, so that what does not
        fit into memory shows at once.
        """
        chosen = step_rows(
            self.state.step,
            num_rows=len(self.rows),
            batch_size=self.optim.batch_size,
            seed=self.seed,
        )
        rows = sorted((self.rows[i] for i in chosen), key=lambda row: -len(row.ids))
        size = self.optim.micro_batch_size
        micros = [rows[start : start + size] for start in range(0, len(rows), size)]
        return micros[self.world.rank :: self.world.size]

    def _set_lr(self) -> float:
        factor = lr_factor(
            self.state.step,
            total=self.total,
            warmup=round(self.optim.warmup_ratio * self.total),
            schedule=self.optim.schedule,
        )
        self.engine.set_lr(self.optim.lr * factor)
        return self.optim.lr * factor

    def _is_overdue(self) -> bool:
        """Whether it is time to save, by the first process's clock: clocks differ."""
        minutes = self.optim.save_minutes
        if minutes is None or not self.world.is_main:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def _share(self, numbers: list[int], received: list[int]) -> list[int]:
        """Sums over all processes, followed by the highest number of a signal any received."""
        told = [0] * self.world.size
        told[self.world.rank] = received[0] if received else 0
        shared = self.world.sum(torch.tensor([*numbers, *told], device=self.device)).tolist()
        return [*shared[: len(numbers)], max(shared[len(numbers) :])]

    def _save(self, *, best: bool = False) -> None:
        self.checkpoints.save(self.engine, self.state, best=best)
        self._saved, self._saved_at = self.state.step, time.monotonic()

    def _stop_if_told(self, told: int) -> None:
        if not told:
            return
        if self.state.step > self._saved or self.state.step == 0:
            self._save()
        name = signal.Signals(told).name
        raise Interrupted(
            f"stopped by {name} after step {self.state.step}; a checkpoint is written and the "
            "same command goes on from it",
            signal_number=told,
        )

    def _log(self, window: Window) -> None:
        self.state.losses = window.losses(self.world)
        losses = zip(self.objective.names, self.state.losses, strict=True)
        rates = {f"lr/{g.name}": window.lr * g.lr_factor for g in self.objective.groups()}
        logged = {
            "train/loss": self._weighted(self.state.losses),
            **{f"train/{name}/loss": loss for name, loss in losses},
            "train/lr": window.lr,
            **{f"train/{name}": rate for name, rate in rates.items()},
            **window.metrics(),
            "perf/memory_gb": max(self.world.gather(peak_memory_gb(self.device))),
            "data/empty_batches": self.state.empty_batches,
            "data/epoch": self.state.step / steps_per_epoch(len(self.rows), self.optim.batch_size),
        }
        self.sink.log(logged, self.state.step)

    def _evaluate(self) -> bool:
        """Measure the held-out rows; whether the score is the best so far, after any update."""
        measured = measure(
            self.objective,
            self.engine,
            self.held_out,
            micro_batch_size=self.optim.micro_batch_size,
            world=self.world,
        )
        state, score = self.state, self.objective.score(measured)
        state.held_out = figures(self.objective, measured, score)
        if state.step == 0:
            state.first_held_out = state.held_out
        loss = self._weighted(measured.means)
        self.sink.log({"eval/loss": loss, **metrics(self.objective, state.held_out)}, state.step)
        if not math.isfinite(loss):
            raise TrainingError(
                f"step {state.step}: the loss on the held-out rows is not finite. Lower "
                "optim.lr, or use optim.compute_dtype=float32"
            )
        is_best = state.step > 0 and score > state.best_score
        if is_best:
            state.best_step, state.best_score = state.step, score
        return is_best

    def _weighted(self, losses: Sequence[float]) -> float:
        """The value that is optimised: NaN before the first log."""
        if not losses:
            return math.nan
        weights = self.objective.weights(self.state.step / self.total)
        return sum(w * loss for w, loss in zip(weights, losses, strict=True))

    def _note(self) -> str:
        """What is shown beside the bar: the last logged loss and the last held-out score."""
        name = self.objective.score_name
        score = self.state.held_out[name][0]
        known = f"{name.replace('_', ' ')} {score:.3f}"
        if not self.state.losses:
            return known
        return f"loss {self._weighted(self.state.losses):.3f}, {known}"

    def _where(self, fault: str, sums: list[Tensor], micros: list[list[Row]]) -> str:
        """The fault with its step and rows; every process says the same, whosever they are."""
        bad = [m for m, s in zip(micros, sums, strict=True) if not bool(torch.isfinite(s).all())]
        names = self._names(bad)
        rows = f"Rows: {names}" if names else f"All rows of the step: {self._names(micros)}"
        return (
            f"step {self.state.step}: {fault}. {rows}. Lower optim.lr, or use "
            "optim.compute_dtype=float32; the same command goes on from the last checkpoint"
        )

    def _names(self, micros: list[list[Row]]) -> str:
        """Ids of the rows of some micro-batches of all processes."""
        shares = self.world.gather([row.id for micro in micros for row in micro])
        return ", ".join(name for share in shares for name in share)


def _own_tokens(row: Row) -> int:
    """Tokens of the model's own that a base LM head would be trained on."""
    return sum(row.mask[1:])
