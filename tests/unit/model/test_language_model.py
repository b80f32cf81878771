import copy
from types import SimpleNamespace

import pytest
import torch
from decoding_case import FAMILIES, make_family, make_llama, random_ids
from torch import nn

from medusa_train.errors import ModelError
from medusa_train.model.compat import cache_argument
from medusa_train.model.language_model import LanguageModel, check_head


def wrapped(model, **settings):
    return LanguageModel(model.get_decoder(), model.get_output_embeddings(), **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own(family):
    backbone = make_family(family)
    ids = torch.tensor([random_ids(12)])
    with torch.no_grad():
        hidden = backbone.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))
        expected = backbone.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(backbone.logits(hidden), expected)
    assert torch.equal(backbone.best(hidden), expected.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_padded_rows_are_those_of_each_alone(family):
    backbone = make_family(family)
    rows = [random_ids(length, seed=length) for length in (3, 17, 10)]
    ids, attend = torch.zeros(3, 17, dtype=torch.long), torch.zeros(3, 17, dtype=torch.bool)
    for b, row in enumerate(rows):
        ids[b, : len(row)], attend[b, : len(row)] = torch.tensor(row), True
    with torch.no_grad():
        together = backbone.hidden_states(ids, attend)
        for b, row in enumerate(rows):
            alone = torch.tensor([row])
            expected = backbone.hidden_states(alone, torch.ones_like(alone, dtype=torch.bool))
            found = together[b, : len(row)]
            torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)


def test_padding_rows_get_minus_infinity(tiny):
    hidden = torch.randn(2, 3, tiny.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = tiny.logits(hidden)
        assert torch.equal(logits[..., :259], tiny.lm_head(hidden)[..., :259])
    assert logits[..., 259:].isneginf().all()
    assert tiny.vocab_size == 320
    assert tiny.valid_ids == 259


@pytest.mark.parametrize(("given", "valid"), [(None, 320), (100, 100), (320, 320), (999, 320)])
def test_valid_ids_never_exceed_the_lm_head(tiny, given, valid):
    assert wrapped(tiny.model, valid_ids=given).valid_ids == valid


def test_a_token_map_gives_target_ids(tiny):
    head = nn.Linear(tiny.hidden_size, 3, bias=False)
    token_map = torch.tensor([4, 200, 300])
    small = LanguageModel(tiny.decoder, head, valid_ids=2, token_map=token_map)
    hidden = torch.randn(20, tiny.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(small.best(hidden), token_map[head(hidden).argmax(-1)])
    assert small.valid_ids == 3  # the map already says which ids there are


def test_the_context_is_that_of_the_configuration(tiny):
    assert tiny.max_positions == 2048
    assert make_llama(max_position_embeddings=100).max_positions == 100


def test_a_model_with_unlike_logits_is_refused():
    model = make_llama().model
    other = LanguageModel(model.get_decoder(), nn.Linear(32, 320, bias=False))
    with pytest.raises(ModelError, match="made up: the logits of model type llama are not its LM"):
        check_head(model, other, "made up")


def test_either_name_of_the_cache_argument():
    old = type("Old", (nn.Module,), {"forward": lambda self, past_key_values: None})
    new = type("New", (nn.Module,), {"forward": lambda self, cache: None})
    assert cache_argument(old) == "past_key_values"
    assert cache_argument(new) == "cache"


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_is_handed_over_under_the_models_name_for_it(tiny, name):
    given = {}

    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = copy.deepcopy(tiny.decoder.config)

        def forward(self, past_key_values=None, **rest):
            given["past_key_values"] = past_key_values
            return SimpleNamespace(last_hidden_state=torch.zeros(1))

    class New(Old):
        def forward(self, cache=None, **rest):
            given["cache"] = cache
            return SimpleNamespace(last_hidden_state=torch.zeros(1))

    decoder = Old() if name == "past_key_values" else New()
    model = LanguageModel(decoder, tiny.lm_head)  # pyright: ignore
    ids = torch.zeros(1, 1, dtype=torch.long)
    model.forward(ids, positions=ids, mask=None, cache="the cache")
    assert given == {name: "the cache"}
