from dataclasses import replace

import pytest
import torch
from training_case import ALONE, CPU, make_config, make_fit, make_rows

from medusa_train.config.schema import DeepSpeedConfig
from medusa_train.errors import CheckpointError, ConfigError, TrainingError
from medusa_train.parallel import World
from medusa_train.train.engine import TorchEngine, accumulation_steps, build_engine

OPTIM = make_config().medusa1.optim


@pytest.fixture
def fit(tmp_path):
    return make_fit(tmp_path)


def build(fit, engine, world):
    config = DeepSpeedConfig(engine=engine, zero_stage=2)
    return build_engine(fit.objective, OPTIM, config, world=world, device=CPU)


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_one_process_trains_with_plain_torch(fit, engine):
    assert isinstance(build(fit, engine, ALONE), TorchEngine)


def test_plain_torch_in_two_processes_is_refused(fit):
    with pytest.raises(ConfigError, match="2 were launched: use deepspeed=zero1"):
        build(fit, "torch", World(rank=0, size=2))


@pytest.mark.parametrize(
    ("batch", "micro", "world", "steps"), [(8, 2, 1, 4), (8, 2, 2, 2), (8, 1, 8, 1), (6, 2, 3, 1)]
)
def test_micro_batches_of_a_step(batch, micro, world, steps):
    optim = replace(OPTIM, batch_size=batch, micro_batch_size=micro)
    assert accumulation_steps(optim, World(rank=0, size=world)) == steps


@pytest.mark.parametrize(("batch", "works"), [(8, 6), (4, 6), (2, 6), (128, 126)])
def test_a_batch_that_cannot_be_divided_is_refused_with_one_that_can(batch, works):
    optim = replace(OPTIM, batch_size=batch, micro_batch_size=2)
    with pytest.raises(ConfigError, match=f"batch_size={batch} .* 3 processes .*={works}$"):
        accumulation_steps(optim, World(rank=0, size=3))


def test_clipping_bounds_the_step_but_not_what_is_reported(tmp_path):
    norms = []
    for clip in (1e9, 1e-3):
        fit = make_fit(tmp_path, grad_clip=clip)
        fit.engine.accumulate(fit.objective.batch(make_rows(2)), [1.0, 1.0, 1.0])
        norms.append(fit.engine.step())
    assert norms[0] == norms[1] > 1


def test_set_lr_is_what_the_next_step_uses(fit):
    before = fit.engine.trained_state()
    fit.engine.set_lr(0.0)
    fit.engine.accumulate(fit.objective.batch(make_rows(2)), [1.0] * 3)
    fit.engine.step()
    after = fit.engine.trained_state()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("scales", "message"),
    [([1.0, float("inf"), 1.0], "norm of the gradient is"), (None, "the loss is not finite")],
)
def test_a_step_that_is_not_finite_changes_nothing(fit, scales, message):
    batch = fit.objective.batch(make_rows(2))
    before = fit.engine.trained_state()
    if scales is None:
        batch.hidden[0] = float("nan")
    fit.engine.accumulate(batch, scales or [1.0] * 3)
    with pytest.raises(TrainingError, match=message):
        fit.engine.step()
    after = fit.engine.trained_state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    fit.engine.accumulate(fit.objective.batch(make_rows(2)), [1.0] * 3)
    assert fit.engine.step() > 0  # nothing of the refused step is left


def test_weights_of_another_shape_of_heads_are_refused(fit, tmp_path):
    fit.engine.save(tmp_path)
    fit.objective.heads.heads = fit.objective.heads.heads[:2]
    with pytest.raises(CheckpointError, match=r"other weights than are trained: heads\.heads\.2"):
        TorchEngine(fit.objective, OPTIM).load(tmp_path)


def test_trained_state_is_a_copy(fit):
    state = fit.engine.trained_state()
    next(iter(state.values())).fill_(7)
    assert all((tensor != 7).all() for tensor in fit.engine.trained_state().values())
