import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from training_case import make_fit

from medusa_train.errors import CheckpointError
from medusa_train.parallel import World
from medusa_train.train.checkpoint import STATE, TrainState, load_checkpoint


@pytest.fixture
def fit(tmp_path):
    return make_fit(tmp_path / "checkpoints")


def save(fit, *steps):
    for step in steps:
        fit.checkpoints.save(fit.engine, TrainState(step=step, tokens=7, seconds=1.5, losses=[2.0]))


def test_nothing_is_found_in_an_empty_folder(fit):
    assert fit.checkpoints.latest() is None


def test_the_newest_is_found_with_its_state_and_the_oldest_is_dropped(fit):
    save(fit, 2, 4, 10)
    folder, state = fit.checkpoints.latest()
    assert folder.name == "step-000010"
    assert state == TrainState(step=10, tokens=7, seconds=1.5, losses=[2.0])
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step-000004", "step-000010"]


def test_what_a_killed_run_left_half_written_is_removed(fit):
    save(fit, 2)
    half = fit.checkpoints.folder / "step-000004.part"
    shutil.copytree(fit.checkpoints.folder / "step-000002", half)
    assert fit.checkpoints.latest()[1].step == 2
    assert not half.exists()


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_a_damaged_newest_one_is_named_and_not_passed_over(fit, file, damage):
    save(fit, 2, 4)
    path = fit.checkpoints.folder / "step-000004" / file
    content = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
    else:
        content[-9] ^= 1
        path.write_bytes(content[:-4] if damage == "cut" else content)
    with pytest.raises(CheckpointError, match=rf"{file} is (damaged|missing).*delete .*000004"):
        fit.checkpoints.latest()


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_state_is_named(fit, content):
    save(fit, 2)
    (fit.checkpoints.folder / "step-000002" / STATE).write_text(content)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read .*delete"):
        fit.checkpoints.latest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": World(rank=1, size=2)}, "processes=1, this run has processes=2"),
        ({"engine_name": "deepspeed zero2"}, "engine=torch, this run has engine=deepspeed zero2"),
        ({"fingerprint": "g"}, "fingerprint=f, this run has fingerprint=g"),
    ],
)
def test_one_of_another_launch_is_refused(fit, change, message):
    save(fit, 2)
    with pytest.raises(CheckpointError, match=message):
        replace(fit.checkpoints, **change).latest()


def test_weights_that_are_not_finite_never_become_a_checkpoint(fit):
    next(fit.objective.parameters()).data.view(-1)[0] = float("nan")
    with pytest.raises(CheckpointError, match="is not finite"):
        save(fit, 2)
    assert fit.checkpoints.latest() is None


def test_an_engine_that_cannot_read_its_files_says_which(fit):
    save(fit, 2)
    folder = fit.checkpoints.folder / "step-000002"
    (folder / "optimizer.pt").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="step-000002 cannot be read"):
        load_checkpoint(fit.engine, folder)
    tensors = load_file(folder / "weights.safetensors")
    tensors.popitem()
    save_file(tensors, folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match="other weights than are trained"):
        load_checkpoint(fit.engine, folder)


def test_the_state_is_plain_json(fit):
    save(fit, 2)
    stored = json.loads((fit.checkpoints.folder / "step-000002" / STATE).read_text())
    assert stored["files"].keys() == {"weights.safetensors", "optimizer.pt"}
    assert stored["processes"] == 1
