import pytest

from medusa_train.ops.accept import follow

# Nodes: the root; 1, 2, 3 below it; 4, 5 below 1; 6 below 2; 7 below 4
CHILDREN = ((1, 2, 3), (4, 5), (6,), (), (7,), (), (), ())
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
    assert follow(CHILDREN, TOKENS, [best.get(node, -1) for node in range(8)]) == path


def test_the_token_of_the_root_is_certain():
    assert follow(((),), [5], [5]) == [0]


def test_the_first_of_equal_siblings_is_taken():
    assert follow(((1, 2), (), ()), [0, 7, 7], [7, 7, 7]) == [0, 1]
