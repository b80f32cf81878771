"""On the device: what float32 learns is learnt in every other way too, and memory stays flat."""

from dataclasses import replace

import pytest
from training_case import ALONE, make_config, make_stage, write_rows

from medusa_train.config.load import load
from medusa_train.errors import ConfigError
from medusa_train.model.backbone import load_backbone
from medusa_train.train.medusa1 import train_medusa1
from medusa_train.train.medusa2 import train_medusa2

pytestmark = pytest.mark.gpu

TRAIN = {
    "medusa1": lambda config, stage, rows, backbone: train_medusa1(
        config, stage, rows, backbone, ALONE
    ),
    "medusa2": lambda config, stage, rows, backbone: train_medusa2(
        config, stage, rows, None, backbone, ALONE
    ),
}


def losses(folder, device, stage, *settings):
    """All training losses of four steps, by which they fall by more than 3."""
    from bench.gpu import logged_losses

    config = make_config("medusa2.start=fresh", f"model.device={device.type}", *settings)
    rows = write_rows(folder / "distill")
    TRAIN[stage](config, make_stage(folder, stage), rows, load_backbone(config.model))
    return logged_losses(folder / stage)


@pytest.fixture(scope="module", params=list(TRAIN))
def float32(request, device, tmp_path_factory):
    """A stage, and its losses in float32."""
    folder = tmp_path_factory.mktemp("float32")
    return request.param, losses(folder, device, request.param)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(float32, tmp_path, device, dtype):
    stage, expected = float32
    found = losses(tmp_path, device, stage, f"{stage}.optim.compute_dtype={dtype}")
    assert found != expected
    assert found == pytest.approx(expected, rel=0, abs=0.05)


# What another package is needed for; without it the run is refused in one sentence
@pytest.mark.parametrize(
    ("setting", "within"),
    [("model.compile=true", 1e-3), ("{stage}.optim.optimizer=adamw8bit", 0.3)],
)
def test_what_needs_another_package(float32, tmp_path, device, setting, within):
    stage, expected = float32
    try:
        found = losses(tmp_path, device, stage, setting.format(stage=stage))
    except ConfigError as refused:
        pytest.skip(str(refused))
    assert found == pytest.approx(expected, rel=0, abs=within)


def test_gradient_checkpointing(tmp_path, device):
    found, expected = (
        losses(tmp_path / on, device, "medusa2", f"medusa2.gradient_checkpointing={on}")
        for on in ("true", "false")
    )
    assert found == pytest.approx(expected, rel=0, abs=1e-4)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_memory_of_the_loss_does_not_grow_with_the_number_of_heads(device, lm_head):
    from bench.case import Case
    from bench.loss import build_training
    from bench.memory import peak_bytes

    config = load("model=tiny", "medusa1.optim.compute_dtype=float32")
    backbone = load_backbone(replace(config.model, device=device.type))
    case = Case(config=config, backbone=backbone, repeats=1, tiny=True)
    peaks = {}
    for heads in (1, 5):
        training = build_training(case, lm_head, num_heads=heads, positions=2048)
        training.ours()  # libraries take their workspace at the first call
        peaks[heads] = peak_bytes(training.ours, device)
    assert 0 < peaks[5] <= 1.15 * peaks[1]
    assert peak_bytes(training.stacked, device) > 4 * peaks[5]
