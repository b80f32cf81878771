import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_case import (
    ALONE,
    CPU,
    make_backbone,
    make_config,
    make_rows,
    make_stage,
    write_rows,
)

from medusa_train.data.rows import part_path, write_part
from medusa_train.errors import ConfigError, DataError, TrainingError
from medusa_train.model.draft import load_draft
from medusa_train.model.tiny import tiny_llama
from medusa_train.model.weights import load_heads
from medusa_train.train import run
from medusa_train.train.draft import train_draft
from medusa_train.train.medusa1 import Medusa1Objective, train_medusa1


@pytest.fixture
def backbone():
    return make_backbone()


@pytest.fixture
def distill(tmp_path):
    return write_rows(tmp_path / "distill")


KEYS = {"steps", "tokens", "seconds", "parameters", "bytes", "coverage", "loss", "top1", "top5"}


@pytest.mark.parametrize(
    "heads",
    [
        ("heads.lm_head=own", "heads.vocab_size=null"),
        ("heads.lm_head=shared", "heads.vocab_size=null"),
        ("heads.lm_head=reduced", "heads.vocab_size=50"),
    ],
)
def test_heads_are_trained_and_saved(tmp_path, distill, backbone, heads):
    stage = make_stage(tmp_path)
    summary = train_medusa1(make_config(*heads), stage, distill, backbone, ALONE)
    assert summary.keys() == KEYS | {"tokens_per_step"}
    json.dumps(summary, allow_nan=False)
    loaded = load_heads(stage.folder / "heads", dtype=torch.float32, device=CPU, backbone=backbone)
    trained = sum(p.numel() for p in loaded.parameters())
    assert summary["parameters"] == trained
    assert summary["bytes"] > 4 * trained
    assert (summary["coverage"] < 1) == ("reduced" in heads[0])
    assert len(summary["top1"]) == len(summary["loss"]) == 3
    assert loaded[0].layers[0].linear.weight.abs().sum() > 0  # pyright: ignore
    assert (stage.folder / "provenance.json").exists()
    steps = [json.loads(line)["step"] for line in (stage.folder / "metrics.jsonl").open()]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] == 4


def test_heads_of_a_tied_backbone_are_copies(tmp_path, distill):
    """Training them leaves the one matrix that is embeddings and LM head alike as it was."""
    backbone = make_backbone(tie_word_embeddings=True)
    table = backbone.model.get_input_embeddings().weight
    assert table is backbone.lm_head.weight
    before, stage = table.detach().clone(), make_stage(tmp_path)
    config = make_config("medusa1.optim.max_steps=2")  # one evaluation: the last is the best
    train_medusa1(config, stage, distill, backbone, ALONE)
    assert torch.equal(table, before)
    loaded = load_heads(stage.folder / "heads", dtype=torch.float32, device=CPU, backbone=backbone)
    [*_, last] = sorted((stage.folder / "checkpoints").glob("step-*"))
    weights = load_file(last / "weights.safetensors")
    for k, head in enumerate(loaded):
        trained = weights[f"heads.heads.{k}.lm_head"]
        assert not torch.equal(trained, before)
        assert torch.equal(head.lm_head, trained)


@pytest.mark.parametrize("size", ["null", "50"])
def test_a_draft_is_trained_and_saved(tmp_path, distill, backbone, size):
    stage = make_stage(tmp_path, "draft")
    config = make_config(f"draft.vocab_size={size}")
    summary = train_draft(config, stage, distill, backbone, ALONE)
    assert summary.keys() == KEYS
    loaded = load_draft(stage.folder / "model", dtype=torch.float32, device=CPU)
    assert loaded.decoder.config.num_hidden_layers == 1
    moved = loaded.decoder.state_dict()["layers.0.mlp.up_proj.weight"]
    original = backbone.decoder.state_dict()
    assert not torch.equal(moved, original["layers.0.mlp.up_proj.weight"])
    embeddings = loaded.decoder.get_input_embeddings().weight
    assert torch.equal(embeddings, original["embed_tokens.weight"])


def test_an_existing_draft_model_is_only_checked(tmp_path, distill, backbone):
    model, tokenizer = tiny_llama(hidden_size=8, num_layers=1)
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    stage = make_stage(tmp_path, "draft")
    config = make_config(f"draft.model={tmp_path / 'small'}")
    summary = train_draft(config, stage, distill, backbone, ALONE)
    assert summary["tokens"] == summary["seconds"] == summary["steps"] == 0
    assert summary["model"] == str(tmp_path / "small")
    assert summary.keys() > KEYS
    assert [p.name for p in stage.folder.iterdir()] == ["manifest.json"]


def test_too_many_draft_layers(tmp_path, distill, backbone):
    config, stage = make_config("draft.num_layers=3"), make_stage(tmp_path, "draft")
    with pytest.raises(ConfigError, match=r"draft\.num_layers=3"):
        train_draft(config, stage, distill, backbone, ALONE)


def test_rows_are_needed(tmp_path, backbone):
    with pytest.raises(DataError, match="no rows in"):
        train_medusa1(make_config(), make_stage(tmp_path), tmp_path, backbone, ALONE)


@pytest.mark.parametrize(("split", "odd"), [("train", 320), ("calibration", -1)])
def test_ids_that_the_model_does_not_know_are_refused(tmp_path, distill, backbone, split, odd):
    rows = make_rows(3)
    rows[1].ids[5] = odd
    write_part(part_path(distill / split, 1), rows, None)
    with pytest.raises(
        DataError, match=rf"row row1 in .*part-00001.* ids has {odd} at token 5, .* 0 to 319"
    ):
        train_medusa1(make_config(), make_stage(tmp_path), distill, backbone, ALONE)


def test_rows_beyond_the_context_are_left_out_and_without_any_there_is_no_training(
    tmp_path, distill, backbone, caplog
):
    lengths = sorted(len(row.ids) for row in make_rows(8))
    backbone.config.max_position_embeddings = lengths[5]
    summary = train_medusa1(make_config(), make_stage(tmp_path), distill, backbone, ALONE)
    assert "2 of 8 rows are left out (2 longer than" in caplog.text
    assert summary["steps"] == 2  # one of four rows in each of two epochs
    backbone.config.max_position_embeddings = 5
    with pytest.raises(DataError, match=r"no row of .*train can be used \(8 longer than the model"):
        train_medusa1(make_config(), make_stage(tmp_path / "b"), distill, backbone, ALONE)


def test_a_backbone_that_changes_is_noticed(tmp_path, distill, backbone, monkeypatch):
    class Careless(run.Fit):
        def run(self):
            backbone.model.model.layers[1].mlp.up_proj.weight.data[3, 2] += 1e-3
            return super().run()

    monkeypatch.setattr(run, "Fit", Careless)
    with pytest.raises(TrainingError, match="backbone changed"):
        train_medusa1(make_config(), make_stage(tmp_path), distill, backbone, ALONE)


def test_trained_weights_without_a_place_are_refused():
    with pytest.raises(TrainingError, match="not those of the result: bias is on one side"):
        run.take(torch.nn.Linear(1, 1), {"heads.x": torch.zeros(1)}, prefix="heads.")


def test_sinks_are_closed_when_training_fails(tmp_path, distill, backbone, monkeypatch):
    closed = []
    opened = run.open_sinks

    def open_sinks(*args, **kwargs):
        sink = opened(*args, **kwargs)
        close = sink.close
        sink.close = lambda: (closed.append(1), close())
        return sink

    monkeypatch.setattr(run, "open_sinks", open_sinks)
    config = make_config()
    optim = replace(config.medusa1.optim, lr=1e38, schedule="constant", weight_decay=1e38)
    config = replace(config, medusa1=replace(config.medusa1, optim=optim))
    with pytest.raises(TrainingError, match=r"not finite|norm of the gradient"):
        train_medusa1(config, make_stage(tmp_path), distill, backbone, ALONE)
    assert closed == [1]


@pytest.mark.parametrize(("scores", "best"), [([0.0, 5.0, 1.0], 2), ([0.0, 1.0, 5.0], 4)])
def test_the_best_checkpoint_is_the_result(tmp_path, distill, backbone, monkeypatch, scores, best):
    left = iter(scores)  # at steps 0, 2 and 4
    monkeypatch.setattr(Medusa1Objective, "score", lambda self, measured: next(left))
    stage = make_stage(tmp_path)
    summary = train_medusa1(make_config(), stage, distill, backbone, ALONE)
    lines = [json.loads(line) for line in (stage.folder / "metrics.jsonl").open()]
    (evaluated,) = (line for line in lines if line["step"] == best and "eval/loss" in line)
    assert summary["loss"] == [evaluated[f"eval/head{k}/loss"] for k in range(3)]
    assert (summary["steps"], summary["tokens_per_step"]) == (4, [5.0])
    weights = load_file(stage.folder / "checkpoints" / f"step-00000{best}" / "weights.safetensors")
    loaded = load_heads(stage.folder / "heads", dtype=torch.float32, device=CPU, backbone=backbone)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[f"heads.{name}"]), name
