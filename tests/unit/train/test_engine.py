import json
import math
from dataclasses import replace

import pytest
import torch
from training_case import ALONE, CPU, make_config, make_fit, make_rows

from medusa_train.errors import CheckpointError, ConfigError, TrainingError
from medusa_train.parallel import World
from medusa_train.train import engine
from medusa_train.train.engine import accumulation_steps, build_engine, check_launch
from medusa_train.train.objective import ParameterGroup
from medusa_train.train.optimizer import LossScale
from medusa_train.train.torch_engine import TorchEngine

OPTIM = make_config().medusa1.optim


@pytest.fixture
def fit(tmp_path):
    return make_fit(tmp_path)


def deepspeed(choice):
    return make_config(f"deepspeed={choice}").deepspeed


def build(fit, choice, world):
    return build_engine(fit.objective, OPTIM, deepspeed(choice), world=world, device=CPU)


@pytest.mark.parametrize("engine", ["auto", "none"])
def test_one_process_trains_with_plain_torch(fit, engine):
    assert isinstance(build(fit, engine, ALONE), TorchEngine)


def test_plain_torch_in_two_processes_is_refused(fit):
    with pytest.raises(ConfigError, match="2 were launched: use deepspeed=zero1"):
        build(fit, "none", World(rank=0, size=2))


@pytest.mark.parametrize(
    ("change", "choice", "message"),
    [
        ({"compute_dtype": "float16"}, "zero2", "float16 here, which needs loss scaling.*bfloat16"),
        ({"optimizer": "adamw8bit"}, "none", "needs (bitsandbytes|a CUDA device).*optimizer=adamw"),
    ],
)
def test_what_this_launch_cannot_run_is_refused_before_a_model_is_loaded(change, choice, message):
    with pytest.raises(ConfigError, match=message):
        check_launch(replace(OPTIM, **change), deepspeed(choice), ALONE, CPU)


def test_float16_that_a_device_chooses_is_refused_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(engine, "choose_dtype", lambda name, device: torch.float16)
    with pytest.raises(ConfigError, match=r"compute_dtype=auto is float16 here.*use optim"):
        check_launch(replace(OPTIM, compute_dtype="auto"), deepspeed("zero1"), ALONE, CPU)


@pytest.mark.parametrize(
    ("others", "zero", "message"),
    [
        (
            {"wall_clock_brakedown": True, "zer0": {}},
            {},
            "knows no wall_clock_brakedown, zer0: corr",
        ),
        ({"elasticity": {"enabled": True}}, {}, "refuses it: Elastic training has been removed"),
        ({}, {"reduce_bucket": 5}, r"refuses it: zero_optimization\.reduce_bucket: unknown key"),
        ({}, {"reduce_bucket_size": "x"}, r"zero_optimization\.reduce_bucket_size: input should"),
        (
            {},
            {"offload_optimizer": {"device": "cpu", "x": 1}},
            r"offload_optimizer\.x: unknown key",
        ),
    ],
)
def test_what_deepspeed_would_refuse_or_ignore_is_told_before_a_model_is_loaded(
    tmp_path, others, zero, message
):
    with pytest.raises(ConfigError, match=message) as refused:
        check_file(tmp_path, {**others, "zero_optimization": {"stage": 2, **zero}})
    assert str(refused.value).startswith(f"deepspeed.config={tmp_path / 'mine.json'}: DeepSpeed ")
    assert "\n" not in str(refused.value)


def test_a_file_that_deepspeed_knows_all_of_is_taken(tmp_path):
    zero = {"stage": 3, "overlap_comm": False, "stage3_prefetch_bucket_size": 1000}
    others = {"communication_data_type": "fp32", "prescale_gradients": False, "dump_state": False}
    sections = {"flops_profiler": {"enabled": False}, "comms_logger": {"enabled": False}}
    sections |= {"activation_checkpointing": {"profile": False}, "aio": {"block_size": 1048576}}
    sections |= {"tensorboard": {"enabled": False}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert check_file(tmp_path, {"zero_optimization": zero, **others, **sections}) == 2


def check_file(folder, content):
    """`check_launch` with a file of one's own: micro-batches in a step."""
    path = folder / "mine.json"
    path.write_text(json.dumps(content))
    config = make_config("deepspeed=custom", f"deepspeed.config={path}").deepspeed
    return check_launch(OPTIM, config, ALONE, CPU)


def test_eight_bits_without_a_gpu_or_under_deepspeed_are_refused(monkeypatch):
    optim = replace(OPTIM, optimizer="adamw8bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        check_launch(optim, deepspeed("none"), ALONE, CPU)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="for plain torch on one process"):
        check_launch(optim, deepspeed("zero1"), ALONE, CPU)


def test_a_machine_without_deepspeed_is_told_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install deepspeed, or launch one process"):
        check_launch(OPTIM, deepspeed("auto"), World(rank=0, size=2), CPU)


@pytest.mark.parametrize(
    ("batch", "micro", "world", "steps"), [(8, 2, 1, 4), (8, 2, 2, 2), (8, 1, 8, 1), (6, 2, 3, 1)]
)
def test_micro_batches_of_a_step(batch, micro, world, steps):
    optim = replace(OPTIM, batch_size=batch, micro_batch_size=micro)
    assert accumulation_steps(optim, World(rank=0, size=world)) == steps


def test_what_a_step_consists_of_is_said(fit, caplog):
    with caplog.at_level("INFO", logger="medusa_train"):
        build(fit, "none", ALONE)
    assert "4 rows a step = 2 a micro-batch x 2 micro-batches x 1 processes" in caplog.text


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
    assert norms[0] == norms[1]
    assert norms[0]["all"] == pytest.approx(norms[0]["heads"])
    assert norms[0]["all"] > 1


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
    assert fit.engine.step()["all"] > 0  # nothing of the refused step is left


def test_a_checkpoint_of_other_heads_is_refused_with_what_differs(fit, tmp_path):
    fit.engine.save(tmp_path)
    weight = fit.objective.heads[0].lm_head
    weight.data = weight.data[:, :8]
    fit.objective.heads.heads = fit.objective.heads.heads[:2]
    with pytest.raises(CheckpointError, match=r"heads\.heads\.2\S+ is only there.* 1 more"):
        TorchEngine(fit.objective, OPTIM).load(tmp_path)
    fit = make_fit(tmp_path / "other")
    fit.objective.heads[0].lm_head.data = weight.data
    with pytest.raises(CheckpointError, match=r"has shape \[320, 16\] there, \[320, 8\] here"):
        TorchEngine(fit.objective, OPTIM).load(tmp_path)


def two_groups(fit, factor):
    """The same heads, those after the first with another learning rate."""
    first, *others = fit.objective.heads
    fit.objective.groups = lambda: [
        ParameterGroup(name="first", parameters=list(first.parameters())),
        ParameterGroup(
            name="others",
            parameters=[p for head in others for p in head.parameters()],
            lr_factor=factor,
        ),
    ]
    return TorchEngine(fit.objective, replace(OPTIM, grad_clip=1e9))


def test_each_group_has_its_own_learning_rate_and_norm(tmp_path):
    changed = {}
    for factor in (1.0, 4.0):
        fit = make_fit(tmp_path / str(factor))
        engine = two_groups(fit, factor)
        before = engine.trained_state()
        engine.set_lr(1e-3)
        engine.accumulate(fit.objective.batch(make_rows(2)), [1.0] * 3)
        norms = engine.step()
        after = engine.trained_state()
        changed[factor] = {name: after[name] - before[name] for name in before}
    assert set(norms) == {"all", "first", "others"}
    assert norms["all"] ** 2 == pytest.approx(norms["first"] ** 2 + norms["others"] ** 2)
    for name, step in changed[1.0].items():
        factor = 1.0 if ".heads.0." in name else 4.0
        torch.testing.assert_close(changed[4.0][name], factor * step, rtol=1e-3, atol=1e-6)


def float16(fit):
    return TorchEngine(fit.objective, OPTIM, scale_loss=True)


def test_a_loss_scale_changes_no_gradient(fit, tmp_path):
    scaled, plain = fit, make_fit(tmp_path / "plain")
    engine = float16(scaled)
    for fit, runs in ((scaled, engine), (plain, plain.engine)):
        runs.set_lr(1e-3)
        runs.accumulate(fit.objective.batch(make_rows(2)), [1.0] * 3)
        fit.norms = runs.step()
    assert scaled.norms == pytest.approx(plain.norms, rel=1e-6)
    expected = plain.engine.trained_state()
    for name, tensor in engine.trained_state().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_an_overflow_leaves_the_step_out_and_halves_the_scale_which_is_kept(fit, tmp_path, caplog):
    engine, before = float16(fit), fit.engine.trained_state()
    engine.accumulate(fit.objective.batch(make_rows(2)), [1e36] * 3)
    assert not math.isfinite(engine.step()["all"])
    assert "step left out (1 so far), loss scale now 32768" in caplog.text
    after = engine.trained_state()
    assert all(torch.equal(after[name], before[name]) for name in before)
    engine.save(tmp_path)
    again = float16(fit)
    again.load(tmp_path)
    assert again._scale.counters == engine._scale.counters
    assert again._scale.value == 2**15
    engine.accumulate(fit.objective.batch(make_rows(2)), [1.0] * 3)
    assert engine.step()["all"] > 0


def test_a_scale_grows_after_a_while_and_cannot_fall_below_one(fit):
    scale = LossScale()
    for _ in range(LossScale.GROWTH_STEPS):
        scale.held()
    assert scale.value == 2**17
    scale.value = 1.0
    with pytest.raises(TrainingError, match="even with a loss scale of 1"):
        scale.overflowed()


def test_a_loss_that_is_not_finite_stops_float16_too(fit):
    engine = float16(fit)
    batch = fit.objective.batch(make_rows(2))
    batch.hidden[0] = float("nan")
    engine.accumulate(batch, [1.0] * 3)
    with pytest.raises(TrainingError, match="the loss is not finite"):
        engine.step()


def test_trained_state_is_a_copy(fit):
    state = fit.engine.trained_state()
    next(iter(state.values())).fill_(7)
    assert all((tensor != 7).all() for tensor in fit.engine.trained_state().values())
