"""Growing a tree from counts, and counting what it would accept: by hand and by brute force.

Legend: K heads, P positions.
"""

from itertools import combinations, product

import pytest
import torch

from medusa_train.ops.loss import IGNORE
from medusa_train.ops.metrics import MISSED
from medusa_train.ops.tree import build_tree
from medusa_train.ops.tree_growth import PRIOR_POSITIONS, count_paths, grow, simulate

# Two heads over five positions of one answer, and one position of another
RANKS = [
    torch.tensor([[0, 0, 1, MISSED, 0], [0, 2, 0, 0, IGNORE]]),
    torch.tensor([[2], [1]]),
]


def random_ranks(count: int, heads: int = 3, ranks: int = 4, seed: int = 0) -> list[torch.Tensor]:
    """Answers whose heads are dependent: right together more often than apart."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        easy = torch.rand(length, generator=generator) < 0.5
        rank = torch.randint(0, 2 * ranks, (heads, length), generator=generator)
        rank = torch.where(easy, rank % 2, torch.where(rank < ranks, rank, MISSED))
        for k in range(heads):
            rank[k, max(0, length - k) :] = IGNORE
        found.append(rank)
    return found


def test_counts_by_hand():
    counts = count_paths(RANKS, max_rank=2)

    assert counts.positions == 6
    assert dict(counts.joint) == {(0,): 3, (0, 0): 1, (1,): 1, (1, 0): 1}
    torch.testing.assert_close(counts.marginal, torch.tensor([[3, 1], [3, 1]]) / 6)


def test_a_paths_worth_is_its_share_blended_with_the_product_of_accuracies():
    counts = count_paths(RANKS, max_rank=3)

    assert counts.worth((1, 0)) == pytest.approx(
        (1 + PRIOR_POSITIONS * (1 / 6) * (3 / 6)) / (6 + PRIOR_POSITIONS)
    )


def test_a_path_is_never_worth_more_than_its_parent():
    counts = count_paths(random_ranks(30), max_rank=4)

    for depth in (2, 3):
        for path in product(range(4), repeat=depth):
            assert counts.worth(path) <= counts.worth(path[:-1]) + 1e-12


def test_every_beginning_of_what_is_grown_is_a_tree_and_the_best_of_its_size():
    counts = count_paths(random_ranks(30, heads=2, ranks=3), max_rank=3)
    everything = [p for depth in (1, 2) for p in product(range(3), repeat=depth)]
    grown = grow(counts, 5)

    for size in range(1, 6):
        build_tree(grown[:size], num_heads=2, max_rank=3)
        trees = [
            chosen
            for chosen in combinations(everything, size)
            if all(len(p) == 1 or p[:-1] in chosen for p in chosen)
        ]
        best = max(sum(map(counts.worth, chosen)) for chosen in trees)
        assert sum(map(counts.worth, grown[:size])) == pytest.approx(best)


def test_growing_stops_where_there_are_no_more_paths():
    grown = grow(count_paths(RANKS, max_rank=2), 100)

    assert len(grown) == len(set(grown)) == 2 + 4


def test_a_right_path_is_found_without_any_prior_order():
    ranks = [torch.tensor([[3, 3, 3], [1, 1, 1]])]

    assert grow(count_paths(ranks, max_rank=5), 2) == [(3,), (3, 1)]


def test_simulated_tokens_per_step_by_hand():
    # first answer: from position 0 both are right, on to 3: missed; 4: head 0. Second: missed.
    assert simulate(RANKS, [(0,), (0, 0)]) == pytest.approx((3 + 1 + 2 + 1) / 4)
    # head 0 only: positions 0 -> 2 -> 3 -> 4, then the second answer
    assert simulate(RANKS, [(0,)]) == pytest.approx((2 + 1 + 1 + 2 + 1) / 5)


def test_without_any_position_a_step_gives_its_one_certain_token():
    assert simulate([torch.empty((2, 0), dtype=torch.long)], [(0,)]) == 1.0


def test_simulated_tokens_per_step_by_brute_force():
    ranks = random_ranks(40)
    tree = grow(count_paths(ranks, max_rank=4), 12)
    tokens = steps = 0
    for answer in ranks:
        at = 0
        while at < answer.shape[1]:
            right = answer[:, at].tolist()
            best = max((len(p) for p in tree if list(p) == right[: len(p)]), default=0)
            tokens, steps, at = tokens + best + 1, steps + 1, at + best + 1

    assert simulate(ranks, tree) == pytest.approx(tokens / steps)
    assert 1.2 < tokens / steps < 3.5


def test_a_path_cut_by_the_end_of_the_answer_counts_as_far_as_it_goes():
    ranks = [torch.tensor([[0], [IGNORE]])]

    assert simulate(ranks, [(0,), (0, 0)]) == 2.0
    assert count_paths(ranks, max_rank=1).joint == {(0,): 1}
