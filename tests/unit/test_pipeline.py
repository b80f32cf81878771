"""The order of stages, what is skipped or resumed, and who may do it."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from pipeline_case import ALL, SUMMARY, Calls, smoke, stand_ins

from medusa_train import actions, pipeline
from medusa_train.errors import CheckpointError, ConfigError, DataError, ModelError
from medusa_train.parallel import World
from medusa_train.pipeline import Run, run_stages
from medusa_train.track.manifest import Stage, read_manifest


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return stand_ins(monkeypatch)


def test_all_stages_run_in_order_and_a_second_run_loads_nothing(tmp_path, calls, monkeypatch):
    run_stages(smoke(), tmp_path)
    assert calls.names == ALL
    assert {p.name for p in tmp_path.iterdir()} == set(ALL)
    found = read_manifest(tmp_path / "draft")
    assert found is not None
    assert (found["status"], found["summary"]) == ("done", {"made": "draft", **SUMMARY})

    monkeypatch.delattr(actions, "load_backbone")
    run_stages(smoke(), tmp_path)

    assert calls.names == ALL


def test_to_refuse_or_to_find_all_finished_nothing_slow_is_imported():
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, medusa_train.pipeline; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    slow = {"bitsandbytes", "deepspeed", "matplotlib", "peft", "transformers", "wandb"}

    assert "medusa_train.layout" in imported
    assert slow & set(imported) == set()


@pytest.mark.parametrize("setting", ["model.name", "draft.model"])
@pytest.mark.parametrize("name", ["/no/such", "package:no_such", "tiny"])
def test_a_missing_model_is_told_first_and_leaves_no_stage_behind(tmp_path, calls, setting, name):
    with pytest.raises(ModelError, match=f"{setting}={name}: "):
        run_stages(smoke(f"{setting}={name}", "medusa1.optim.batch_size=4000"), tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_needs_its_model_no_more(tmp_path, calls):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    run_stages(smoke(f"model.name={model}"), tmp_path / "run")
    (model / "config.json").unlink()
    model.rmdir()

    run_stages(smoke(f"model.name={model}"), tmp_path / "run")

    assert calls.names == ALL


def test_a_login_that_is_missing_is_told_before_any_work(tmp_path, calls, monkeypatch):
    def refuse(track):
        if track.mode == "online":
            raise ConfigError("log in")

    monkeypatch.setattr(pipeline, "check_login", refuse)
    with pytest.raises(ConfigError, match="log in"):
        run_stages(smoke("track=online"), tmp_path)
    assert list(tmp_path.iterdir()) == []

    run_stages(smoke("track=online", "stages=[distill]"), tmp_path)  # which tracks nothing
    assert calls.names == ["distill"]


def test_a_stage_that_fails_is_run_again_and_those_before_it_are_not(tmp_path, calls):
    def fail(_: Path) -> None:
        raise DataError("this time")

    calls.act["draft"] = fail
    with pytest.raises(DataError, match="this time"):
        run_stages(smoke(), tmp_path)
    assert calls.names == ALL[:3]

    calls.act.clear()
    run_stages(smoke(), tmp_path)

    assert calls.names == [*ALL[:3], "draft", "evaluate"]


def test_one_stage_alone_builds_on_what_lies_there(tmp_path, calls):
    run_stages(smoke("stages=[distill,medusa1,draft]"), tmp_path)
    run_stages(smoke("stages=[evaluate]"), tmp_path)

    assert calls.names == ALL
    given = calls.given["evaluate"]
    assert given["heads"].folder == tmp_path / "medusa1" / "heads"
    assert given["heads"].summary["made"] == "medusa1"
    assert given["draft"].folder == tmp_path / "draft" / "model"
    assert given["distilled"] == tmp_path / "distill"


def test_a_draft_model_is_not_needed(tmp_path, calls):
    run_stages(smoke("stages=[distill,medusa1,evaluate]"), tmp_path)

    assert calls.given["evaluate"]["draft"] is None


def test_what_medusa2_has_made_is_evaluated_with_its_own_backbone(tmp_path, calls):
    calls.act["medusa2"] = lambda folder: (folder / "model").mkdir()
    run_stages(smoke("stages=[distill,medusa1,medusa2,draft,evaluate]"), tmp_path)

    assert calls.names == ["distill", "medusa1", "medusa2", "draft", "evaluate"]
    start, backbone = calls.positional["medusa2"][3:5]
    assert start.folder == tmp_path / "medusa1" / "heads"
    assert backbone == "backbone random:llama"
    assert calls.given["evaluate"]["heads"].stage == "medusa2"
    assert calls.given["evaluate"]["heads"].folder == tmp_path / "medusa2" / "heads"
    merged = tmp_path / "medusa2" / "model"
    assert calls.positional["evaluate"][2] == f"backbone {merged}"


def test_a_backbone_that_was_not_merged_cannot_be_evaluated(tmp_path, calls):
    with pytest.raises(CheckpointError, match=r"medusa2 has none: use stages=\[medusa2,evaluate\]"):
        run_stages(smoke("stages=[distill,medusa1,medusa2,evaluate]"), tmp_path)


def test_more_rows_in_a_step_than_there_will_be_are_refused_before_any_is_made(tmp_path, calls):
    few = ("prompts.max_train=7", "medusa1.optim.batch_size=8")
    with pytest.raises(ConfigError, match="batch_size=8, but there are only 7 training rows"):
        run_stages(smoke(*few), tmp_path)
    assert calls.names == []


def test_a_deepspeed_file_that_deepspeed_refuses_stops_the_run_before_any_stage(tmp_path, calls):
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 1, "reduce_bucket": 5}}')
    with pytest.raises(
        ConfigError, match=r"mine\.json: DeepSpeed refuses it: .*reduce_bucket: unk"
    ):
        run_stages(smoke("deepspeed=custom", f"deepspeed.config={path}"), tmp_path / "run")
    assert calls.names == []
    assert not (tmp_path / "run").exists()


def test_a_second_command_is_refused_by_name_until_the_first_has_ended(tmp_path, calls):
    found = []

    def again(_: Path) -> None:
        with pytest.raises(ConfigError, match=f"draft is in use by process {os.getpid()} on "):
            run_stages(smoke(), tmp_path)
        run_stages(smoke("stages=[distill,medusa1]"), tmp_path)  # finished ones are free
        found.append(1)
        raise DataError("this time")

    calls.act["draft"] = again
    with pytest.raises(DataError, match="this time"):
        run_stages(smoke(), tmp_path)
    assert found == [1]

    calls.act.clear()
    run_stages(smoke(), tmp_path)

    assert calls.names == [*ALL[:3], "draft", "evaluate"]


class Told(World):
    """Told by the first process that it refuses."""

    def gather(self, value):
        assert value == (None, None)
        return [(None, ConfigError("in use")), value]


def test_what_the_first_process_refuses_all_do(tmp_path, calls):
    second = Run(smoke(), tmp_path, Told(rank=1, size=2))

    with ExitStack() as locks, pytest.raises(ConfigError, match="in use"):
        second.open(second.layout.stage("distill"), locks)

    assert list(tmp_path.iterdir()) == []


def test_an_adapter_is_merged_later_without_training_again(tmp_path, calls, monkeypatch):
    joint = "stages=[distill,medusa1,medusa2]"
    calls.act["medusa2"] = lambda folder: (folder / "adapter").mkdir()
    run_stages(smoke(joint, "medusa2.merge=false"), tmp_path)
    run_stages(smoke(joint, "medusa2.merge=false"), tmp_path)
    merged = []

    def merge(config, stage, backbone):
        merged.append(backbone)
        (stage.folder / "model").mkdir()
        return {"merged_dtype": "float32"}

    monkeypatch.setattr(actions, "merge_adapter", merge)
    calls.names.clear()
    for _ in range(2):
        run_stages(smoke("stages=[distill,medusa1,medusa2,evaluate]"), tmp_path)

    assert merged == ["backbone random:llama"]
    assert calls.names == ["evaluate"]
    assert calls.positional["evaluate"][2] == f"backbone {tmp_path / 'medusa2' / 'model'}"
    found = read_manifest(tmp_path / "medusa2")
    assert found is not None
    assert found["summary"] == {"made": "medusa2", **SUMMARY, "merged_dtype": "float32"}
    assert found["status"] == "done"


def test_a_merged_backbone_that_is_gone_without_an_adapter_is_told_of(tmp_path, calls):
    joint = smoke("stages=[distill,medusa1,medusa2]", "medusa2.backbone=full")
    calls.act["medusa2"] = lambda folder: (folder / "model").mkdir()
    run_stages(joint, tmp_path)
    (tmp_path / "medusa2" / "model").rmdir()

    with pytest.raises(CheckpointError, match="medusa2 has neither a model nor an adapter to make"):
        run_stages(joint, tmp_path)


def test_a_start_of_medusa2_that_failed_leaves_a_finished_run_as_it_was(tmp_path, calls):
    run_stages(smoke(), tmp_path)
    Stage(name="medusa2", folder=tmp_path / "medusa2", settings={}).open()
    calls.names.clear()
    run_stages(smoke(), tmp_path)
    assert calls.names == []


def test_medusa2_from_fresh_heads_needs_no_medusa1(tmp_path, calls):
    run_stages(smoke("stages=[distill,medusa2]", "medusa2.start=fresh"), tmp_path)

    assert calls.positional["medusa2"][3] is None
    with pytest.raises(CheckpointError, match="medusa2 needs the stage medusa1"):
        run_stages(smoke("stages=[distill,medusa2]"), tmp_path / "other")


def test_only_the_first_process_measures_and_writes(tmp_path, calls):
    run_stages(smoke("stages=[distill,medusa1]"), tmp_path)
    second = Run(smoke("stages=[evaluate]"), tmp_path, Told(rank=1, size=2))
    stage = second.layout.stage("evaluate")

    with pytest.raises(ConfigError, match="in use"):
        second.work([stage])
    assert "evaluate" not in calls.names
