import os
import signal
from dataclasses import replace

import pytest
import torch
from training_case import MemorySink, make_config, make_fit, make_rows

from medusa_train.errors import ConfigError, Interrupted, TrainingError
from medusa_train.train.loop import total_steps


def test_what_is_logged_and_when(tmp_path):
    sink = MemorySink([])
    state = make_fit(tmp_path, sink=sink, log_every=3, eval_every=2).run()
    evaluated = [step for step, metrics in sink.lines if "eval/loss" in metrics]
    logged = [step for step, metrics in sink.lines if "train/loss" in metrics]
    assert evaluated == [0, 2, 4]
    assert logged == [3, 4]
    train = next(metrics for _, metrics in sink.lines if "train/loss" in metrics)
    weighted = sum(0.8**k * train[f"train/head{k}/loss"] for k in range(3))
    assert train["train/loss"] == pytest.approx(weighted)
    assert {"train/lr", "train/grad_norm", "perf/tokens_per_s", "data/epoch"} <= train.keys()
    evaluated = sink.lines[0][1]
    names = {f"eval/head{k}/{name}" for k in range(3) for name in ("top1", "top5", "loss")}
    assert names | {"eval/loss"} == evaluated.keys()
    assert state.step == 4
    assert state.tokens == 2 * sum(sum(row.mask[1:]) for row in make_rows(8))
    assert state.held_out["top1"] == [sink.lines[-1][1][f"eval/head{k}/top1"] for k in range(3)]


def test_the_logged_loss_is_the_mean_over_all_targets_of_the_window(tmp_path):
    sink = MemorySink([])
    fit = make_fit(tmp_path, sink=sink, lr=1e-30, log_every=2, max_steps=2)
    fit.run()
    sums = fit.objective(fit.objective.batch(make_rows(8))).detach()  # both steps see all rows
    counts = fit.objective.target_counts(make_rows(8))
    found = [sink.lines[1][1][f"train/head{k}/loss"] for k in range(3)]
    assert found == pytest.approx((sums / counts).tolist(), rel=1e-5)


def test_training_lowers_the_loss_of_what_is_trained_on(tmp_path):
    sink = MemorySink([])
    make_fit(tmp_path, sink=sink, epochs=20).run()
    losses = [metrics["train/loss"] for _, metrics in sink.lines if "train/loss" in metrics]
    assert losses[-1] < 0.8 * losses[0]


def test_the_rate_follows_warm_up_and_schedule(tmp_path):
    sink = MemorySink([])
    make_fit(tmp_path, sink=sink, warmup_ratio=0.5, schedule="linear", lr=0.5).run()
    rates = [metrics["train/lr"] for _, metrics in sink.lines if "train/lr" in metrics]
    assert rates == [0.25, 0.5, 0.5, 0.25]


def test_number_of_steps():
    optim = make_config().medusa1.optim
    assert total_steps(optim, 9) == 4
    assert total_steps(replace(optim, max_steps=3), 9) == 3
    assert total_steps(replace(optim, max_steps=30), 9) == 4
    with pytest.raises(ConfigError, match="only 3 training rows"):
        total_steps(optim, 3)


def poison(fit, at_step):
    original = fit.objective.batch

    def batch(rows):
        made = original(rows)
        if (
            rows[0] in fit.rows
            and rows[0].id == poisoned_row(fit, at_step)
            and fit.state.step == at_step
        ):
            made.hidden[0] = float("nan")
        return made

    fit.objective.batch = batch


def poisoned_row(fit, step):
    """First row of the second micro-batch of a step."""
    saved, fit.state.step = fit.state.step, step
    row = fit._micro_batches()[1][0].id
    fit.state.step = saved
    return row


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_rows(tmp_path):
    fit = make_fit(tmp_path, save_every=1)
    poison(fit, 2)
    with pytest.raises(TrainingError, match="step 2: the loss is not finite") as caught:
        fit.run()
    assert poisoned_row(fit, 2) in str(caught.value)
    saved = fit.checkpoints.latest()
    assert saved is not None
    assert saved[1].step == 2
    before = make_fit(tmp_path).engine.trained_state()
    after = fit.engine.trained_state()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_held_out_loss_that_is_not_finite_stops_before_anything_is_saved(tmp_path):
    fit = make_fit(tmp_path)
    fit.objective.heads[0].lm_head.data.fill_(float("inf"))
    with pytest.raises(TrainingError, match="step 0: the loss on the held-out rows"):
        fit.run()
    assert fit.checkpoints.latest() is None


def signal_at(fit, step, number):
    original = fit.objective.batch

    def batch(rows):
        if fit.state.step == step:
            os.kill(os.getpid(), number)
        return original(rows)

    fit.objective.batch = batch


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("step", [1, 3])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(tmp_path, number, status, step):
    handler = signal.getsignal(number)
    fit = make_fit(tmp_path, save_every=100)
    signal_at(fit, step, number)
    with pytest.raises(Interrupted, match="the same command goes on") as caught:
        fit.run()
    assert caught.value.exit_status == status
    assert signal.getsignal(number) is handler
    saved = fit.checkpoints.latest()
    assert saved is not None
    assert saved[1].step == step + 1


def test_a_finished_run_trains_no_more(tmp_path):
    first = make_fit(tmp_path).run()
    sink = MemorySink([])
    again = make_fit(tmp_path, sink=sink).run()
    assert again == first
    assert sink.lines == []
