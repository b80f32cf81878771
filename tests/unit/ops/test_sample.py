"""Draws from one known law: 5 tokens with probabilities 0.4, 0.3, 0.15, 0.1, 0.05."""

import pytest
import torch

from medusa_train.ops.sample import draw

LAW = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1])
DRAWS = 40_000


def frequencies(uniform, *, temperature=1.0, top_p=1.0):
    logits = LAW.log().expand(len(uniform), 5)
    ids = draw(logits, uniform, temperature=temperature, top_p=top_p)
    return torch.bincount(ids, minlength=5) / len(ids)


def expected(*, temperature=1.0, kept=5):
    law = LAW ** (1 / temperature) / (LAW ** (1 / temperature)).sum()
    law = torch.where(law >= law.sort(descending=True).values[kept - 1], law, 0.0)
    return law / law.sum()


CASES = [
    ({}, {}),
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"temperature": 2.0}, {"temperature": 2.0}),
    ({"top_p": 0.39}, {"kept": 1}),
    ({"top_p": 0.41}, {"kept": 2}),
    ({"top_p": 0.75}, {"kept": 3}),
    ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "kept": 3}),
    ({"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.5, "kept": 4}),
]


@pytest.mark.parametrize(("settings", "law"), CASES)
def test_evenly_spaced_numbers_give_the_law(settings, law):
    even = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    found = frequencies(even, **settings)
    torch.testing.assert_close(found, expected(**law), rtol=0, atol=2 / DRAWS)


@pytest.mark.parametrize(("settings", "law"), CASES)
def test_random_numbers_give_the_law_within_four_sigma(settings, law):
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(DRAWS, dtype=torch.float64, generator=generator)
    found, right = frequencies(uniform, **settings), expected(**law)
    sigma = (right * (1 - right) / DRAWS).sqrt()
    assert bool(((found - right).abs() <= 4 * sigma + 1e-6).all())


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_no_temperature_is_greedy(temperature):
    uniform = torch.linspace(0, 1 - 1e-9, 50, dtype=torch.float64)
    assert frequencies(uniform, temperature=temperature)[1] == 1


def test_a_small_temperature_stays_finite():
    uniform = torch.linspace(0, 1 - 1e-9, 50, dtype=torch.float64)
    assert frequencies(uniform, temperature=1e-3)[1] == 1


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 30, generator=generator)
    uniform = torch.rand(6, dtype=torch.float64, generator=generator)
    together = draw(logits, uniform, temperature=0.9, top_p=0.95)
    alone = [
        draw(logits[i : i + 1], uniform[i : i + 1], temperature=0.9, top_p=0.95) for i in range(6)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.tolist())) > 1


@pytest.mark.parametrize("seed", range(8))
def test_a_number_just_below_one_draws_no_excluded_id(seed):
    """Such a number is 1 in float32, where the probabilities need not sum to 1 either."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((1, 320), float("-inf"))
    logits[0, :259] = torch.randn(259, generator=generator)
    last = draw(logits, torch.tensor([1 - 1e-12]).double(), temperature=1.0, top_p=1.0)
    assert int(last) < 259


def test_half_precision_logits_are_drawn_from_in_full():
    even = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    logits = LAW.log().bfloat16().expand(DRAWS, 5)
    ids = draw(logits, even, temperature=1.0, top_p=1.0)
    right = torch.softmax(LAW.log().bfloat16().float(), dim=-1)
    torch.testing.assert_close(
        torch.bincount(ids, minlength=5) / DRAWS, right, rtol=0, atol=2 / DRAWS
    )
