from dataclasses import replace

import pytest
import torch
import transformers
from decoding_case import make_llama
from huggingface_hub import constants as hub_constants
from transformers import AutoModelForCausalLM

from medusa_train.config.load import load
from medusa_train.errors import ConfigError, ModelError
from medusa_train.model import source as source_module
from medusa_train.model.backbone import Backbone, load_backbone, quiet_transformers
from medusa_train.model.device import choose_device, choose_dtype
from medusa_train.model.tiny import byte_tokenizer, tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def settings():
    return load("model=tiny", "run_name=test").model


@pytest.fixture
def folder(tmp_path):
    """A tiny model saved as any other."""
    model, tokenizer = tiny_llama(hidden_size=16)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def small(name, **settings):
    """A random model of any family, not yet wrapped."""
    sizes = dict(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    config = getattr(transformers, f"{name}Config")(**sizes | settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).float()


def test_everything_is_frozen_and_in_inference_mode(tiny):
    assert not any(p.requires_grad for p in tiny.model.parameters())
    assert not any(part.training for part in tiny.model.modules())


def test_all_end_ids_are_known():
    model, tokenizer = tiny_llama(hidden_size=16)
    model.generation_config.eos_token_id = [7, 9]
    assert Backbone(model, tokenizer, name="t").end_ids == {7, 9, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = 5
    tokenizer.eos_token = None
    assert Backbone(model, tokenizer, name="t").end_ids == {5}


def test_a_prompt_goes_through_the_template(tiny):
    ids = tiny.encode_prompt("Hi é", None)
    text = "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.tokenizer.decode(ids) == text
    assert ids.count(tiny.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert tiny.decode(ids) == "user\nHi é\nassistant\n"
    with_system = tiny.encode_prompt("Hi é", "Be brief.")
    assert tiny.tokenizer.decode(with_system) == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n{text}"
    )


def test_a_begin_token_in_the_template_is_not_doubled():
    model, tokenizer = tiny_llama(hidden_size=16)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    ids = Backbone(model, tokenizer, name="t").encode_prompt("ab", None)
    assert ids == tokenizer.convert_tokens_to_ids(["<|im_start|>", "a", "b"])


def test_a_missing_template_is_an_error():
    model, tokenizer = tiny_llama(hidden_size=16)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"t: the tokenizer has no chat template.*instruction"):
        Backbone(model, tokenizer, name="t").encode_prompt("Hi", None)


def test_a_template_that_refuses_says_why():
    model, tokenizer = tiny_llama(hidden_size=16)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    )
    backbone = Backbone(model, tokenizer, name="t")
    assert backbone.encode_prompt("Hi", None) == []
    with pytest.raises(ModelError, match="the chat template refuses a prompt: no system turn"):
        backbone.encode_prompt("Hi", "Be brief.")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Granite", {"logits_scaling": 2.0}, "granite are not its LM head"),
        ("Cohere", {}, "cohere are not its LM head"),
        ("Bloom", {"n_layer": 2, "n_head": 4}, "bloom takes no position ids, as with ALiBi"),
        ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "mpt takes no position ids"),
        ("Falcon", {"alibi": True}, "falcon takes no position ids"),
        ("Mamba", {"state_size": 4}, "layers of type mamba keep a state"),
        ("RecurrentGemma", {"num_hidden_layers": 3}, "layers of type recurrent"),
        ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4}, "layers of type hybrid"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type lfm2"),
        ("Rwkv", {}, "layers of type rwkv"),
        ("GPTNeo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "local"),
    ],
)
def test_models_that_cannot_be_served_are_refused(name, settings, message):
    with pytest.raises(ModelError, match=message):
        Backbone(small(name, **settings), byte_tokenizer(), name="t")


def test_falcon_with_rotary_positions_is_served():
    Backbone(small("Falcon", alibi=False), byte_tokenizer(), name="t")


def test_the_random_model(settings):
    backbone = load_backbone(settings)
    assert backbone.name == "random:llama"
    assert backbone.dtype == torch.float32
    assert backbone.device == CPU
    again = load_backbone(replace(settings, dtype="bfloat16"))
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, backbone.lm_head.weight.bfloat16())  # pyright: ignore


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_folder_is_loaded_as_asked(settings, folder, attention):
    backbone = load_backbone(
        replace(settings, name=str(folder), dtype="bfloat16", attention=attention)
    )
    assert backbone.dtype == torch.bfloat16
    assert backbone.model.config._attn_implementation == attention
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(backbone.lm_head.weight, stored.lm_head.weight)  # pyright: ignore


def test_a_folder_that_cannot_be_loaded(settings, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.name=.* cannot be loaded: .*expected a hub name"):
        load_backbone(replace(settings, name=str(folder)))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_backbone(replace(settings, name=str(folder)))


def test_without_a_hub_what_was_downloaded_is_looked_for_and_nothing_else(
    settings, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(source_module, "hub_answers", lambda: False)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelError, match=r"model\.name=org/none cannot be loaded: .*expected a hub"
    ):
        load_backbone(replace(settings, name="org/none"))
    assert [r for r in caplog.records if r.name.startswith("huggingface_hub")] == []


def test_a_file_that_is_no_gguf(settings, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not one")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_backbone(replace(settings, name=str(tmp_path / "m.gguf")))


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="torch sees no CUDA device; use auto or cpu"):
        choose_device("cuda:0")
    with pytest.raises(
        ConfigError, match=r"model\.device=warp: expected auto, cpu, cuda or cuda:N"
    ):
        choose_device("warp")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("cuda") == torch.device("cuda:3")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="torch sees 4 CUDA device"):
        choose_device("cuda:4")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each process takes its own; use auto"):
        choose_device("cuda:1")


def test_dtypes(monkeypatch):
    assert choose_dtype("float16", CPU) == torch.float16
    for has, dtype in [(True, torch.bfloat16), (False, torch.float32)]:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        assert choose_dtype("auto", CPU) == dtype
    for has, dtype in [(True, torch.bfloat16), (False, torch.float16)]:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has: has)
        assert choose_dtype("auto", torch.device("cuda")) == dtype


def test_transformers_is_as_talkative_afterwards_as_before():
    verbosity = transformers.logging.get_verbosity()
    with pytest.raises(KeyError), quiet_transformers():  # noqa: PT012
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
        assert not transformers.logging.is_progress_bar_enabled()
        raise KeyError
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.logging.is_progress_bar_enabled()


def test_a_loaded_model_may_be_saved_again(settings, folder, tmp_path):
    backbone = load_backbone(replace(settings, name=str(folder)))
    backbone.model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again.lm_head.weight, backbone.lm_head.weight)  # pyright: ignore


def test_a_model_without_an_end_has_only_the_tokenizers():
    assert make_llama().end_ids == {256}
