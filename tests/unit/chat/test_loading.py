import json
import shutil
from pathlib import Path

import pytest
from chat_case import knowing_heads, make_speaker, save_run

from medusa_train.chat.finding import find_heads
from medusa_train.chat.loading import backbone_settings, choose_method, choose_tree
from medusa_train.decode import Lookup, Medusa, Plain
from medusa_train.errors import CheckpointError, ConfigError, ModelError

DEFAULTS = {"model": None, "dtype": None, "device": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with heads of medusa1. Do not change."""
    return save_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy of one's own."""
    return shutil.copytree(saved, tmp_path / "run")


def add_medusa2(run: Path, *, merged: bool, manifest: bool = True) -> Path:
    """What the stage medusa2 leaves beside medusa1."""
    stage = run / "medusa2"
    shutil.copytree(run / "medusa1", stage)
    if merged:
        (stage / "model").mkdir()
    if manifest:
        write_manifest(stage, {})
    return stage


def write_manifest(stage: Path, model: dict) -> None:
    text = {"stage": stage.name, "status": "done", "fingerprint": "", "summary": {}}
    (stage / "manifest.json").write_text(json.dumps({**text, "settings": {"model": model}}))


def test_heads_are_found_from_their_run_stage_or_own_folder(run):
    heads = run / "medusa1" / "heads"

    assert [find_heads(place) for place in (run, run / "medusa1", heads)] == [heads] * 3


def test_of_a_run_with_both_those_of_medusa2_are_taken(run):
    stage = add_medusa2(run, merged=True)

    assert find_heads(run) == stage / "heads"
    assert find_heads(run / "medusa1") == run / "medusa1" / "heads"


def test_heads_are_found_from_within_their_folder(run, monkeypatch):
    monkeypatch.chdir(run / "medusa1" / "heads")

    assert find_heads(Path()) == run / "medusa1" / "heads"


def test_a_folder_without_heads_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no heads in .*; expected a folder with medusa_lm_head"):
        find_heads(tmp_path)


def test_a_folder_that_is_missing_is_told_with_those_that_have_heads(run, tmp_path):
    (tmp_path / "empty").mkdir()
    here = rf"These have heads: {run}$"

    with pytest.raises(ModelError, match=rf"there is no folder {tmp_path}/typo; .*{here}"):
        find_heads(tmp_path / "typo")
    with pytest.raises(ModelError, match=rf"no heads in {tmp_path}/empty; .*{here}"):
        find_heads(tmp_path / "empty")
    with pytest.raises(ModelError, match=rf"no heads in {tmp_path}; .*{here}"):
        find_heads(tmp_path)
    with pytest.raises(ModelError, match=r"has finished one$"):
        find_heads(tmp_path / "typo" / "run")


def test_the_backbone_is_the_one_that_the_heads_name(saved):
    settings = backbone_settings(find_heads(saved), **DEFAULTS)

    assert settings.name == str(saved.parent / "model")
    assert (settings.dtype, settings.device, settings.quantization) == ("auto", "auto", None)


def test_it_is_loaded_as_it_was_for_training_unless_another_is_named(run):
    made = {"revision": "abc", "dtype": "float32", "quantization": "nf4", "attention": "eager"}
    write_manifest(run / "medusa1", {"name": "org/base", "trust_remote_code": True, **made})
    heads = find_heads(run)

    found = backbone_settings(heads, **DEFAULTS)
    assert {key: getattr(found, key) for key in made} == made
    assert not found.trust_remote_code  # a folder from elsewhere must not run code
    found = backbone_settings(heads, model="org/other", dtype="float16", device="cpu")
    assert (found.name, found.revision, found.quantization) == ("org/other", None, None)
    assert (found.dtype, found.device) == ("float16", "cpu")


def test_a_setting_that_was_edited_badly_is_named(run):
    write_manifest(run / "medusa1", {"dtype": "float31"})

    with pytest.raises(ConfigError, match=r"model\.dtype: .*float31"):
        backbone_settings(find_heads(run), **DEFAULTS)


def test_heads_of_medusa2_come_with_the_merged_backbone_wherever_the_run_lies_now(run):
    stage = add_medusa2(run, merged=True)

    assert backbone_settings(find_heads(run), **DEFAULTS).name == str(stage / "model")


def test_heads_of_medusa2_are_not_put_on_another_backbone_unasked(run):
    heads = add_medusa2(run, merged=False) / "heads"

    with pytest.raises(CheckpointError, match=r"medusa2\.merge=true"):
        backbone_settings(heads, **DEFAULTS)
    assert backbone_settings(heads, **{**DEFAULTS, "model": "org/merged"}).name == "org/merged"


@pytest.mark.parametrize("config", ["{", "[]", "{}"])
def test_heads_that_name_no_model_want_one(config, run):
    heads = find_heads(run)
    (heads / "config.json").write_text(config)

    with pytest.raises(ModelError, match=r"names no base model.*--model"):
        backbone_settings(heads, **DEFAULTS)


def tree_of(folder: Path, given: Path | None = None):
    backbone = make_speaker()
    heads = knowing_heads(backbone.lm_head.weight.detach())
    return choose_tree(heads, backbone, folder, given)


def test_the_tree_is_that_of_the_same_run_or_a_given_one_or_a_chain(run):
    heads = find_heads(run)
    tree, said = tree_of(heads)
    assert tree.paths == ((0,), (0, 0), (0, 0, 0))
    assert "a chain" in said
    assert "--tree" in said

    measured = run / "evaluate" / "tree.json"
    measured.parent.mkdir()
    measured.write_text('{"paths": [[0], [1]]}')
    tree, said = tree_of(heads)
    assert tree.paths == ((0,), (1,))
    assert said == f"a tree of 2 nodes from {measured}"

    given = run / "mine.json"
    given.write_text('{"paths": [[0]]}')
    assert tree_of(heads, given)[0].paths == ((0,),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("{", "holds no tree"),
        ("[]", "holds no tree for these heads; expected"),
        ('{"paths": 3}', "holds no tree for these heads; expected"),
        ('{"paths": [3]}', "holds no tree for these heads; expected"),
        ('{"paths": [[0, 0]]}', r"lacks its parent"),
        ('{"paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}', "4 deep, there are 3 heads"),
        ('{"paths": [[0], [259]]}', "rank outside 0 ... 258"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(text, told, tmp_path):
    given = tmp_path / "tree.json"
    if text is not None:
        given.write_text(text)

    with pytest.raises(ConfigError, match=told):
        tree_of(tmp_path, given)


def test_methods_by_name(saved):
    backbone, heads = make_speaker(), find_heads(saved)
    found = {
        name: choose_method(name, backbone, heads, None) for name in ("medusa", "plain", "lookup")
    }

    assert [type(guesser.method) for guesser in found.values()] == [Medusa, Plain, Lookup]
    assert [guesser.name for guesser in found.values()] == ["the heads", None, "prompt lookup"]
    assert str(heads) in found["medusa"].described
