import pytest

from medusa_train.decode.stopping import StopStrings, cut_block
from medusa_train.errors import DataError
from medusa_train.model.tiny import byte_tokenizer


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


# Stop strings. Tokens of this vocabulary hold more than one character

PIECES = ["Hel", "lo", " wor", "ld", "!", "\n", "\nUs", "er:", " x", ""]  # the last is special


def spell(ids):
    return "".join(PIECES[i] for i in ids)


def cut(block, *strings, before=(), room=99, end_ids=()):
    stop = StopStrings(strings, spell)
    return cut_block(block, room=room, end_ids=end_ids, before=before, stop=stop)


@pytest.mark.parametrize(
    ("string", "before", "block", "kept"),
    [
        ("lo", [], [0, 1, 2, 3], [0, 1]),  # a token
        ("o w", [], [0, 1, 2, 3], [0, 1, 2]),  # over a border in the middle of a block
        ("o w", [0, 1], [2, 3], [2]),  # over the border of two blocks
        ("Hello world!", [0, 1, 2], [3, 4, 8], [3, 4]),
        ("\nUser:", [4], [6, 7, 8], [6, 7]),
        ("\nUser:", [4, 6], [7, 8], [7]),
        ("r", [], [0, 2, 6], [0, 2]),
        ("H", [], [0, 1], [0]),
        ("!", [], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_the_token_that_completes_a_string_is_the_last(string, before, block, kept):
    assert cut(block, string, before=before) == (kept, "stop")


def test_the_first_of_all_ends_decides():
    assert cut([0, 1, 2, 3], "world", "lo") == ([0, 1], "stop")
    assert cut([0, 1, 2, 3], "world", end_ids={2}) == ([0, 1, 2], "stop")
    assert cut([0, 1, 2, 3], "world", room=3) == ([0, 1, 2], "length")
    assert cut([0, 1, 2, 3], "world", room=4) == ([0, 1, 2, 3], "stop")


def test_what_is_no_stop_string():
    assert cut([0, 1, 2, 3], "World", "ow") == ([0, 1, 2, 3], None)
    assert cut([6], "\nUser:", before=[]) == ([6], None)
    assert cut([1, 2]) == ([1, 2], None)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_a_string_of_many_short_tokens_far_into_the_answer(length):
    string = "!" + "\n" * length
    block = [*[0, 1] * 50, 4, *[5] * 60]
    assert cut(block, string, room=999) == (block[: 101 + length], "stop")


@pytest.mark.parametrize("specials", [1, 9, 60, 500])
def test_special_tokens_inside_a_string_have_no_text(specials):
    block = [*[8] * 30, 2, *[9] * specials, 3, 4]
    assert cut(block, "x world", room=999) == (block[:-1], "stop")
    assert cut(block, "x  world", room=999) == (block, None)


@pytest.mark.parametrize("character", ["e", "é", "€", "🙂"])
def test_a_character_of_several_bytes_is_complete_with_the_last_of_them(character):
    """A token is a byte here, and no text until then."""
    tokenizer = byte_tokenizer()
    block = tokenizer(f"caf{character} au lait")["input_ids"]
    size = len(character.encode())
    for string in (character, f"f{character}", f"caf{character}"):
        kept, _ = cut_block(
            block, room=99, end_ids=(), stop=StopStrings([string], tokenizer.decode)
        )
        assert kept == block[: 3 + size]


def test_an_empty_string_is_refused():
    with pytest.raises(DataError, match="a stop string is empty, which every answer holds"):
        StopStrings(["", "x"], spell)


def test_a_string_in_place_of_a_list_is_refused():
    """Each of its letters would be one."""
    with pytest.raises(DataError, match="stop strings must be a list, got the string 'ab'"):
        StopStrings("ab", spell)
