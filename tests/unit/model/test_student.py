import json
from dataclasses import replace

import pytest
import torch
from medusa2_case import disturb, logits_of, make_objective, make_settings
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training_case import (
    make_backbone,
    make_rows,
)

from medusa_train.config.load import load
from medusa_train.errors import ConfigError, ModelError
from medusa_train.model.backbone import Backbone, load_backbone
from medusa_train.model.student import Student

PARTS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]


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


def test_an_adapter_that_is_damaged_or_another_one_is_refused(tmp_path):
    objective = make_objective()
    objective.student.save_adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    other = Student(make_backbone(), replace(make_settings().lora, rank=2), seed=0)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read .* again"):
        other.load_adapter(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=r"is another LoRA: .*lora_A.* is on one side only"):
        objective.student.load_adapter(tmp_path)
    path.write_bytes(b"no")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        objective.student.load_adapter(tmp_path)


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


def test_a_capped_model_is_refused_by_name():
    backbone = make_backbone()
    backbone.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match=r"tiny caps its logits.*leave medusa2 out"):
        Student(backbone, None, seed=0)
