"""Draws from one known law: 5 tokens with probabilities 0.4, 0.3, 0.15, 0.1, 0.05."""

import pytest
import torch

from medusa_train.ops.sample import (
    EXTREME,
    GREEDY_BELOW,
    Sampling,
    best_ids,
    draw,
    penalise,
    probabilities,
)

LAW = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1])
DRAWS = 40_000


def frequencies(uniform, **settings):
    law = probabilities(LAW.log(), Sampling(**{"temperature": 1.0, **settings}))
    ids = draw(law.expand(len(uniform), 5), uniform)
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
    ({"top_k": 1}, {"kept": 1}),
    ({"top_k": 3}, {"kept": 3}),
    ({"top_k": 9}, {"kept": 5}),
    ({"min_p": 0.2}, {"kept": 4}),
    ({"min_p": 0.26}, {"kept": 3}),
    ({"min_p": 0.99}, {"kept": 1}),
    ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, {"kept": 3}),
    ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "kept": 3}),
    ({"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.5, "kept": 4}),
    # of the two best alone the share of the first is 0.57, so that the second goes
    ({"top_k": 2, "top_p": 0.5}, {"kept": 1}),
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


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.99e-4])
def test_no_temperature_is_greedy(temperature):
    assert Sampling(temperature=temperature, top_k=3, top_p=0.5).greedy
    law = probabilities(LAW.log(), Sampling(temperature=temperature, top_k=3, top_p=0.5))
    assert law.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-3])
def test_a_small_temperature_stays_finite(temperature):
    assert not Sampling(temperature=temperature).greedy
    logits = torch.tensor([90.0, 100.0, -100.0, float("-inf")])
    law = probabilities(logits, Sampling(temperature=temperature))
    assert law.tolist() == [0, 1, 0, 0]


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 30, generator=generator)
    uniform = torch.rand(6, dtype=torch.float64, generator=generator)
    sampling = Sampling(temperature=0.9, top_p=0.95)
    together = draw(probabilities(logits, sampling), uniform)
    alone = [draw(probabilities(logits[i], sampling), uniform[i]) for i in range(6)]
    assert torch.equal(together, torch.stack(alone))
    assert len(set(together.tolist())) > 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("number", [0.0, 1e-300, 1 - 2**-53])
def test_no_number_draws_an_excluded_id(seed, number):
    """One just below 1 is 1 in float32, where the probabilities need not sum to 1 either."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((1, 320), float("-inf"))
    logits[0, 20:259] = torch.randn(239, generator=generator)
    law = probabilities(logits, Sampling(temperature=1.0))
    found = int(draw(law, torch.tensor([number], dtype=torch.float64)))
    assert found == (258 if number > 0.5 else 20)


def test_weights_need_not_sum_to_one():
    even = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    ids = draw(torch.tensor([0.0, 3e-3, 0.0, 1e-3]).expand(1000, 4), even)
    assert torch.bincount(ids, minlength=4).tolist() == [0, 750, 0, 250]


def test_no_weight_at_all_still_gives_an_id_that_exists():
    """As of a draft all of whose ids are held back; nobody takes it."""
    assert draw(torch.zeros(2, 4), torch.tensor([0.0, 1 - 2**-53]).double()).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_from_in_full(dtype):
    even = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    law = probabilities(LAW.log().to(dtype), Sampling(temperature=1.0))
    assert law.dtype == torch.float32
    torch.testing.assert_close(law, LAW.log().to(dtype).double().softmax(-1).float())
    ids = draw(law.expand(DRAWS, 5), even)
    torch.testing.assert_close(torch.bincount(ids, minlength=5) / DRAWS, law, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_spread_over_thirty_nats(dtype):
    """The least likely of them still has its share, and what is cut off has none at all."""
    logits = torch.linspace(-20, 10, 16).to(dtype)
    exact = logits.double().softmax(-1)
    law = probabilities(logits, Sampling(temperature=1.0))
    torch.testing.assert_close(law.double(), exact, rtol=1e-5, atol=0)
    assert law.min() > 1e-14
    cut = probabilities(logits, Sampling(temperature=1.0, top_p=0.9))
    uniform = torch.linspace(0, 1 - 2**-53, 5000, dtype=torch.float64)
    drawn = draw(cut.expand(5000, 16), uniform)
    assert set(drawn.tolist()) == set(cut.nonzero().flatten().tolist()) == {14, 15}


def test_ties_at_the_borders():
    """As in transformers, equals of the last one of top-k stay; the nucleus is the smallest set."""
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0])
    two = probabilities(logits, Sampling(temperature=1.0, top_k=2))
    assert (two > 0).tolist() == [False, True, True, True]
    assert (probabilities(logits.zero_(), Sampling(temperature=1, top_p=0.5)) > 0).sum() == 2


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = torch.tensor([[2.0, -2.0, 1.0, float("-inf")]])
    seen = torch.tensor([[True, True, False, True]])
    assert penalise(logits, seen, 2.0).tolist() == [[1, -4, 1, float("-inf")]]
    assert penalise(logits, seen, 0.5).tolist() == [[4, -1, 1, float("-inf")]]


@pytest.mark.parametrize("size", [128, 384, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_is_the_first_of_equals(size, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (40, 3, size), generator=generator).to(dtype)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(best_ids(logits), first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"temperature must be from 0 to 1e\+06, got -1.0"),
        ({"temperature": 1e7}, "temperature must be from 0"),
        ({"temperature": float("inf")}, "temperature must be from 0"),
        ({"temperature": float("nan")}, "temperature must be from 0"),
        ({"top_k": -1}, r"top_k must be 0 \(off\) or more, a whole number, got -1"),
        ({"top_p": 0.0}, "top_p must be more than 0, at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": 1.0}, r"min_p must be 0 \(off\) or more, below 1, got 1.0"),
        ({"min_p": -0.1}, "min_p must be"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be from 1e-06 to 1e\+06, got 0.0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be"),
        ({"repetition_penalty": 1e40}, "repetition_penalty must be"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"min_new_tokens": -1}, "min_new_tokens must be 0 or more, a whole number, got -1"),
        ({"seed": 2**64}, "seed must be a whole number of 64 bits"),
        ({"seed": 1.5}, "seed must be"),
        ({"banned_ids": (3, -1)}, r"banned_ids must be token ids, got \(3, -1\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("penalty", [1 / EXTREME, EXTREME])
@pytest.mark.parametrize("temperature", [GREEDY_BELOW, EXTREME])
def test_extreme_settings_still_make_a_law(penalty, temperature):
    logits = penalise(
        torch.tensor([[400.0, -400.0, 0.0, float("-inf")]]),
        torch.tensor([[True, True, False, True]]),
        penalty,
    )
    law = probabilities(logits, Sampling(temperature=temperature))
    assert law.isfinite().all()
    assert law.sum().item() == pytest.approx(1)
    assert law[0, 3] == 0
