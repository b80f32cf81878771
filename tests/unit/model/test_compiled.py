"""`model.compile`: the same numbers, and one sentence where nothing could be compiled."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from medusa2_case import disturb
from training_case import make_config, make_rows
from transformers.modeling_outputs import BaseModelOutput

from medusa_train.config.load import load
from medusa_train.data.hidden_states import online_source, padded
from medusa_train.errors import ConfigError
from medusa_train.model.backbone import load_backbone
from medusa_train.model.compiled import compile_for_decoding, refuse_compile
from medusa_train.model.student import Student

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cpu", {"TORCHDYNAMO_DISABLE": "1"}, "switched off by TORCHDYNAMO_DISABLE=1: unset it"),
        ("cpu", {"WORLD_SIZE": "2"}, "DeepSpeed runs with torch.compile switched off on a CPU"),
        ("cpu", {"CXX": "no-such-c++"}, r"needs a C\+\+ compiler, but no-such-c\+\+ is not found"),
        ("cuda", {}, "needs triton, which is not installed"),
    ],
)
def test_where_nothing_would_be_compiled_it_is_refused(monkeypatch, device, settings, message):
    for name in ("TORCHDYNAMO_DISABLE", "WORLD_SIZE", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"model\.compile=true.*{message}"):
        refuse_compile(torch.device(device))


def test_it_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ConfigError, match="switched off"):
        load_backbone(replace(make_config().model, name="./nowhere", compile=True))


def test_sharded_weights_are_not_compiled():
    settings = ("model=tiny", "model.compile=true", "stages=[medusa2]")
    load(*settings, "deepspeed=zero2")
    with pytest.raises(ConfigError, match="use deepspeed=zero2 for medusa2, or"):
        load(*settings, "deepspeed=zero3")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)
def test_it_changes_no_number_of_either_training():
    settings = make_config().model
    plain = load_backbone(settings)
    fast = load_backbone(replace(settings, compile=True))
    for rows in (make_rows(3), make_rows(4, seed=1)):
        for ours, theirs in zip(
            *(online_source(b.hidden_states, CPU)(rows) for b in (fast, plain)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ids, attend = padded(make_rows(3), CPU)
    gradients = []
    for backbone in (fast, plain):
        student = Student(backbone, make_config().medusa2.lora, seed=0)
        disturb(student.decoder)
        hidden = student.hidden_states(ids, attend)[attend]
        (hidden * torch.linspace(-1, 1, 64)).sum().backward()
        gradients.append([p.grad for p in student.decoder.parameters() if p.requires_grad])
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


def test_hidden_states_outlast_the_next_forward(monkeypatch):
    """The graphs of a GPU write all their outputs to the same place."""
    place = torch.zeros(2)

    def as_a_graph(decoder, **_):
        def run():
            place.add_(1)
            return BaseModelOutput(last_hidden_state=place)  # pyright: ignore

        return run

    monkeypatch.setattr("medusa_train.model.compiled.torch.compile", as_a_graph)
    forward = compile_for_decoding(torch.nn.Linear(1, 1))
    first, second = forward().last_hidden_state, forward().last_hidden_state
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])
