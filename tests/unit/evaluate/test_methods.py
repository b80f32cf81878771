"""The methods of a run: which there are, what is known of them, and how much room they need."""

from dataclasses import replace

import pytest
from training_case import make_backbone

from medusa_train.config.load import load
from medusa_train.decode import DraftModel, Lookup, generate
from medusa_train.decode.draft_model import MOST
from medusa_train.evaluate.methods import (
    LOOKUP_GAMMA,
    make_methods,
    most_guesses,
    samplings,
    traits_of_others,
)
from medusa_train.evaluate.results_schema import DraftInfo, HeadsInfo
from medusa_train.model.heads import untrained_heads
from medusa_train.ops.tree import build_tree

ALSO = ("lookup", "draft_adaptive", "medusa_typical")
DEFAULT = ["plain", "medusa", "draft_model/gamma=2", "draft_model/gamma=3"]


@pytest.fixture(scope="module")
def settings():
    return load("+recipe=smoke", "seed=5")


@pytest.fixture(scope="module")
def parts():
    """A backbone, heads, a tree, and the backbone again as its own draft."""
    backbone = make_backbone()
    heads = untrained_heads(backbone.lm_head.weight, num_heads=2).to(backbone.dtype)
    tree = build_tree([[0], [1], [0, 0]], num_heads=2, max_rank=10)
    return backbone, heads, tree, backbone


def asking(settings, *also, **changes):
    return replace(settings, evaluate=replace(settings.evaluate, also=also, **changes))


def test_methods_stand_under_the_names_of_the_settings_behind_the_others(settings, parts):
    assert list(make_methods(asking(settings), *parts)) == DEFAULT
    assert list(make_methods(asking(settings, *ALSO), *parts)) == [*DEFAULT, *ALSO]
    backbone, heads, tree, _ = parts
    no_draft = make_methods(asking(settings, "lookup"), backbone, heads, tree, None)
    assert list(no_draft) == ["plain", "medusa", "lookup"]


def test_all_but_typical_acceptance_say_what_plain_decoding_says(settings, parts):
    methods = make_methods(asking(settings, *ALSO), *parts)
    said = {
        name: generate(method, [1, 5, 9], max_new_tokens=12, end_ids=()).ids
        for name, method in methods.items()
    }
    assert said == dict.fromkeys(said, said["plain"])  # typical acceptance too, with nothing drawn
    assert [name for name, method in methods.items() if method.lossy] == ["medusa_typical"]
    adaptive, lookup = methods["draft_adaptive"], methods["lookup"]
    assert isinstance(adaptive, DraftModel)
    assert isinstance(lookup, Lookup)
    assert (adaptive.adaptive, adaptive.gamma, lookup.gamma) == (True, 2, LOOKUP_GAMMA)


def test_only_typical_acceptance_draws_and_only_if_it_is_measured(settings):
    assert samplings(asking(settings, "lookup", "draft_adaptive")) == {}
    (name, drawn), *rest = samplings(asking(settings, *ALSO, typical_temperature=0.3)).items()
    assert (name, drawn.temperature, drawn.seed, rest) == ("medusa_typical", 0.3, 5, [])


def test_what_is_known_beforehand(settings, parts):
    weights = {"parameters": 1, "training_tokens": 3, "training_seconds": 4.0}
    heads = HeadsInfo(architecture="heads", bytes=20, top1=[], top5=[], **weights)
    draft = DraftInfo(architecture="draft", bytes=30, **weights)
    asked = asking(settings, *ALSO)

    found = traits_of_others(asked, make_methods(asked, *parts), heads=heads, draft=draft)

    assert list(found) == list(ALSO)
    assert {name: each.depth for name, each in found.items()} == {
        "lookup": LOOKUP_GAMMA,
        "draft_adaptive": MOST,
        "medusa_typical": 2,
    }
    assert {name: each.adds.bytes for name, each in found.items()} == {
        "lookup": 0,
        "draft_adaptive": 30,
        "medusa_typical": 20,
    }
    assert [(each.lossy, each.temperature) for each in found.values()] == [
        (False, 0.0),
        (False, 0.0),
        (True, 0.7),
    ]


@pytest.mark.parametrize("gammas", [(2, 3), (12,), (20, 18)])
@pytest.mark.parametrize("also", [(), ("lookup",), ("draft_adaptive",), ("medusa_typical",), ALSO])
def test_the_context_has_room_for_the_longest_step_of_any_method(settings, parts, also, gammas):
    asked = asking(settings, *also, gammas=gammas)
    longest = max(m.longest_block - 1 for m in make_methods(asked, *parts).values())
    assert most_guesses(asked.evaluate, num_heads=2) == longest
