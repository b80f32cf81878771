import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from decoding_case import make_family
from medusa2_case import disturb, make_objective, make_settings
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F
from training_case import (
    ALONE,
    make_backbone,
    make_config,
    make_heads,
    make_rows,
    make_stage,
    write_rows,
)

from medusa_train.config.load import load
from medusa_train.errors import ConfigError, ModelError
from medusa_train.model.backbone import Backbone, load_backbone
from medusa_train.model.student import Student
from medusa_train.model.weights import load_heads
from medusa_train.ops.loss import IGNORE
from medusa_train.track.manifest import Trained
from medusa_train.train.engine import TorchEngine, build_engine
from medusa_train.train.joint import Medusa2Objective
from medusa_train.train.medusa1 import train_medusa1
from medusa_train.train.medusa2 import train_medusa2

CPU = torch.device("cpu")
PARTS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]


def gather(module):
    return nullcontext()


def logits_of(model, rows):
    return [model(input_ids=torch.tensor([row.ids])).logits[0].detach() for row in rows]


def test_before_any_update_it_is_the_original_model():
    objective, rows = make_objective(), make_rows(5)
    measured = objective.measure(objective.batch(rows), gather)
    kl, count = measured.others["kl"]
    assert abs(kl) < 1e-4 * count
    fresh = make_backbone()
    for row, ranks in zip(rows, measured.ranks, strict=True):
        assert ranks.shape[1] == len(row.ids) - 1 - row.answer_start
    hits = sum(
        int(logits[t].argmax()) == row.ids[t + 1]
        for row, logits in zip(rows, logits_of(fresh.model, rows), strict=True)
        for t in range(row.answer_start - 1, len(row.ids) - 1)
    )
    assert measured.others["agreement"] == (hits, count)


def test_the_loss_of_self_distillation_starts_at_zero():
    objective, rows = make_objective(), make_rows(4)
    losses = objective(objective.batch(rows))
    assert abs(losses[0].item()) < 1e-3
    assert (losses[1:] > 1).all()


def test_the_teacher_does_not_move_while_the_student_does():
    backbone, rows = make_backbone(), make_rows(4)
    expected = logits_of(backbone.model, rows)
    objective = make_objective(backbone)
    engine = TorchEngine(objective, make_config().medusa2.optim)
    names = {n for n, p in objective.named_parameters() if p.requires_grad}
    scales = [w / 100 for w in objective.weights(1)]
    for _ in range(20):
        engine.accumulate(objective.batch(rows), scales)
        engine.step()
    assert {n for n, p in objective.named_parameters() if p.requires_grad} == names
    wrapped = objective.student._peft[0]
    moved = logits_of(wrapped, rows)
    assert max((a - b).abs().max() for a, b in zip(moved, expected, strict=True)) > 1e-2
    with wrapped.disable_adapter():
        again = logits_of(wrapped, rows)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_the_teacher_is_the_original_again_in_another_process(tmp_path):
    """As far as that goes in one: a fresh model, and the adapter folder alone."""
    rows, objective = make_rows(3), make_objective()
    disturb(objective)
    objective.student.save_adapter(tmp_path)
    again = PeftModel.from_pretrained(make_backbone().model, str(tmp_path))
    with again.disable_adapter():
        off = logits_of(again, rows)
    original = logits_of(make_backbone().model, rows)
    assert all(torch.equal(a, b) for a, b in zip(off, original, strict=True))


def test_labels_are_shifted_once():
    """A model that always knows the next token has a base loss of zero."""
    objective = make_objective(base_loss="cross_entropy")
    rows = make_rows(3)
    batch = objective.batch(rows)
    expected = [
        row.ids[t + 1]
        for row in rows
        for t in range(row.states_start, len(row.ids) - 1)
        if any(row.mask[t + 1 : t + 5])
    ]
    knows = torch.zeros(len(expected), objective.student.lm_head.out_features)
    knows[torch.arange(len(expected)), torch.tensor(expected)] = 50.0
    objective.student.lm_head.forward = lambda hidden, targets, **_: F.cross_entropy(
        knows, targets, ignore_index=IGNORE, reduction="sum"
    )
    base = next(objective.losses(objective.trunk(batch), batch))
    assert base.item() == pytest.approx(0, abs=1e-6)


def test_an_answer_of_one_token_teaches_the_base_and_breaks_no_head():
    row = replace(make_rows(1)[0], ids=[5, 6, 7], mask=[False, False, True])
    objective = make_objective()
    batch = objective.batch([row])
    assert objective.target_counts([row]).tolist() == [1, 1, 0, 0]
    losses = objective(batch)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert losses[2:].tolist() == [0, 0]
    trained = [p for p in objective.parameters() if p.requires_grad]
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in trained)


def test_positions_that_do_not_count_change_nothing():
    """Whatever the original model says there: neither losses nor gradients move."""
    row = make_rows(1)[0]
    row = replace(row, mask=[t in (6, 7, 8) for t in range(len(row.ids))])
    found = []
    for noise in (0.0, 5.0):
        objective = make_objective(soft_targets=True)
        disturb(objective)
        batch = objective.batch([row])
        read = torch.cat([batch.teachers[0][batch.base_targets != IGNORE]])
        heads = [batch.teachers[1 + k][t != IGNORE] for k, t in enumerate(batch.targets)]
        others = torch.ones(len(batch.states), dtype=torch.bool)
        others[torch.cat([read, *heads])] = False
        assert others.any()
        batch.states[others] += noise
        losses = objective(batch)
        losses.sum().backward()
        grads = [p.grad for p in objective.parameters() if p.requires_grad]
        found.append([losses.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("changes", [{}, {"backbone": "full"}])
def test_checkpointing_changes_no_gradient(changes):
    rows, found = make_rows(3), []
    for checkpointing in (False, True):
        objective = make_objective(gradient_checkpointing=checkpointing, **changes)
        disturb(objective)
        engine = TorchEngine(objective, make_config().medusa2.optim)
        engine.accumulate(objective.batch(rows), list(objective.weights(1)))
        found.append([p.grad.clone() for p in objective.parameters() if p.requires_grad])
    assert sum(g.abs().sum() for g in found[0]) > 0
    for plain, checked in zip(*found, strict=True):
        torch.testing.assert_close(plain, checked, rtol=1e-5, atol=1e-6)


def test_merging_in_bfloat16_rounds_once_and_twice_is_the_same(tmp_path):
    backbone = make_backbone()
    exact = {n: p.clone() for n, p in backbone.model.named_parameters()}
    backbone.model.to(torch.bfloat16)
    low = Backbone(backbone.model, backbone.tokenizer, name="tiny")
    objective = make_objective(low)
    disturb(objective)
    name = "model.layers.1.mlp.up_proj"
    layer = objective.student._model[0].get_submodule(name)
    wanted = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    state = objective.student.merged_state()
    assert state[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(state[f"{name}.weight"], wanted.bfloat16())
    assert set(state) >= set(exact)
    for folder in ("once", "twice"):
        objective.student.save_merged(tmp_path / folder, backbone.tokenizer)
    once, twice = (load_file(tmp_path / f / "model.safetensors") for f in ("once", "twice"))
    assert all(torch.equal(once[key], twice[key]) for key in twice)
    assert json.loads((tmp_path / "once/config.json").read_text())["dtype"] == "bfloat16"


def test_a_merge_that_is_not_finite_is_refused(tmp_path):
    backbone = make_backbone()
    objective = make_objective(backbone)
    with torch.no_grad():
        next(p for n, p in objective.named_parameters() if "lora_B" in n).fill_(torch.inf)
    with pytest.raises(ModelError, match="is not finite after the LoRA was added in"):
        objective.student.save_merged(tmp_path / "model", backbone.tokenizer)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backbone_kind", ["lora", "full"])
def test_the_merged_model_says_what_the_student_says(tmp_path, tied, backbone_kind):
    rows, backbone = make_rows(3), make_backbone(tie_word_embeddings=tied)
    objective = make_objective(backbone, backbone=backbone_kind)
    disturb(objective)
    student = objective.student
    expected = logits_of((student._peft or student._model)[0], rows)
    student.save_merged(tmp_path / "model", backbone.tokenizer)
    config = load("model=hub", f"model.name={tmp_path / 'model'}", "model.dtype=float32")
    merged = load_backbone(config.model)
    for a, b in zip(logits_of(merged.model, rows), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert (merged.lm_head.weight is merged.model.get_input_embeddings().weight) == (
        tied and backbone_kind == "full"
    )


def test_the_adapter_folder_is_what_peft_reads(tmp_path):
    rows, objective = make_rows(3), make_objective()
    disturb(objective)
    expected = logits_of(objective.student._peft[0], rows)
    objective.student.save_adapter(tmp_path)
    again = PeftModel.from_pretrained(make_backbone().model, str(tmp_path))
    for a, b in zip(logits_of(again, rows), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({}, {0, 1, "lm_head"}), ({"lm_head": False}, {0, 1}), ({"last_layers": 1}, {1, "lm_head"})],
)
def test_every_linear_layer_that_is_asked_for_has_a_lora(changes, layers):
    student = Student(make_backbone(), replace(make_settings().lora, **changes), seed=0)
    trained = {n.split(".lora_")[0] for n, p in student.named_parameters() if p.requires_grad}
    expected = {f"decoder.layers.{i}.{part}" for i in layers - {"lm_head"} for part in PARTS}
    assert trained == expected | ({"lm_head.layer"} if "lm_head" in layers else set())


def test_more_layers_than_there_are_are_refused():
    lora = replace(make_settings().lora, last_layers=3)
    with pytest.raises(ConfigError, match=r"last_layers=3, but tiny has 2 layers"):
        Student(make_backbone(), lora, seed=0)


def test_what_is_trained_is_said(caplog):
    objective, config = make_objective(), make_config()
    with caplog.at_level("INFO", logger="medusa_train"):
        build_engine(objective, config.medusa2.optim, config.deepspeed, world=ALONE, device=CPU)
    count = sum(p.numel() for p in objective.student.parameters() if p.requires_grad)
    assert f"training backbone: 30 tensors, {count:,} parameters, learning rate x 1" in caplog.text
    assert "training heads: 9 tensors" in caplog.text
    assert "learning rate x 4" in caplog.text


def test_a_capped_model_is_refused_by_name():
    backbone = make_backbone()
    backbone.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match=r"tiny caps its logits.*leave medusa2 out"):
        Student(backbone, None, seed=0)


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
    lines = map(json.loads, (stage.folder / "metrics.jsonl").read_text().splitlines())
    (evaluated,) = (line for line in lines if line["step"] == 2 and "eval/loss" in line)
    assert summary["loss"][0] == evaluated["eval/base/loss"]
    best = load_file(stage.folder / "checkpoints/step-000002/weights.safetensors")
    adapter = load_file(stage.folder / "adapter/adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj.lora_B"
    kept = best["student.decoder" + name.removeprefix("model") + ".default.weight"]
    assert kept.abs().sum() > 0
    assert torch.equal(adapter[f"base_model.model.{name}.weight"], kept)


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


def test_the_models_own_dropout_is_off_and_that_of_the_lora_is_not():
    """GPT-2 is shipped with dropout; self-distillation must still start at zero."""
    backbone = make_family("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    rows = make_rows(3)
    still = make_objective(backbone)(make_objective(backbone).batch(rows))
    assert abs(still[0].item()) < 1e-3
    settings = replace(make_settings().lora, dropout=0.5)
    moving = make_objective(make_family("gpt2"), lora=settings)
    disturb(moving)
    batch = moving.batch(rows)
    assert not torch.equal(moving(batch), moving(batch))


def test_in_one_stage_from_fresh_heads(tmp_path):
    config = make_config("medusa2.start=fresh", "medusa2.heads_ramp=sine")
    rows = write_rows(tmp_path / "distill")
    stage = make_stage(tmp_path, "medusa2")
    summary = train_medusa2(config, stage, rows, None, make_backbone(), ALONE)
    assert summary["tokens_before"] == 0
    lines = map(json.loads, (stage.folder / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/head0/loss"] for line in lines if "train/head0/loss" in line]
    assert losses[-1] < losses[0]


def test_heads_learn_faster_than_the_backbone():
    backbone = make_backbone()
    objective = make_objective(backbone, heads=make_heads(backbone), heads_lr_factor=4.0)
    factors = {group.name: group.lr_factor for group in objective.groups()}
    assert factors == {"backbone": 1.0, "heads": 4.0}
    grouped = {id(p) for group in objective.groups() for p in group.parameters}
    assert grouped == {id(p) for p in objective.parameters() if p.requires_grad}
