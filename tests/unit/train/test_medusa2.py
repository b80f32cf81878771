import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from training_case import (
    ALONE,
    make_backbone,
    make_config,
    make_stage,
    write_rows,
)

from medusa_train.config.load import load
from medusa_train.errors import ConfigError, DataError
from medusa_train.model.backbone import load_backbone
from medusa_train.model.weights import load_heads
from medusa_train.track.manifest import Trained
from medusa_train.train.joint import Medusa2Objective
from medusa_train.train.medusa1 import train_medusa1
from medusa_train.train.medusa2 import merge_adapter, train_medusa2

CPU = torch.device("cpu")
# What every evaluation of a run with three heads says
FIGURES = {"eval/loss", "eval/tokens_per_step", "eval/kl", "eval/agreement", "eval/base/loss"}
FIGURES |= {f"eval/head{k}/{name}" for k in range(3) for name in ("loss", "top1", "top5")}


def medusa1_then_2(tmp_path, *overrides):
    config = make_config("heads.lm_head=reduced", "heads.vocab_size=200", *overrides)
    rows, backbone = write_rows(tmp_path / "distill"), make_backbone()
    first = train_medusa1(config, make_stage(tmp_path), rows, backbone, ALONE)
    start = Trained(stage="medusa1", folder=tmp_path / "medusa1/heads", summary=first)
    stage = make_stage(tmp_path, "medusa2")
    return first, train_medusa2(config, stage, rows, start, make_backbone(), ALONE)


def test_it_goes_on_from_medusa1_and_leaves_a_backbone_its_heads_fit(tmp_path):
    first, second = medusa1_then_2(tmp_path)
    before = first["loss"]
    after = [float(x) for x in _first_line(tmp_path / "medusa2/metrics.jsonl")]
    assert after == pytest.approx(before, rel=1e-5)
    assert second["tokens_before"] == first["tokens"]
    [*_, checkpoint] = sorted((tmp_path / "medusa2/checkpoints").glob("step-*"))
    with safe_open(checkpoint / "optimizer.safetensors", "pt") as stored:
        assert float(stored.metadata()["updates"]) == second["steps"]  # its own alone
    assert second["backbone"]["kl"] > 0
    assert second["backbone"]["perplexity"] != second["backbone"]["perplexity_before"]
    config = load("model=hub", f"model.name={tmp_path / 'medusa2/model'}", "model.dtype=float32")
    merged = load_backbone(config.model)
    heads = load_heads(tmp_path / "medusa2/heads", dtype=torch.float32, device=CPU, backbone=merged)
    assert len(heads) == 3
    assert (tmp_path / "medusa2/adapter/adapter_model.safetensors").exists()


def test_the_best_of_a_lora_run_is_the_result(tmp_path, monkeypatch):
    left = iter([0.0, 5.0, 1.0])  # at steps 0, 2 and 4
    monkeypatch.setattr(Medusa2Objective, "score", lambda self, measured: next(left))
    config, stage = make_config("medusa2.start=fresh"), make_stage(tmp_path, "medusa2")
    rows = write_rows(tmp_path / "distill")
    summary = train_medusa2(config, stage, rows, None, make_backbone(), ALONE)
    lines = list(map(json.loads, (stage.folder / "metrics.jsonl").read_text().splitlines()))
    found = {line["step"]: line for line in lines if "eval/loss" in line}
    assert list(found) == [0, 2, 4]
    assert all(line.keys() >= FIGURES and "nonfinite" not in line for line in found.values())
    assert summary["loss"][0] == found[2]["eval/base/loss"]
    best = load_file(stage.folder / "checkpoints/step-000002/weights.safetensors")
    adapter = load_file(stage.folder / "adapter/adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj.lora_B"
    kept = best["student.decoder" + name.removeprefix("model") + ".default.weight"]
    assert kept.abs().sum() > 0
    assert torch.equal(adapter[f"base_model.model.{name}.weight"], kept)
    heads = load_heads(
        stage.folder / "heads", dtype=torch.float32, device=CPU, backbone=make_backbone()
    )
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, best[f"heads.{name}"]), name


@pytest.mark.parametrize("tied", [False, True])
def test_merging_later_gives_bit_for_bit_what_merging_at_once_does(tmp_path, tied):
    made = {}
    for merge in ("true", "false"):
        config = make_config("medusa2.start=fresh", f"medusa2.merge={merge}")
        stage, rows = make_stage(tmp_path / merge, "medusa2"), write_rows(tmp_path / "distill")
        backbone = make_backbone(tie_word_embeddings=tied)
        summary = train_medusa2(config, stage, rows, None, backbone, ALONE)
        if merge == "false":
            assert summary["merged_dtype"] is None
            assert not (stage.folder / "model").exists()
            again = make_backbone(tie_word_embeddings=tied)
            assert merge_adapter(config, stage, again) == {"merged_dtype": "float32"}
        made[merge] = load_file(stage.folder / "model" / "model.safetensors")
        heads = json.loads((stage.folder / "heads" / "config.json").read_text())
        assert heads["base_model_name_or_path"] == str(stage.folder / "model")
    assert made["true"].keys() == made["false"].keys()
    assert all(torch.equal(made["false"][name], made["true"][name]) for name in made["true"])
    original = make_backbone().model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(made["true"]["model.layers.0.mlp.up_proj.weight"], original)


def test_without_held_out_rows_there_could_be_no_best_and_no_training(tmp_path):
    rows, stage = write_rows(tmp_path / "distill"), make_stage(tmp_path, "medusa2")
    shutil.rmtree(rows / "calibration")
    config = make_config("medusa2.start=fresh")
    with pytest.raises(DataError, match=r"no rows in .*calibration"):
        train_medusa2(config, stage, rows, None, make_backbone(), ALONE)
    assert [path.name for path in stage.folder.iterdir()] == ["manifest.json"]


def _first_line(path):
    line = json.loads(path.read_text().splitlines()[0])
    return [line[f"eval/head{k}/loss"] for k in range(3)]


def test_other_heads_than_configured_are_refused_by_name(tmp_path):
    config = make_config()
    rows, backbone = write_rows(tmp_path / "distill"), make_backbone()
    train_medusa1(config, make_stage(tmp_path), rows, backbone, ALONE)
    start = Trained(
        stage="medusa1", folder=tmp_path / "medusa1/heads", summary={"tokens": 1, "seconds": 1.0}
    )
    other = make_config("heads.num_heads=2")
    with pytest.raises(ConfigError, match=r"num_heads=3, but heads\.num_heads=2"):
        train_medusa2(other, make_stage(tmp_path, "medusa2"), rows, start, backbone, ALONE)


def test_fewer_ids_than_asked_for_are_refused_and_all_there_are_are_not(tmp_path):
    config = make_config("heads.lm_head=reduced", "heads.vocab_size=50")
    rows, backbone = write_rows(tmp_path / "distill"), make_backbone()
    train_medusa1(config, make_stage(tmp_path), rows, backbone, ALONE)
    start = Trained(
        stage="medusa1", folder=tmp_path / "medusa1/heads", summary={"tokens": 1, "seconds": 1.0}
    )
    other = make_config("heads.lm_head=reduced", "heads.vocab_size=200")
    stage = make_stage(tmp_path, "medusa2")
    with pytest.raises(ConfigError, match=r"vocab_size=50, but heads\.vocab_size=200"):
        train_medusa2(other, stage, rows, start, make_backbone(), ALONE)
    whole = make_config("heads.lm_head=reduced", "heads.vocab_size=9999")
    train_medusa1(whole, make_stage(tmp_path / "all"), rows, backbone, ALONE)
    start = replace(start, folder=tmp_path / "all/medusa1/heads")
    train_medusa2(whole, make_stage(tmp_path / "all", "medusa2"), rows, start, backbone, ALONE)


def test_in_one_stage_from_fresh_heads(tmp_path):
    config = make_config("medusa2.start=fresh", "medusa2.heads_ramp=sine")
    rows = write_rows(tmp_path / "distill")
    stage = make_stage(tmp_path, "medusa2")
    summary = train_medusa2(config, stage, rows, None, make_backbone(), ALONE)
    assert summary["tokens_before"] == 0
    lines = map(json.loads, (stage.folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/head0/loss"] for line in lines if "train/head0/loss" in line]
    assert losses[-1] < losses[0]
