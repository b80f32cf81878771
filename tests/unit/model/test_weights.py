import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_case import CPU, make_backbone, make_heads

from medusa_train.errors import ModelError
from medusa_train.model.weights import CONFIG, WEIGHTS, load_heads, save_heads


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


@pytest.fixture
def saved(backbone, tmp_path):
    """A folder of trained-looking own heads."""
    heads = make_heads(backbone, num_heads=2, num_layers=2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path / "heads", heads, base_model="tiny")
    return tmp_path / "heads", heads


def load(folder, backbone):
    return load_heads(folder, dtype=torch.float32, device=CPU, backbone=backbone)


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def change_config(folder, change):
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))


def test_the_names_are_the_official_ones(saved):
    folder, _ = saved
    expected = {f"{k}.{i}.linear.{w}" for k in (0, 1) for i in (0, 1) for w in ("weight", "bias")}
    assert load_file(folder / WEIGHTS).keys() == expected | {"0.2.weight", "1.2.weight"}
    assert not list(folder.parent.glob("*.part"))


def test_no_other_key_can_be_taken_for_the_number_of_heads(saved):
    config = json.loads((saved[0] / CONFIG).read_text())
    counts = {k for k in config if "num" in k and ("heads" in k or "layers" in k)}
    assert counts == {"medusa_num_heads", "medusa_num_layers"}
    assert config["medusa_fc_bias"] is True
    assert "architectures" not in config


@pytest.mark.parametrize(
    ("lm_head", "token_map"),
    [("own", None), ("shared", None), ("reduced", torch.tensor([1, 7, 300]))],
)
def test_what_is_loaded_is_what_was_saved(backbone, tmp_path, lm_head, token_map):
    heads = make_heads(backbone, lm_head=lm_head, token_map=token_map)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path / "h", heads, base_model="tiny")
    loaded = load(tmp_path / "h", backbone)
    assert loaded.shape == heads.shape
    expected = heads.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[n]) for n, t in loaded.state_dict().items())
    assert not any(p.requires_grad for p in loaded.parameters())


def test_loading_casts_weights_and_not_ids(backbone, tmp_path):
    heads = make_heads(backbone, lm_head="reduced", token_map=torch.tensor([1, 7, 300]))
    save_heads(tmp_path / "h", heads, base_model="tiny")
    loaded = load_heads(tmp_path / "h", dtype=torch.bfloat16, device=CPU, backbone=backbone)
    assert loaded[0].lm_head is not None
    assert loaded[0].lm_head.dtype == torch.bfloat16
    assert loaded.token_map is not None
    assert loaded.token_map.tolist() == [1, 7, 300]


def nan(tensors):
    tensors["1.0.linear.bias"][3] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.2.weight"), r"lacks 1\.2\.weight; expected 10 tensors"),
        (lambda t: t.update(x=torch.zeros(1)), "has unknown x"),
        (
            lambda t: t.update({"0.2.weight": torch.zeros(3, 16)}),
            r"\[3, 16\], expected \[320, 16\]",
        ),
        (nan, r"1\.0\.linear\.bias has values that are not finite"),
    ],
)
def test_wrong_tensors_are_refused(saved, backbone, change, message):
    change_tensors(saved[0], change)
    with pytest.raises(ModelError, match=message):
        load(saved[0], backbone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(medusa_num_heads=3), r"lacks 2\.0\.linear\.bias"),
        (
            lambda c: c.update(hidden_size=32),
            "hidden_size=32 do not fit a backbone of hidden_size=16",
        ),
        (lambda c: c.pop("vocab_size"), "no key 'vocab_size'"),
        (lambda c: c.update(medusa_train=3), "not a config of heads"),
        (lambda c: c["medusa_train"].update(version=9), "version 9, expected 1"),
        (lambda c: c["medusa_train"].update(lm_head="tied"), "lm_head='tied', expected own"),
    ],
)
def test_a_wrong_config_is_refused(saved, backbone, change, message):
    change_config(saved[0], change)
    with pytest.raises(ModelError, match=message):
        load(saved[0], backbone)


def test_heads_of_another_backbone_are_refused(saved):
    with pytest.raises(ModelError, match="vocab_size=320 do not fit a backbone of vocab_size=400"):
        load(saved[0], make_backbone(vocab_size=400))


def test_a_token_map_out_of_order_is_refused(backbone, tmp_path):
    heads = make_heads(backbone, lm_head="reduced", token_map=torch.tensor([1, 7, 300]))
    save_heads(tmp_path / "h", heads, base_model="tiny")
    change_tensors(tmp_path / "h", lambda t: t.update(token_map=torch.tensor([7, 1, 300])))
    with pytest.raises(ModelError, match="token_map must be ascending"):
        load(tmp_path / "h", backbone)


def test_a_missing_or_cut_file_is_named(saved, backbone, tmp_path):
    with pytest.raises(ModelError, match="no heads in"):
        load(tmp_path / "elsewhere", backbone)
    content = (saved[0] / WEIGHTS).read_bytes()
    (saved[0] / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load(saved[0], backbone)


def test_weights_that_are_not_finite_are_never_put_in_place(backbone, tmp_path):
    heads = make_heads(backbone)
    heads[0].lm_head.data[0, 0] = float("inf")  # pyright: ignore
    with pytest.raises(ModelError, match="not finite"):
        save_heads(tmp_path / "h", heads, base_model="tiny")
    assert not (tmp_path / "h").exists()
