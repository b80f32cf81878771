import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_case import CPU, make_backbone, make_config
from transformers import AutoModelForCausalLM

from medusa_train.errors import ConfigError, ModelError
from medusa_train.model.backbone import Backbone
from medusa_train.model.draft import (
    REDUCED_HEAD,
    cut_draft,
    load_draft,
    load_existing,
    save_draft,
)
from medusa_train.model.tiny import tiny_llama
from medusa_train.ops.loss import IGNORE


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


IDS = torch.tensor([[5, 9, 200, 31]])
ATTEND = torch.ones_like(IDS, dtype=torch.bool)


def trained(backbone, token_map=None):
    """A cut draft whose weights have moved."""
    draft = cut_draft(backbone, 1, token_map, device=CPU)
    torch.manual_seed(1)
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return draft


def test_all_layers_make_the_target_again(backbone):
    draft = cut_draft(backbone, 2, None, device=CPU)
    hidden = draft.decoder(input_ids=IDS, use_cache=False).last_hidden_state
    expected = backbone.model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(draft.lm_head(hidden), expected)


def test_a_cut_shares_no_memory_and_freezes_only_the_embeddings(backbone):
    draft = cut_draft(backbone, 1, None, device=CPU)
    theirs = {p.data_ptr() for p in backbone.model.parameters()}
    assert not theirs & {p.data_ptr() for p in draft.parameters()}
    frozen = [name for name, p in draft.named_parameters() if not p.requires_grad]
    assert frozen == ["decoder.embed_tokens.weight"]
    assert draft.decoder.config.num_hidden_layers == 1
    assert backbone.decoder.config.num_hidden_layers == 2


def test_lists_with_one_entry_a_layer_are_cut_too():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    )
    qwen = Backbone(Qwen3ForCausalLM(config).float(), tiny_llama()[1], name="qwen")
    draft = cut_draft(qwen, 3, None, device=CPU)
    assert len(draft.decoder.config.layer_types) == 3
    assert len(qwen.decoder.config.layer_types) == 4


def test_more_layers_than_the_target_has(backbone):
    with pytest.raises(ConfigError, match=r"draft\.num_layers=3, but tiny has 2 layers"):
        cut_draft(backbone, 3, None, device=CPU)


def test_a_whole_vocabulary_is_saved_as_an_ordinary_model(backbone, tmp_path):
    draft = trained(backbone)
    save_draft(tmp_path / "d", draft, tokenizer=backbone.tokenizer)
    expected = draft.lm_head(draft.decoder(input_ids=IDS, use_cache=False).last_hidden_state)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "d", dtype=torch.float32)
    torch.testing.assert_close(plain(input_ids=IDS).logits, expected)
    loaded = load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)
    assert loaded.valid_ids == len(backbone.tokenizer) < 320
    found = loaded.logits(loaded.hidden_states(IDS, ATTEND))
    assert torch.equal(found[..., : loaded.valid_ids], expected[..., : loaded.valid_ids])
    assert found[..., loaded.valid_ids :].isneginf().all()


def test_a_tied_target_gives_an_untied_draft(tmp_path):
    tied = make_backbone(tie_word_embeddings=True)
    draft = trained(tied)
    save_draft(tmp_path / "d", draft, tokenizer=tied.tokenizer)
    loaded = load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)
    assert torch.equal(loaded.lm_head.weight, draft.lm_head.weight)  # pyright: ignore
    embeddings = loaded.decoder.get_input_embeddings().weight
    assert torch.equal(embeddings, tied.decoder.get_input_embeddings().weight)


def test_a_reduced_vocabulary_speaks_target_ids(backbone, tmp_path):
    token_map = torch.tensor([3, 31, 200, 258])
    draft = trained(backbone, token_map)
    assert draft.to_draft_ids(torch.tensor([200, 4, 300, IGNORE])).tolist() == [2, *[IGNORE] * 3]
    save_draft(tmp_path / "d", draft, tokenizer=backbone.tokenizer)
    loaded = load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)
    hidden = loaded.hidden_states(IDS, ATTEND)
    expected = draft.lm_head(draft.decoder(input_ids=IDS, use_cache=False).last_hidden_state)
    assert torch.equal(loaded.logits(hidden), expected)
    assert torch.equal(loaded.best(hidden), token_map[expected.argmax(-1)])


def test_dtype_is_as_asked(backbone, tmp_path):
    save_draft(tmp_path / "d", trained(backbone), tokenizer=backbone.tokenizer)
    loaded = load_draft(tmp_path / "d", dtype=torch.bfloat16, device=CPU)
    assert loaded.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in loaded.decoder.parameters())


def test_folders_that_are_no_draft_model(backbone, tmp_path):
    with pytest.raises(ModelError, match="run the stage draft"):
        load_draft(tmp_path, dtype=torch.float32, device=CPU)
    save_draft(tmp_path / "d", trained(backbone), tokenizer=backbone.tokenizer)
    path = tmp_path / "d" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing_keys: model\.norm\.weight"):
        load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)
    path.write_bytes(b"cut off")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)


def test_a_damaged_reduced_head(backbone, tmp_path):
    save_draft(tmp_path / "d", trained(backbone, torch.arange(4)), tokenizer=backbone.tokenizer)
    path = tmp_path / "d" / REDUCED_HEAD
    save_file({"weight": torch.zeros(5, 16), "token_map": torch.arange(4)}, path)
    with pytest.raises(ModelError, match=r"weight is \[5, 16\], expected \[4, 16\]"):
        load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)
    path.write_bytes(b"cut off")
    with pytest.raises(ModelError, match="cannot be read"):
        load_draft(tmp_path / "d", dtype=torch.float32, device=CPU)


def test_nothing_is_put_in_place_that_is_not_finite(backbone, tmp_path):
    draft = trained(backbone)
    draft.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        save_draft(tmp_path / "d", draft, tokenizer=backbone.tokenizer)
    assert not (tmp_path / "d").exists()


def test_an_existing_model_of_the_same_tokenizer(backbone, tmp_path):
    model, tokenizer = tiny_llama(hidden_size=8, num_layers=1, vocab_size=400)
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    settings = replace(make_config().model, dtype="float32")
    draft = load_existing(str(tmp_path / "small"), backbone, settings)
    assert draft.hidden_size == 8
    assert draft.valid_ids == len(backbone.tokenizer)


def test_another_tokenizer_is_refused_with_the_id(backbone, tmp_path):
    model, tokenizer = tiny_llama(hidden_size=8, num_layers=1)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"id 40 is '{second}' there, expected '{first}'"):
        load_existing(str(tmp_path / "other"), backbone, make_config().model)
