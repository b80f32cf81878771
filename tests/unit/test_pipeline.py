"""The order of stages, what is skipped, resumed or refused; the stages themselves do nothing."""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from medusa_train import pipeline
from medusa_train.config.load import load
from medusa_train.errors import CheckpointError, ConfigError, DataError
from medusa_train.parallel import World
from medusa_train.pipeline import Run, run_stages
from medusa_train.track.manifest import Stage, read_manifest

ALONE = World(rank=0, size=1)
ALL = ["distill", "medusa1", "draft", "evaluate"]
BACKBONE = ("perplexity_before", "perplexity", "kl", "agreement_before", "agreement")
SUMMARY = {
    "tokens": 8,
    "seconds": 1.5,
    "tokens_before": 0,
    "seconds_before": 0,
    "backbone": dict.fromkeys(BACKBONE, 1.0),
}


class Calls:
    """Which stages were run, with their arguments, and what each does when it is."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.given: dict[str, dict[str, Any]] = {}
        self.positional: dict[str, tuple[Any, ...]] = {}
        self.act: dict[str, Callable[[Path], None]] = {}

    def stage(self, name: str, place: int):
        """A stand-in that finds its `Stage` at a place of its arguments."""

        def stand_in(*given: Any, **named: Any) -> dict[str, Any]:
            self.names.append(name)
            self.given[name], self.positional[name] = named, given
            folder = given[place].folder
            (folder / "work").write_text(name)
            self.act.get(name, lambda _: None)(folder)
            return {"made": name, **SUMMARY}

        return stand_in


@pytest.fixture
def calls(monkeypatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(pipeline, "distill", found.stage("distill", 1))
    monkeypatch.setattr(pipeline, "train_medusa1", found.stage("medusa1", 1))
    monkeypatch.setattr(pipeline, "train_medusa2", found.stage("medusa2", 1))
    monkeypatch.setattr(pipeline, "train_draft", found.stage("draft", 1))
    monkeypatch.setattr(pipeline, "evaluate", found.stage("evaluate", 1))
    monkeypatch.setattr(pipeline, "load_backbone", lambda model: f"backbone {model.name}")
    return found


def smoke(*overrides: str):
    return load("+recipe=smoke", *overrides)


def test_all_stages_run_in_order_and_a_second_run_loads_nothing(tmp_path, calls, monkeypatch):
    run_stages(smoke(), tmp_path)
    assert calls.names == ALL
    assert {p.name for p in tmp_path.iterdir()} == set(ALL)
    found = read_manifest(tmp_path / "draft")
    assert found is not None
    assert (found["status"], found["summary"]) == ("done", {"made": "draft", **SUMMARY})

    monkeypatch.delattr(pipeline, "load_backbone")
    run_stages(smoke(), tmp_path)

    assert calls.names == ALL


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


def test_stages_run_one_by_one_are_those_of_a_whole_run(tmp_path, calls):
    for name in ALL:
        run_stages(smoke(f"stages=[{name}]"), tmp_path / "parts")
    run_stages(smoke(), tmp_path / "whole")

    for name in ALL:
        fingerprints = [
            json.loads((tmp_path / run / name / "manifest.json").read_text())["fingerprint"]
            for run in ("parts", "whole")
        ]
        assert fingerprints[0] == fingerprints[1], name


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


def test_medusa2_added_to_a_finished_run_says_what_lies_in_the_way_and_then_goes_on(
    tmp_path, calls
):
    calls.act["medusa2"] = lambda folder: (folder / "model").mkdir()
    run_stages(smoke(), tmp_path)
    joint = smoke("stages=[distill,medusa1,medusa2,draft,evaluate]")

    with pytest.raises(CheckpointError) as refused:
        run_stages(joint, tmp_path)

    head, *lines = str(refused.value).splitlines()
    assert head == f"{tmp_path / 'evaluate'} was made with other settings:"
    assert lines[0].startswith("  - medusa2 was no part of the run then; now what it leaves")
    assert lines[1].startswith("Move or delete that folder to make it anew")
    assert calls.names == ALL  # before anything is trained

    (tmp_path / "evaluate").rename(tmp_path / "before")
    run_stages(joint, tmp_path)

    assert calls.names == [*ALL, "medusa2", "evaluate"]
    assert calls.given["evaluate"]["heads"].stage == "medusa2"
    assert (tmp_path / "before" / "work").is_file()


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


def test_a_stage_that_came_or_went_or_changed_is_told_in_words(tmp_path, calls):
    run_stages(smoke("stages=[distill,medusa1,evaluate]"), tmp_path)
    run_stages(smoke("stages=[draft]"), tmp_path)
    with pytest.raises(CheckpointError, match="draft was no part of the run then"):
        run_stages(smoke("stages=[evaluate]"), tmp_path)

    (tmp_path / "evaluate" / "manifest.json").unlink()
    run_stages(smoke("stages=[evaluate]"), tmp_path)
    (tmp_path / "draft").rename(tmp_path / "away")

    with pytest.raises(CheckpointError, match="draft was part of the run then, and used here"):
        run_stages(smoke("stages=[evaluate]"), tmp_path)


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


def test_what_the_first_process_refuses_all_do(tmp_path, calls):
    class Told(World):
        def gather(self, value):
            return [(False, ConfigError("in use")), value]

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

    monkeypatch.setattr(pipeline, "merge_adapter", merge)
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


@pytest.mark.parametrize(
    ("edit", "missing"),
    [
        ({}, "tokens is null"),
        ({**SUMMARY, "seconds": "1.5"}, 'seconds is "1.5"'),
        ({**SUMMARY, "tokens": True}, "tokens is true"),
        ({**SUMMARY, "backbone": {"kl": 0.1}}, "backbone.perplexity_before is null"),
        ({**SUMMARY, "backbone": 3}, "backbone.perplexity_before is null"),
    ],
)
def test_an_edited_summary_is_refused_before_anything_is_measured(tmp_path, calls, edit, missing):
    stages = "stages=[distill,medusa1,medusa2,draft]"
    run_stages(smoke(stages), tmp_path)
    path = tmp_path / "medusa2" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "summary": edit}))

    with pytest.raises(CheckpointError) as refused:
        run_stages(smoke("stages=[evaluate]"), tmp_path)

    assert str(refused.value).startswith(f"{path}: summary.{missing}, expected a number: put it")
    assert "evaluate" not in calls.names


def test_a_path_to_nothing_or_to_another_stage_is_refused(tmp_path, calls):
    run_stages(smoke(), tmp_path)
    for wrong, message in (
        (tmp_path / "typo", "holds no finished stage: correct the path"),
        (tmp_path / "medusa1", "holds a medusa1 stage, expected medusa2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            run_stages(smoke("stages=[evaluate]", f"paths.medusa2={wrong}"), tmp_path)


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


@pytest.mark.parametrize(
    ("stages", "missing"),
    [("[evaluate]", "distill"), ("[medusa1]", "distill"), ("[distill,evaluate]", "medusa1")],
)
def test_a_stage_without_what_it_builds_on_says_what_to_run(tmp_path, calls, stages, missing):
    with pytest.raises(CheckpointError, match=f"needs the stage {missing}, which has not been run"):
        run_stages(smoke(f"stages={stages}"), tmp_path)

    run_stages(smoke(), tmp_path)  # as the message says: nothing is in the way

    assert read_manifest(tmp_path / "evaluate") is not None


def test_an_unfinished_stage_is_not_built_on(tmp_path, calls):
    def fail(_: Path) -> None:
        raise DataError("half way")

    calls.act["distill"] = fail
    with pytest.raises(DataError):
        run_stages(smoke("stages=[distill]"), tmp_path)

    with pytest.raises(CheckpointError, match="distill, which is not finished"):
        run_stages(smoke("stages=[medusa1]"), tmp_path)


@pytest.mark.parametrize(
    ("override", "refused", "names"),
    [
        ("seed=1", "distill", "seed: 0 there, 1 now"),
        ("distill.temperature=0.5", "distill", "distill.temperature: 0.7 there, 0.5 now"),
        ("prompts.max_test=7", "distill", "prompts.max_test: 8 there, 7 now"),
        ("heads.num_heads=2", "medusa1", "heads.num_heads: 3 there, 2 now"),
        ("medusa1.optim.lr=0.1", "medusa1", "medusa1.optim.lr: 0.003 there, 0.1 now"),
        ("draft.optim.epochs=3", "draft", "draft.optim.epochs: 2 there, 3 now"),
        ("evaluate.gammas=[4]", "evaluate", r"evaluate.gammas: \[2, 3\] there, \[4\] now"),
    ],
)
def test_another_setting_is_refused_by_the_first_stage_it_makes(
    tmp_path, calls, override, refused, names
):
    run_stages(smoke(), tmp_path)

    with pytest.raises(CheckpointError, match=f"{refused} was made with other settings") as error:
        run_stages(smoke(override), tmp_path)

    assert error.match(names)
    assert calls.names == ALL
    for name in ALL:
        found = read_manifest(tmp_path / name)
        assert found is not None
        assert found["status"] == "done"


@pytest.mark.parametrize(
    "override",
    [
        "medusa1.optim.log_every=1",
        "draft.optim.save_every=1",
        "medusa1.optim.micro_batch_size=8",
        "draft.optim.keep_checkpoints=1",
        "model.device=auto",
        "track=offline",
        "deepspeed=zero1",
        "description=other",
    ],
)
def test_what_does_not_change_the_result_changes_no_stage(tmp_path, calls, override):
    run_stages(smoke(), tmp_path)
    run_stages(smoke(override), tmp_path)

    assert calls.names == ALL


def test_prompts_are_known_by_what_they_say_and_not_by_their_file(tmp_path, calls):
    lines = [json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(60)]
    shares = ("prompts.calibration_share=0.2", "prompts.test_share=0.2")
    path = tmp_path / "prompts.jsonl"
    settings = smoke(f"prompts.path={path}", *shares)
    path.write_text("".join(lines))
    run_stages(settings, tmp_path)
    path.write_text("".join(reversed(lines)))
    run_stages(settings, tmp_path)
    assert calls.names == ALL

    path.write_text("".join(lines).replace("Count to 9.", "Count up to 9."))

    with pytest.raises(CheckpointError, match=r"prompts\.digest"):
        run_stages(settings, tmp_path)


def test_a_folder_given_in_paths_is_used_instead_of_the_runs_own(tmp_path, calls):
    run_stages(smoke("stages=[distill]"), tmp_path / "first")
    given = f"paths.distill={tmp_path}/first/distill"

    run_stages(smoke("stages=[medusa1]", given), tmp_path / "second")

    assert calls.names == ["distill", "medusa1"]
    assert not (tmp_path / "second" / "distill").exists()


def test_what_was_made_anew_below_is_refused_above(tmp_path, calls):
    run_stages(smoke("stages=[distill]", "seed=1"), tmp_path / "other")
    run_stages(smoke("stages=[distill,medusa1]"), tmp_path)
    given = f"paths.distill={tmp_path}/other/distill"

    with pytest.raises(CheckpointError, match="distill was made with other settings then"):
        run_stages(smoke("stages=[medusa1]", given), tmp_path)


def test_only_the_first_process_measures_and_writes(tmp_path, calls):
    run_stages(smoke("stages=[distill,medusa1]"), tmp_path)
    second = Run(smoke("stages=[evaluate]"), tmp_path, World(rank=1, size=2))
    stage = second.layout.stage("evaluate")

    assert second.actions["evaluate"](stage) == {}
    assert "evaluate" not in calls.names
