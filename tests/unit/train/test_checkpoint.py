import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from training_case import make_fit, make_rows

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


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors"])
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


def test_a_checkpoint_without_its_state_is_refused_not_passed_over(fit):
    save(fit, 2, 4)
    (fit.checkpoints.folder / "step-000004" / STATE).unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing.*copy all of it, or delete"):
        fit.checkpoints.latest()


def test_the_inside_of_a_checkpoint_copied_to_the_wrong_level_is_no_fresh_start(fit):
    save(fit, 2)
    inner = fit.checkpoints.folder / "step-000002"
    for path in inner.iterdir():
        shutil.copy(path, fit.checkpoints.folder)
    shutil.rmtree(inner)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is no checkpoint: expected"):
        fit.checkpoints.latest()


def test_one_of_another_run_is_refused_with_the_setting_named(fit):
    made = replace(fit.checkpoints, settings={"heads": {"num_heads": 2}, "seed": 0})
    made.save(fit.engine, TrainState(step=2))
    now = replace(fit.checkpoints, settings={"heads": {"num_heads": 4}, "seed": 0})
    with pytest.raises(CheckpointError, match=r"heads\.num_heads: 2 there, 4 now"):
        now.latest()


def test_the_number_of_processes_and_the_engine_do_not_matter(fit):
    save(fit, 2)
    other = replace(fit.checkpoints, world=World(rank=0, size=1), engine_name="deepspeed zero3")
    assert other.latest()[1].step == 2


def test_the_best_is_kept_beside_the_last_ones_and_found_again(fit, caplog):
    state = TrainState(best_score=1.5)
    for step, best in ((2, False), (4, True), (6, False), (8, False), (10, False)):
        state.step = step
        fit.checkpoints.save(fit.engine, state, best=best)
    left = sorted(path.name for path in fit.checkpoints.folder.iterdir())
    assert left == ["step-000004", "step-000008", "step-000010"]
    found = fit.checkpoints.latest()[1]
    assert (found.best_step, found.best_score) == (4, 1.5)
    folder, best = fit.checkpoints.best(found)
    assert (folder.name, best.step) == ("step-000004", 4)
    shutil.rmtree(folder)
    assert fit.checkpoints.best(found) is None
    assert "step-000004, the best, was deleted: the last weights are the result" in caplog.text


@pytest.mark.parametrize("edit", [{"step": 100000}, {"step": -3}, {"step": "2"}, {"files": [1]}])
def test_a_state_that_was_edited_is_not_believed(fit, edit):
    save(fit, 2)
    path = fit.checkpoints.folder / "step-000002" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read \((step is|files and)"):
        fit.checkpoints.latest()


@pytest.mark.parametrize("best_step", [0, 6])
def test_nothing_is_better_than_the_last(fit, best_step):
    assert fit.checkpoints.best(TrainState(step=6, best_step=best_step)) is None


def test_a_score_that_is_not_known_yet_survives(fit):
    save(fit, 2)
    assert fit.checkpoints.latest()[1].best_score == -math.inf


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weight: weight.data.view(-1)[0].fill_(math.nan), "is not finite"),
        (
            lambda weight: setattr(weight, "data", weight.data[:0]),
            "has size 0: it was not gathered",
        ),
    ],
)
def test_weights_that_are_empty_or_no_numbers_never_become_a_checkpoint(fit, damage, message):
    save(fit, 2)
    damage(next(fit.objective.parameters()))
    with pytest.raises(CheckpointError, match=message):
        save(fit, 4)
    assert [path.name for path in fit.checkpoints.folder.iterdir()] == ["step-000002"]


def test_a_full_disk_leaves_the_checkpoint_before_and_one_sentence(fit, monkeypatch):
    save(fit, 2)

    def full(folder):
        (folder / "weights.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(fit.engine, "save", full)
    with pytest.raises(CheckpointError, match=r"step-000004 cannot be written .*No space.*room"):
        save(fit, 4)
    assert [path.name for path in fit.checkpoints.folder.iterdir()] == ["step-000002"]


def test_weights_that_share_memory_are_saved_whole(fit):
    first, second, _ = fit.objective.heads
    second.lm_head.data = first.lm_head.data  # as of heads made by reference
    save(fit, 2)
    stored = load_file(fit.checkpoints.folder / "step-000002" / "weights.safetensors")
    saved = [stored[f"heads.heads.{k}.lm_head"] for k in (0, 1)]
    assert torch.equal(saved[0], first.lm_head)
    assert torch.equal(saved[0], saved[1])


def test_an_engine_that_cannot_read_its_files_says_which(fit):
    save(fit, 2)
    folder = fit.checkpoints.folder / "step-000002"
    tensors = load_file(folder / "optimizer.safetensors")
    name = next(name for name in tensors if name.startswith("exp_avg_sq."))
    del tensors[name]
    save_file(tensors, folder / "optimizer.safetensors", metadata={"updates": "1.0"})
    with pytest.raises(CheckpointError, match=r"000002 holds \['exp_avg'\] of heads.* expected"):
        load_checkpoint(fit.engine, folder)
    (folder / "optimizer.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="step-000002 cannot be read"):
        load_checkpoint(fit.engine, folder)


def test_what_is_loaded_is_what_was_saved_bit_for_bit(fit, tmp_path):
    for step in (1, 2):
        fit.engine.set_lr(0.01)
        fit.engine.accumulate(fit.objective.batch(make_rows(2, seed=step)), [1.0] * 3)
        fit.engine.step()
    save(fit, 2)
    other = make_fit(tmp_path / "other")
    load_checkpoint(other.engine, fit.checkpoints.folder / "step-000002")
    save(other, 2)
    for file in ("weights.safetensors", "optimizer.safetensors"):
        contents = [
            (f.checkpoints.folder / "step-000002" / file).read_bytes() for f in (fit, other)
        ]
        assert contents[0] == contents[1]


def test_the_state_is_plain_json(fit):
    save(fit, 2)
    stored = json.loads((fit.checkpoints.folder / "step-000002" / STATE).read_text())
    assert stored["files"].keys() == {"weights.safetensors", "optimizer.safetensors"}
    assert (stored["processes"], stored["engine"], stored["best_score"]) == (1, "torch", None)
