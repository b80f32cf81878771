"""What makes a stage, what it builds on, and what is refused for not being that."""

import json
from pathlib import Path

import pytest
from pipeline_case import ALL, SUMMARY, Calls, smoke, stand_ins

from medusa_train.errors import CheckpointError, ConfigError, DataError
from medusa_train.pipeline import run_stages
from medusa_train.track.manifest import read_manifest


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return stand_ins(monkeypatch)


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


@pytest.mark.parametrize(
    ("stages", "missing"),
    [("[evaluate]", "distill"), ("[medusa1]", "distill"), ("[distill,evaluate]", "medusa1")],
)
def test_a_stage_without_what_it_builds_on_says_what_to_run(tmp_path, calls, stages, missing):
    with pytest.raises(CheckpointError, match=f"needs the stage {missing}, which has not been run"):
        run_stages(smoke(f"stages={stages}"), tmp_path)

    run_stages(smoke(), tmp_path)  # as the message says: nothing is in the way

    assert read_manifest(tmp_path / "evaluate") is not None


def test_an_adaptive_draft_needs_a_draft_model_from_wherever(tmp_path, calls):
    adaptive = "evaluate.also=[draft_adaptive]"
    with pytest.raises(ConfigError, match=r"has draft_adaptive, but .*draft holds no draft model"):
        run_stages(smoke("stages=[distill,medusa1,evaluate]", adaptive), tmp_path)
    assert calls.names == []

    run_stages(smoke("stages=[distill,medusa1,draft]", adaptive), tmp_path)
    run_stages(smoke("stages=[evaluate]", adaptive), tmp_path)
    given = f"paths.draft={tmp_path}/draft"
    run_stages(smoke("stages=[distill,medusa1,evaluate]", adaptive, given), tmp_path / "second")

    assert calls.names == [*ALL, "distill", "medusa1", "evaluate"]


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
