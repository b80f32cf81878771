"""What W&B gets of a training, read back from what it leaves on disk without a network."""

import json
import os
import signal

import pytest
from training_case import ALONE, make_backbone, make_config, make_stage, write_rows
from wandb_reader import read_offline_runs

from medusa_train.errors import Interrupted
from medusa_train.track.manifest import Stage
from medusa_train.train import loop
from medusa_train.train.medusa1 import train_medusa1

OFFLINE = ("track=offline", "track.project=p", "track.group=g", "track.tags=[a,b]")


@pytest.fixture
def stage(tmp_path, monkeypatch) -> Stage:
    """A stage that was stopped after its second step and then run to its end."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    distill, config = write_rows(tmp_path / "distill"), make_config(*OFFLINE)
    stage = make_stage(tmp_path)
    micro_batches = loop.Fit._micro_batches

    def interrupt(self):
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return micro_batches(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Fit, "_micro_batches", interrupt)
        with pytest.raises(Interrupted):
            train_medusa1(config, stage, distill, make_backbone(), ALONE)
    train_medusa1(config, stage, distill, make_backbone(), ALONE)
    return stage


def test_an_offline_run_holds_all_that_was_logged_under_one_id_across_a_resume(stage):
    first, second = read_offline_runs(stage.folder)

    assert first.id == second.id == (stage.folder / "wandb_id.txt").read_text().strip()
    for run in (first, second):
        assert (run.project, run.group, run.job_type, run.tags) == ("p", "g", "medusa1", ["a", "b"])
        assert run.name == "test-medusa1"
        assert run.config["made"] == "for a test"
    assert (first.exit_code, second.exit_code) == (1, 0)
    lines = [json.loads(line) for line in (stage.folder / "metrics.jsonl").open()]
    assert {line["step"] for line in lines if "train/loss" in line} == {1, 2, 3, 4}
    assert {line["step"] for line in lines if "eval/loss" in line} == {0, 2, 4}
    assert max(first.history) == 2
    assert min(second.history) == 3
    history = {**first.history, **second.history}
    for line in lines:
        told = history[line["step"]]
        for name in line.keys() - {"step", "time"}:
            assert told[name] == line[name], (line["step"], name)
    names = {f"train/head{k}/loss" for k in range(3)} | {f"eval/head{k}/top1" for k in range(3)}
    assert names <= history[4].keys()


def test_heads_and_rows_are_artifacts_of_the_run_that_finished_them(stage):
    first, second = read_offline_runs(stage.folder)

    assert first.artifacts == {}
    rows = ["calibration/part-00000.parquet", "train/part-00000.parquet"]
    assert second.artifacts == {
        "test-medusa1-heads": ("model", ["config.json", "medusa_lm_head.safetensors"]),
        "test-medusa1-rows": ("dataset", rows),
    }
    staged = stage.folder.parent / "data" / "artifacts"
    assert [p for p in staged.rglob("*") if p.suffix in (".safetensors", ".parquet")] == []
