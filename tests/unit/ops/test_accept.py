import math

import pytest
import torch

from medusa_train.ops.accept import (
    DELTA,
    EPSILON,
    NO_TOKEN,
    follow,
    longest_path,
    reject,
    typical,
)

# Nodes: the root; 1, 2, 3 below it; 4, 5 below 1; 6 below 2; 7 below 4
CHILDREN = ((1, 2, 3), (4, 5), (6,), (), (7,), (), (), ())
PARENT = [-1, 0, 0, 0, 1, 1, 2, 4]
TOKENS = [9, 10, 11, 12, 20, 21, 20, 30]


@pytest.mark.parametrize(
    ("best", "path"),
    [
        ({}, [0]),
        ({0: 12}, [0, 3]),
        ({0: 10, 1: 21}, [0, 1, 5]),
        ({0: 10, 1: 20, 4: 30}, [0, 1, 4, 7]),
        ({0: 11, 2: 20}, [0, 2, 6]),  # the same token as node 4, below another parent
        ({0: 11, 2: 21}, [0, 2]),  # node 5 has it, but not below node 2
        ({1: 20, 4: 30}, [0]),  # what follows a rejected node does not matter
        ({0: 10, 1: 20, 4: 31}, [0, 1, 4]),
    ],
)
def test_the_path_follows_the_targets_choices(best, path):
    assert follow(CHILDREN, TOKENS, [best.get(node, -2) for node in range(8)]) == path


def test_the_token_of_the_root_is_certain():
    assert follow(((),), [5], [5]) == [0]


def test_the_first_of_equal_siblings_is_taken():
    assert follow(((1, 2), (), ()), [0, 7, 7], [7, 7, 7]) == [0, 1]


def test_a_missing_guess_is_never_followed():
    assert follow(((1,), (2,), ()), [5, NO_TOKEN, 8], [7, 8, 9]) == [0]


# Rejection of guesses in a row


def reject_one(target, draft, guess, accept, again):
    """One guess, and certainty of token 0 behind it: how many are accepted, what follows each."""
    after = [1.0] + [0.0] * (len(target) - 1)
    accepted, following = reject(
        torch.tensor([[target, after]]),
        torch.tensor([[draft]]),
        torch.tensor([[guess]]),
        torch.tensor([[accept]], dtype=torch.float64),
        torch.tensor([[again, again]], dtype=torch.float64),
    )
    return accepted.tolist(), following[0].tolist()


@pytest.mark.parametrize("accept", [0.0, 0.5, 1 - 1e-7])
def test_a_guess_that_the_target_says_as_often_is_accepted(accept):
    same = [0.5, 0.3, 0.2, 0.0]
    assert reject_one(same, same, 1, accept, 0.5)[0] == [1]
    assert reject_one([0.0, 1.0], [0.0, 1.0], 1, accept, 0.5)[0] == [1]


@pytest.mark.parametrize("again", [0.0, 0.5, 1 - 1e-12])
def test_equal_laws_leave_nothing_that_is_not_a_number(again):
    """Not even where a number just below 1 is rounded up to it and the guess is refused."""
    same = [0.0, 0.5, 0.3, 0.2]
    for accept in (0.5, 1 - 1e-12):
        _, (instead, _) = reject_one(same, same, 1, accept, again)
        assert same[instead] > 0


@pytest.mark.parametrize(("accept", "kept"), [(0.0, 1), (0.59, 1), (0.61, 0), (0.99, 0)])
def test_a_guess_is_accepted_with_the_ratio_of_its_probabilities(accept, kept):
    assert reject_one([0.3, 0.7], [0.5, 0.5], 0, accept, 0.5)[0] == [kept]


@pytest.mark.parametrize("accept", [0.0, 0.5, 1 - 1e-12])
def test_what_the_target_never_says_is_never_accepted(accept):
    accepted, (instead, _) = reject_one([0.0, 1.0, 0.0], [0.5, 0.25, 0.25], 0, accept, 0.99)
    assert (accepted, instead) == ([0], 1)


@pytest.mark.parametrize(
    ("again", "instead"), [(0.0, 1), (0.24, 1), (0.26, 3), (0.99, 3), (1 - 1e-12, 3)]
)
def test_in_its_place_comes_one_of_the_positive_rest(again, instead):
    """Rest: 0.1 of token 1 and 0.3 of token 3."""
    target, draft = [0.2, 0.3, 0.1, 0.4], [0.4, 0.2, 0.3, 0.1]
    assert reject_one(target, draft, 0, 0.9, again)[1] == [instead, 0]


def test_the_first_that_is_rejected_ends_the_row():
    """Accepted, rejected, would be accepted again: one."""
    target = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]])
    draft = torch.tensor([[[1.0, 0, 0], [0, 0, 1], [1, 0, 0]]])
    half = torch.full((1, 4), 0.5)
    accepted, after = reject(target, draft, torch.tensor([[0, 2, 0]]), half[:, :3], half)
    assert accepted.tolist() == [1]
    assert after.tolist() == [[0, 1, 0, 2]]


def test_rows_with_fewer_guesses_go_on_with_the_targets_own_law():
    """A row of two guesses and one of none, beside each other."""
    target = torch.tensor([[0.25, 0.75]]).expand(2, 3, 2)
    draft = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    guesses = torch.tensor([[1, 0], [NO_TOKEN, NO_TOKEN]])
    accept = torch.tensor([[0.7, 0.3], [0.0, 0.0]])
    for number, token in [(0.2, 0), (0.3, 1)]:
        accepted, after = reject(target, draft, guesses, accept, torch.full((2, 3), number))
        assert accepted.tolist() == [1, 0]
        assert after[0].tolist() == [0, 1, token]  # rests of a guess, of a guess, the law itself
        assert after[1].tolist() == [token] * 3


# Typical acceptance

FLAT, SHARP = [0.25, 0.25, 0.25, 0.25], [0.9, 0.085, 0.01, 0.005]


def passes(law, token, **rule):
    """Whether one node below the root passes."""
    laws = torch.tensor([[law, law]])
    passed, scores = typical(laws, torch.tensor([[0, token]]), torch.tensor([-1, 0]), **rule)
    assert passed[0, 0]
    assert scores[0].tolist() == [0, pytest.approx(math.log(law[token]))]
    return bool(passed[0, 1])


def test_the_papers_numbers():
    assert (EPSILON, DELTA) == (0.09, 0.3)


@pytest.mark.parametrize(
    ("law", "accepted"),
    [
        (SHARP, {0}),  # the hard bound of 0.09
        (FLAT, {0, 1, 2, 3}),  # 0.3 / 4 = 0.075
        ([0.91, 0.0899, 0.00005, 0.00005], {0}),
        ([0.9, 0.0901, 0.005, 0.0049], {0, 1}),
        ([0.076, *[0.924 / 11] * 11], set(range(12))),  # entropy 2.48: 0.3 / 11.96 = 0.0251
        ([0.02, *[0.98 / 11] * 11], set(range(1, 12))),
    ],
)
def test_a_token_passes_the_smaller_of_both_bounds(law, accepted):
    assert {token for token in range(len(law)) if passes(law, token)} == accepted


def test_the_bounds_may_be_others():
    assert passes(SHARP, 1, epsilon=0.05)
    assert not passes(FLAT, 1, epsilon=0.9, delta=1.1)
    assert passes(FLAT, 1, epsilon=0.9, delta=0.9)


def test_a_law_of_one_token_lets_only_that_one_pass():
    """As at temperature 0, where the entropy is 0 and not the logarithm of nothing."""
    laws = torch.tensor([[[0.0, 1.0, 0.0]] * 3])
    passed, _ = typical(laws, torch.tensor([[0, 1, 2]]), torch.tensor([-1, 0, 0]))
    assert passed.tolist() == [[True, True, False]]


def test_each_node_is_judged_by_the_law_after_its_parent():
    laws = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]])
    tokens = torch.tensor([[2, 0, 1, 0]])
    passed, _ = typical(laws, tokens, torch.tensor([-1, 0, 1, 1]))
    assert passed.tolist() == [[True, True, True, False]]


def test_a_missing_guess_never_passes():
    laws = torch.tensor([[[1.0, 0.0]] * 2])
    passed, _ = typical(laws, torch.tensor([[0, NO_TOKEN]]), torch.tensor([-1, 0]))
    assert passed.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("passing", "scores", "path"),
    [
        ([], {}, [0]),
        ([3], {}, [0, 3]),
        ([1, 2, 6], {1: -0.1, 2: -5.0, 6: -5.0}, [0, 2, 6]),  # the longest, however unlikely
        ([1, 2, 3], {1: -3.0, 2: -1.0, 3: -2.0}, [0, 2]),
        ([1, 2, 4, 5, 6], {1: -1.0, 4: -3.0, 5: -2.0, 2: -2.0, 6: -0.5}, [0, 2, 6]),
        ([1, 4, 5], {4: -1.0, 5: -2.0}, [0, 1, 4]),
        ([4, 7], {}, [0]),  # their parent does not pass
        ([1, 4, 6, 7], {}, [0, 1, 4, 7]),
        ([1, 6, 7], {1: -9.0}, [0, 1]),
    ],
)
def test_the_longest_path_wins_and_among_equals_the_likeliest(passing, scores, path):
    passed = [node in passing for node in range(8)]
    assert longest_path(PARENT, passed, [scores.get(node, 0.0) for node in range(8)]) == path
