import pytest

from medusa_train.decode.stopping import cut_block


@pytest.mark.parametrize(
    ("block", "end_ids", "kept"),
    [
        ([2, 3, 4, 5, 6], {2}, [2]),
        ([3, 2, 4, 5, 6], {2}, [3, 2]),
        ([3, 4, 2, 5, 6], {2}, [3, 4, 2]),
        ([3, 4, 5, 2, 6], {2}, [3, 4, 5, 2]),
        ([3, 4, 5, 6, 2], {2}, [3, 4, 5, 6, 2]),
        ([3, 9, 4, 5], {2, 9}, [3, 9]),
        ([9, 2, 4, 5], {2, 9}, [9]),
        ([2, 2, 2], {2}, [2]),
    ],
)
def test_the_first_end_id_is_the_last_token(block, end_ids, kept):
    assert cut_block(block, room=10, end_ids=end_ids) == (kept, "stop")


def test_without_an_end_id_nothing_ends():
    assert cut_block([3, 2, 4], room=10, end_ids=()) == ([3, 2, 4], None)
    assert cut_block([3, 4], room=10, end_ids={2}) == ([3, 4], None)


def test_no_room_ends_the_answer():
    assert cut_block([3, 4, 5], room=2, end_ids={2}) == ([3, 4], "length")
    assert cut_block([3, 4], room=2, end_ids={2}) == ([3, 4], "length")
    assert cut_block([3], room=1, end_ids=()) == ([3], "length")


def test_an_end_id_in_the_last_place_counts_as_stop():
    assert cut_block([3, 2, 4], room=2, end_ids={2}) == ([3, 2], "stop")


def test_an_end_id_behind_the_room_does_not_count():
    assert cut_block([3, 4, 2], room=2, end_ids={2}) == ([3, 4], "length")
