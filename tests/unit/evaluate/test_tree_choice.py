import logging

import pytest

from medusa_train.evaluate.results_schema import TreeSize
from medusa_train.evaluate.tree_choice import fastest


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
