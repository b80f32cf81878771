import pytest

from medusa_train.ops.tree import build_tree, chain, chain_tree


def build(choices, *, num_heads=3, max_rank=10):
    return build_tree(choices, num_heads=num_heads, max_rank=max_rank)


def ancestors(tree):
    """Of each node, itself included."""
    return [row.nonzero().flatten().tolist() for row in tree.attend()]


def test_a_chain():
    tree = build([[0], [0, 0], [0, 0, 0]])
    assert tree.parent == (-1, 0, 1, 2)
    assert tree.depth == (0, 1, 2, 3)
    assert tree.children == ((1,), (2,), (3,), ())
    assert ancestors(tree) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert tree.ranks_by_depth == [1, 1, 1]
    assert chain(3) == list(tree.paths)


@pytest.mark.parametrize("choices", [[[0], [1], [0, 0]], [[0, 0], [1], [0]]])
def test_a_ragged_tree_in_any_order(choices):
    tree = build(choices)
    assert tree.paths == ((0,), (1,), (0, 0))
    assert tree.parent == (-1, 0, 0, 1)
    assert tree.depth == (0, 1, 1, 2)
    assert tree.children == ((1, 2), (3,), (), ())
    assert ancestors(tree) == [[0], [0, 1], [0, 2], [0, 1, 3]]
    assert tree.nodes == 3


def test_a_wide_tree():
    tree = build([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    assert tree.parent == (-1, 0, 0, 0, 1, 1, 2, 4)
    assert tree.depth == (0, 1, 1, 1, 2, 2, 2, 3)
    assert ancestors(tree) == [
        [0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 1, 4],
        [0, 1, 5],
        [0, 2, 6],
        [0, 1, 4, 7],
    ]
    assert tree.ranks_by_depth == [3, 2, 1]


def test_trails_are_the_nodes_on_the_way_to_each():
    tree = build([[0], [1], [0, 0], [0, 1], [0, 1, 0]])
    assert tree.trails.tolist() == [
        [-1, -1, -1],
        [1, -1, -1],
        [2, -1, -1],
        [1, 3, -1],
        [1, 4, -1],
        [1, 4, 5],
    ]


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_chain_of_guesses(length):
    tree = chain_tree(length)
    assert tree.nodes == length
    assert tree.trails.shape == (length + 1, length)
    if length:
        assert tree == build(chain(length), num_heads=length)
    else:
        assert (tree.parent, tree.depth, tree.children) == ((-1,), (0,), ((),))


def test_ranks_may_have_gaps():
    assert build([[3], [3, 7]]).ranks_by_depth == [4, 8]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] lacks its parent \[1\]"),
        ([[0], [0, 0, 0]], r"\[0, 0, 0\] lacks its parent \[0, 0\]"),
        ([[0], [0] * 2, [0] * 3, [0] * 4], r"\[0, 0, 0, 0\] is 4 deep, there are 3 heads"),
        ([[0], [10]], r"\[10\] has a rank outside 0 \.\.\. 9"),
        ([[0], [50]], r"\[50\] has a rank outside"),
        ([[-1]], r"\[-1\] has a rank outside"),
        ([[0], [0]], r"\[0\] stands twice"),
        ([[1], [0], [0, 2], [0, 2]], r"\[0, 2\] stands twice"),
        ([[]], r"\[\] must be one or more whole numbers"),
        ([], "the tree has no paths"),
        ([["0"]], r"\['0'\] must be one or more whole numbers"),
        ([[0.0]], r"\[0\.0\] must be"),
        ([[True]], r"\[True\] must be"),
    ],
)
def test_bad_trees_are_refused_with_the_path(choices, message):
    with pytest.raises(ValueError, match=message):
        build(choices)
