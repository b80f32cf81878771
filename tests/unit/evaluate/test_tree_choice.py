import logging
from pathlib import Path

import pytest
import torch
from training_case import make_backbone, make_config, make_heads, make_rows

from medusa_train.errors import ConfigError
from medusa_train.evaluate import tree_choice
from medusa_train.evaluate.results_schema import TreeSize
from medusa_train.evaluate.tree_choice import choose_tree, fastest
from medusa_train.track.manifest import Trained


def curve(*points):
    return [
        TreeSize(nodes=n, tokens_per_step=tokens, step_ms=1.0, speedup=speedup)
        for n, tokens, speedup in points
    ]


SIZES = curve((1, 1.3, 1.1), (8, 1.7, 1.4), (16, 1.85, 1.3), (32, 1.95, 1.0))


@pytest.mark.parametrize(("at_least", "nodes"), [(None, 8), (1.0, 8), (1.8, 16), (1.9, 32)])
def test_the_fastest_of_those_with_enough_tokens_per_step(at_least, nodes):
    assert SIZES[fastest(SIZES, at_least=at_least)].nodes == nodes


def test_where_none_has_enough_the_one_with_the_most_is_taken_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert SIZES[fastest(SIZES, at_least=3.0)].nodes == 32
    assert "min_tokens_per_step=3.0; the best promises 1.95" in caplog.text


TRAINED = Trained(stage="medusa1", folder=Path(), summary={"tokens": 1, "seconds": 1.0})


def tree_for(heads, backbone, *overrides):
    """The paths that are chosen for heads, with little work."""
    given = ("medusa1.hidden_states=online", "evaluate.latency_repeats=5", *overrides)
    return choose_tree(make_config(*given), backbone, heads, TRAINED, make_rows(2))[1].paths


def test_no_head_is_asked_for_padding_of_the_lm_head(monkeypatch):
    backbone = make_backbone()  # 259 ids and 61 rows of padding
    asked = []
    real = tree_choice.rank_rows

    def watch(*given, guesses):
        asked.append(guesses)
        return real(*given, guesses=guesses)

    monkeypatch.setattr(tree_choice, "rank_rows", watch)
    heads = make_heads(backbone)
    tree_for(heads, backbone, "evaluate.max_rank=500", "evaluate.tree_sizes=[2]")
    assert asked == [259]
    assert tree_for(heads, backbone, "evaluate.tree=[[0],[258]]") == ((0,), (258,))
    with pytest.raises(ConfigError, match=r"evaluate\.tree: .*outside 0 \.\.\. 258"):
        tree_for(heads, backbone, "evaluate.tree=[[0],[259]]")


def test_heads_of_a_reduced_vocabulary_have_no_padding():
    backbone = make_backbone()
    heads = make_heads(backbone, lm_head="reduced", token_map=torch.arange(40))
    assert tree_for(heads, backbone, "evaluate.tree=[[0],[39]]") == ((0,), (39,))
    with pytest.raises(ConfigError, match=r"outside 0 \.\.\. 39"):
        tree_for(heads, backbone, "evaluate.tree=[[0],[40]]")
