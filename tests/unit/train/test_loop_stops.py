import math
import os
import signal

import pytest
import torch
from training_case import make_fit

from medusa_train.errors import Interrupted, TrainingError
from medusa_train.parallel import World


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


def test_a_gradient_that_is_not_finite_names_all_rows_of_the_step(tmp_path):
    fit = make_fit(tmp_path)
    rows = [row.id for micro in fit._micro_batches() for row in micro]

    def refuse():
        raise TrainingError("the norm of the gradient is inf")

    fit.engine.step = refuse
    with pytest.raises(TrainingError, match=f"All rows of the step: {', '.join(rows)}"):
        fit.run()


def test_a_process_names_the_rows_of_another_one_too(tmp_path):
    class Pair(World):
        def gather(self, value):
            return [value, ["theirs"]]

    fit = make_fit(tmp_path)
    fit.world = Pair(rank=0, size=1)
    micros = fit._micro_batches()[:1]
    fine, bad = torch.zeros(3), torch.tensor([1.0, math.nan, 1.0])
    assert "fault. Rows: theirs. Lower" in fit._where("fault", [fine], micros)
    ours = ", ".join(row.id for row in micros[0])
    assert f"fault. Rows: {ours}, theirs. Lower" in fit._where("fault", [bad], micros)


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
