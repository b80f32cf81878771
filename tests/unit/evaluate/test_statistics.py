import numpy as np
import pytest

from medusa_train.decode.generation import Generation
from medusa_train.evaluate import statistics
from medusa_train.evaluate.statistics import Measurement


def measured(name, ids, accepted, prefill, decode, kind="k"):
    generation = Generation(
        ids=list(ids),
        finish_reason="stop",
        accepted=accepted,
        prefill_seconds=prefill,
        decode_seconds=decode,
    )
    return Measurement(prompt_id=name, kind=kind, generation=generation)


def timed(tokens, seconds):
    return [
        measured(str(i), range(n), [0] * (n - 1), 0.0, s)
        for i, (n, s) in enumerate(zip(tokens, seconds, strict=True))
    ]


PLAIN = timed([10, 30], [1.0, 2.0])
# 3 + 2 + 1 steps; the last block of "1" emitted 4 tokens though the answer kept fewer.
MEDUSA = [
    measured("0", range(10), [2, 0, 3], 0.1, 0.4),
    measured("1", range(30), [1, 1, 3], 0.1, 1.4),
]


def test_speedup_pools_tokens_and_seconds_and_counts_the_prefill():
    assert statistics.tokens_per_second(MEDUSA) == pytest.approx(40 / 2.0)
    # (40 / 2) / (40 / 3); the mean of the two ratios would be (2 + 4/3) / 2.
    assert statistics.speedup(MEDUSA, PLAIN) == pytest.approx(1.5)


def test_steps_are_averaged_over_all_steps_with_raw_emitted_tokens():
    assert statistics.tokens_per_step(MEDUSA) == pytest.approx(16 / 6)
    assert statistics.tokens_per_step(PLAIN) == 1.0
    assert statistics.step_seconds(MEDUSA) == pytest.approx(1.8 / 6)


def test_acceptance_by_depth_is_the_share_of_steps_that_get_at_least_so_far():
    # accepted: 2 0 3 1 1 3
    found = statistics.acceptance_by_depth(MEDUSA, depth=4)
    assert found == pytest.approx([5 / 6, 3 / 6, 2 / 6, 0])
    assert 1 + sum(found) == pytest.approx(statistics.tokens_per_step(MEDUSA))


def test_draft_acceptance_counts_the_refused_draft_but_none_behind_it():
    # accepted 10; tested at gamma 3: 3 1 3 2 2 3 = 14, at gamma 4: 3 1 4 2 2 4 = 16
    assert statistics.draft_acceptance_rate(MEDUSA, gamma=3) == pytest.approx(10 / 14)
    assert statistics.draft_acceptance_rate(MEDUSA, gamma=4) == pytest.approx(10 / 16)


def test_more_accepted_than_drafted_is_a_fault():
    with pytest.raises(ValueError, match="accepted 3 drafts"):
        statistics.acceptance_by_depth(MEDUSA, depth=2)
    with pytest.raises(ValueError, match="accepted 3 drafts"):
        statistics.draft_acceptance_rate(MEDUSA, gamma=2)


def test_answers_of_one_token_have_no_steps():
    only = [measured("0", [7], [], 0.1, 0.0)]
    assert statistics.tokens_per_step(only) is None
    assert statistics.step_seconds(only) is None
    assert statistics.acceptance_by_depth(only, depth=3) == []
    assert statistics.draft_acceptance_rate(only, gamma=3) is None
    assert statistics.repetition_share(only) == 0
    assert statistics.tokens_per_second(only) == pytest.approx(10)


def test_repetition_is_counted_within_each_answer_and_pooled():
    loop = [1, 2, 3, 4, 1, 2, 3, 4, 1]  # the 4-grams ending at positions 7 and 8 are old
    fresh = [1, 2, 3, 4, 5]  # its first 4-gram occurs in the other answer only
    answers = [measured("0", loop, [], 1, 1), measured("1", fresh, [], 1, 1)]
    assert statistics.repetition_share(answers) == pytest.approx(2 / 14)
    assert statistics.repetition_share([measured("0", [5] * 10, [], 1, 1)]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("answer", "position"),
    [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([9, 9, 9], 0)],
)
def test_first_difference(answer, position):
    assert statistics.first_difference(answer, [1, 2, 3]) == position


def test_kinds_are_split_in_order():
    rows = [measured(str(i), [1], [], 1, 1, kind) for i, kind in enumerate("bab")]
    found = statistics.split_by_kind(rows)
    assert list(found) == ["a", "b"]
    assert [[m.prompt_id for m in each] for each in found.values()] == [["1"], ["0", "2"]]


def test_interval_draws_both_answers_to_a_prompt_together():
    seconds = np.random.default_rng(0).lognormal(0, 2, size=25)
    tokens = [20] * 25
    low, high = statistics.speedup_interval(
        timed(tokens, seconds / 2), timed(tokens, seconds), samples=500, seed=1
    )
    # However unlike the prompts are, each is twice as fast; unpaired draws would spread widely.
    assert (low, high) == pytest.approx((2, 2))


def test_interval_of_a_method_against_itself_is_exactly_one():
    assert statistics.speedup_interval(PLAIN, PLAIN, samples=200, seed=0) == (1.0, 1.0)


def test_interval_of_two_prompts_spans_their_own_speedups():
    # A quarter of the draws takes one prompt alone, so both ends are single-prompt speed-ups.
    found = statistics.speedup_interval(MEDUSA, PLAIN, samples=2000, seed=0)
    assert found == pytest.approx((4 / 3, 2.0))
    assert statistics.speedup_interval(MEDUSA, PLAIN, samples=2000, seed=0) == found


def test_interval_narrows_with_its_level_and_follows_its_seed():
    draws = np.random.default_rng(3)
    plain = timed([20] * 30, [1.0] * 30)
    method = timed([20] * 30, draws.uniform(0.3, 0.9, size=30))

    def interval(seed=0, level=0.95):
        return statistics.speedup_interval(method, plain, samples=500, seed=seed, level=level)

    assert interval()[0] < interval(level=0.5)[0] < interval(level=0.5)[1] < interval()[1]
    assert interval(seed=1) != interval()


def test_interval_covers_the_truth_about_as_often_as_it_says():
    draws = np.random.default_rng(7)
    prompts, trials, covered = 40, 300, 0
    truth = 1 / 0.6  # seconds of the method are uniform in 0.2 ... 1.0, plain takes 1
    plain = timed([10] * prompts, [1.0] * prompts)
    for trial in range(trials):
        method = timed([10] * prompts, draws.uniform(0.2, 1.0, size=prompts))
        low, high = statistics.speedup_interval(method, plain, samples=300, seed=trial)
        covered += low <= truth <= high
    assert 0.89 <= covered / trials <= 0.985


@pytest.mark.parametrize(
    "other", [PLAIN[::-1], PLAIN[:1], [], [PLAIN[0], measured("1", [1], [], 1, 1, kind="other")]]
)
def test_unpaired_prompts_are_refused(other):
    with pytest.raises(ValueError, match="same prompts in the same order"):
        statistics.speedup(other, PLAIN)
    with pytest.raises(ValueError, match="same prompts in the same order"):
        statistics.speedup_interval(other, PLAIN, samples=10, seed=0)


def test_no_prompts_at_all_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        statistics.speedup([], [])
