"""The command from end to end on a tiny model: what it leaves, what it repeats, what it refuses."""

import json

import pytest
import torch
from command_case import losses, manifest, run_here
from safetensors.torch import load_file

from medusa_train import actions
from medusa_train.evaluate.results import read_results
from medusa_train.model.backbone import Backbone

SMOKE = "+recipe=smoke"
STAGES = ("distill", "medusa1", "draft", "evaluate")
FILES = (
    "medusa_train.rank0.log",
    ".hydra/rank0/config.yaml",
    "distill/train/part-00000.parquet",
    "distill/calibration/part-00000.parquet",
    "medusa1/heads/medusa_lm_head.safetensors",
    "medusa1/heads/config.json",
    "medusa1/metrics.jsonl",
    "medusa1/provenance.json",
    "draft/model/model.safetensors",
    "draft/model/config.json",
    "draft/metrics.jsonl",
    "evaluate/results.json",
    "evaluate/report.md",
    "evaluate/speedup.png",
    "evaluate/acceptance.png",
    "evaluate/tree.json",
    "evaluate/answers.json",
)

slow = pytest.mark.slow


@slow
def test_one_command_leaves_every_result(smoke_run):
    folder, done = smoke_run
    run = folder / "outputs" / "smoke"

    assert done.status == 0
    assert [name for name in FILES if not (run / name).is_file()] == []
    assert {manifest(run / stage)["status"] for stage in STAGES} == {"done"}
    assert str(run / "evaluate" / "report.md") in done.err
    assert list(run.rglob("*.part")) == []
    assert {p.name for p in folder.iterdir()} == {"outputs"}


@slow
def test_results_have_the_keys_that_others_read(smoke_run):
    folder = smoke_run[0] / "outputs" / "smoke" / "evaluate"
    found = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)

    for name in ("plain", "draft_model", "medusa"):
        method = found["methods"][name]
        assert method["tokens_per_step"] >= 1
        assert method["overhead"] > 0
        low, high = method["speedup_ci95"]
        assert low <= method["speedup"] <= high
        assert method["tokens"] > 0
        assert method["seconds"] > 0
    assert found["methods"]["plain"]["speedup"] == 1
    assert found["methods"]["medusa"]["tree_nodes"] in (1, 4, 8)
    assert len(found["heads"]["top1"]) == len(found["heads"]["top5"]) == 3
    assert 0 <= found["draft"]["acceptance_rate"] <= 1
    assert read_results(folder / "results.json").version == 3


@slow
def test_greedy_answers_of_all_methods_are_the_same(smoke_run):
    path = smoke_run[0] / "outputs" / "smoke" / "evaluate" / "answers.json"
    answers = json.loads(path.read_text())

    assert len(answers["plain"]) == 4
    drafts = {"draft_model/gamma=2", "draft_model/gamma=3"}
    assert set(answers) == {"plain", "medusa", "lookup", *drafts}
    assert all(found == answers["plain"] for found in answers.values())


@slow
def test_training_lowers_the_loss_and_logs_at_its_intervals(smoke_run):
    for stage in ("medusa1", "draft"):
        path = smoke_run[0] / "outputs" / "smoke" / stage / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        trained = losses(path.parent)

        assert [step for step, _ in trained] == [2, 4, 6, 8]
        assert trained[-1][1]["train/loss"] < trained[0][1]["train/loss"]
        assert [line["step"] for line in lines if "eval/loss" in line] == [0, 4, 8]


@slow
def test_the_same_command_again_loads_no_model(finished, monkeypatch):
    monkeypatch.delattr(actions, "load_backbone")
    before = {p: p.stat().st_mtime_ns for p in (finished / "outputs/smoke/medusa1").rglob("*")}

    done = run_here(finished, SMOKE)

    assert done.status == 0
    assert [f"{stage}: finished already" in done.err for stage in STAGES] == [True] * 4
    assert before == {p: p.stat().st_mtime_ns for p in before}


@slow
def test_one_stage_alone_can_be_repeated(finished):
    folder = finished / "outputs" / "smoke" / "evaluate"
    (folder / "manifest.json").unlink()
    (folder / "results.json").unlink()

    done = run_here(finished, SMOKE, "stages=[evaluate]")

    assert done.status == 0
    assert read_results(folder / "results.json").methods.medusa is not None


@slow
def test_a_changed_setting_is_refused_by_name_and_changes_nothing(finished):
    run = finished / "outputs" / "smoke"
    before = {
        p: p.read_bytes() for stage in STAGES for p in (run / stage).rglob("*") if p.is_file()
    }

    done = run_here(finished, SMOKE, "medusa1.optim.lr=0.1")

    assert done.status == 1
    assert "medusa1.optim.lr: 0.003 there, 0.1 now" in done.err
    assert before == {p: p.read_bytes() for p in before}


@slow
def test_saved_drafts_and_heads_open_in_other_tools(smoke_run):
    run = smoke_run[0] / "outputs" / "smoke"
    heads = load_file(run / "medusa1" / "heads" / "medusa_lm_head.safetensors")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    draft = AutoModelForCausalLM.from_pretrained(run / "draft" / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "draft" / "model")

    assert draft.config.num_hidden_layers == 1
    assert Backbone(draft, tokenizer, name="draft").encode_prompt("hello", None)
    assert {"0.0.linear.weight", "0.0.linear.bias", "0.1.weight", "token_map"} <= set(heads)
    assert all(
        bool(torch.isfinite(tensor).all())
        for tensor in heads.values()
        if tensor.is_floating_point()
    )
