import json

import pytest

from medusa_train.errors import CheckpointError
from medusa_train.track.manifest import (
    MANIFEST,
    Stage,
    fingerprint,
    finished,
    read_manifest,
    replace_folder,
    write_json,
)


def stage(folder, **settings):
    return Stage(name="medusa1", folder=folder / "medusa1", settings={"lr": 1, **settings})


def test_new_then_unfinished_then_done(tmp_path):
    made = stage(tmp_path, betas=(0.9, 0.99))
    assert made.open() is False
    assert made.open() is False
    made.finish({"top1": (0.5,)})
    assert made.open() is True
    found = finished(made.folder, stage="medusa1", needed_by="evaluate")
    assert found["summary"] == {"top1": [0.5]}
    assert found["fingerprint"] == made.fingerprint


def test_other_settings_are_refused_with_every_difference(tmp_path):
    made = stage(tmp_path, optim={"a": 1, "b": 2})
    made.open()
    (made.folder / "checkpoints").mkdir()
    (made.folder / "checkpoints" / "state.json").touch()
    with pytest.raises(CheckpointError) as caught:
        stage(tmp_path, optim={"a": 1, "b": 3}, new=None, lr=2).open()
    message = str(caught.value)
    assert "optim.b: 2 there, 3 now" in message
    assert "lr: 1 there, 2 now" in message
    assert "optim.a" not in message


def test_settings_that_were_cut_out_are_told_of_as_they_are(tmp_path):
    made = stage(tmp_path, builds_on={"distill": "0"})
    made.open()
    made.finish({})
    path = made.folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": {}}))
    with pytest.raises(CheckpointError) as caught:
        made.open()
    assert 'builds_on: null there, {"distill": "0"} now' in str(caught.value)
    assert "lr: null there, 1 now" in str(caught.value)


def test_a_start_that_left_only_records_may_be_made_again_otherwise(tmp_path):
    made = stage(tmp_path)
    made.open()
    (made.folder / "metrics.jsonl").write_text('{"step": 0}')
    other = stage(tmp_path, lr=2)
    assert other.open() is False
    found = read_manifest(made.folder)
    assert found is not None
    assert found["settings"] == {"lr": 2}
    other.finish({})
    with pytest.raises(CheckpointError, match="lr: 2 there, 1 now"):
        made.open()


WHOLE = '"stage": "x", "status": "done", "fingerprint": "0"'


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("\xff", "decode"),
        ("[]", "stage is missing or no text"),
        ("{}", "stage is missing or no text"),
        ('{"stage": "x", "status": 3}', "status is missing or no text"),
        (f"{{{WHOLE}}}", "settings is missing or no section"),
        (f'{{{WHOLE}, "settings": {{}}, "summary": []}}', "summary is missing or no section"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, content, fault):
    (tmp_path / MANIFEST).write_bytes(content.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=rf"manifest\.json cannot be read \(.*{fault}.*put it"
    ):
        read_manifest(tmp_path)


def test_what_a_later_stage_needs(tmp_path):
    made = stage(tmp_path)
    with pytest.raises(CheckpointError, match="medusa1, which has not been run"):
        finished(made.folder, stage="medusa1", needed_by="evaluate")
    made.open()
    with pytest.raises(CheckpointError, match="which is not finished"):
        finished(made.folder, stage="medusa1", needed_by="evaluate")
    made.finish({})
    with pytest.raises(CheckpointError, match="holds a medusa1 stage, expected draft"):
        finished(made.folder, stage="draft", needed_by="evaluate")


def test_fingerprints_follow_content_and_not_order():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_json_is_strict_and_a_failed_write_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["new"]
    assert not (tmp_path / "new").exists()
