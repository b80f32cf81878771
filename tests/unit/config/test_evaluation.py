"""Which methods are measured, and what is refused of that."""

from dataclasses import asdict, replace

import pytest
from omegaconf import OmegaConf

from medusa_train.config.load import check, load
from medusa_train.errors import ConfigError


@pytest.fixture(scope="module")
def whole():
    """The defaults with a tiny model."""
    return load("model=tiny", "heads=reduced")


def test_what_needs_no_weights_is_measured_unless_it_is_left_out(whole):
    assert whole.evaluate.also == ("lookup",)
    assert whole.evaluate.typical_temperature == 0.7


@pytest.mark.parametrize("also", [(), ("lookup",), ("medusa_typical", "draft_adaptive", "lookup")])
def test_any_of_them_can_be_asked_for_in_any_order(whole, also):
    given = asdict(replace(whole, evaluate=replace(whole.evaluate, also=also)))
    assert check(OmegaConf.create(given)).evaluate.also == also


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"also": ["lookup", "lookup"]}, "also must name each method once"),
        ({"also": ["beam"]}, "evaluate.also"),
        ({"also": "lookup"}, "evaluate.also"),
        ({"typical_temperature": 0.0}, "typical_temperature must be from 0.01 to 10"),
        ({"typical_temperature": 11.0}, "typical_temperature must be from 0.01 to 10"),
    ],
)
def test_names_and_temperatures_that_mean_nothing_are_refused(whole, changes, says):
    given = asdict(whole)
    given["evaluate"] |= changes
    with pytest.raises(ConfigError) as refused:
        check(OmegaConf.create(given))
    assert says in str(refused.value)
    assert str(refused.value).startswith("1 setting(s)")
