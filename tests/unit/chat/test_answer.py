import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.chat.answer import Answer, IncrementalText, Piece
from medusa_train.decode import Part
from medusa_train.model.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)  # pyright: ignore


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]  # pyright: ignore


def fallback(ids: list[int]) -> str:
    """As decoders with byte fallback: bytes in a row that make no text are all replaced; so is the
    space that the first word begins with.
    """
    text, run = "", b""
    for token in [*ids, None]:
        if isinstance(token, int) and token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run = b""
        if token is not None:
            text += f" {chr(token)}"
    return text.removeprefix(" ")


def part(tokens: list[int], accepted: int | None, **more) -> Part:
    return Part(tokens=tokens, accepted=accepted, **{"finish_reason": None, "seconds": 1.0, **more})


def test_a_character_comes_with_its_last_byte_and_never_in_pieces():
    text = IncrementalText(decode)

    assert [text.add(token) for token in encode("a€😀b")] == [
        *("a", "", "", "€", "", "", "", "😀", "b")
    ]
    assert text.rest() == ""


@given(st.text(), st.lists(st.integers(0, 255), max_size=3))
def test_pieces_make_up_the_whole_text_with_what_is_broken_at_its_end(text, broken):
    ids = [*encode(text), *broken]
    pieces = IncrementalText(decode)

    assert "".join([*map(pieces.add, ids), pieces.rest()]) == decode(ids)


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), st.text("€😀")))
)
def test_decoders_that_look_at_whole_rows_of_bytes_are_not_given_out_too_soon(words):
    """A second character of such bytes makes replacement signs of the first, until it is whole."""
    ids = [
        token
        for word in words
        for token in (word.encode() if set(word) <= set("€😀") else [ord(word)])
    ]
    pieces = IncrementalText(fallback)

    assert "".join([*map(pieces.add, ids), pieces.rest()]) == fallback(ids)


def test_the_space_before_a_word_is_kept_where_decoders_drop_it_from_the_first():
    pieces = IncrementalText(fallback)

    assert [pieces.add(ord(word)) for word in "一二三"] == ["一", " 二", " 三"]


def test_bytes_that_never_make_a_character_are_shown_once_something_follows():
    text = IncrementalText(decode)
    first, second = encode("é")

    assert [text.add(token) for token in (first, first, *encode("a"), second)] == [
        *("", "", "\ufffd\ufffda", "")
    ]
    assert text.rest() == "\ufffd"


def test_what_is_decoded_again_does_not_grow_with_the_answer():
    sizes = []

    def noted(ids: list[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    text = IncrementalText(noted)
    for token in encode("a€😀b" * 50):
        text.add(token)

    assert max(sizes) <= 8


def test_only_accepted_guesses_count_as_guessed():
    answer = Answer(decode)

    assert answer.take(part(encode("a"), None)) == [Piece(text="a", guessed=False)]
    assert answer.take(part(encode("bcd"), 2)) == [
        Piece(text="b", guessed=True),
        Piece(text="c", guessed=True),
        Piece(text="d", guessed=False),
    ]
    assert answer.take(part(encode("e"), 0)) == [Piece(text="e", guessed=False)]
    # the cap has cut the block behind its second guess
    assert answer.take(part(encode("fg"), 3, finish_reason="length")) == [
        Piece(text="f", guessed=True),
        Piece(text="g", guessed=True),
    ]
    assert answer.ids == encode("abcdefg")
    assert answer.finish_reason == "length"


def test_numbers_count_steps_behind_the_prefill():
    answer = Answer(decode)
    assert answer.numbers() == "0 tokens in 0.0 s, 0.0 tokens/s"
    answer.take(part(encode("a"), None, seconds=0.5))
    assert answer.numbers() == "1 token in 0.5 s, 2.0 tokens/s"
    answer.take(part(encode("bcd"), 2, seconds=1.0))
    answer.take(part(encode("e"), 0, seconds=2.0))

    assert answer.tokens_per_step == pytest.approx((3 + 1) / 2)
    assert answer.numbers() == "5 tokens in 2.0 s, 2.5 tokens/s, 2.00 tokens per step"


def test_what_is_held_back_comes_at_the_end():
    answer = Answer(decode)
    answer.take(part(encode("€")[:2], 1))

    assert answer.rest() == [Piece(text="\ufffd", guessed=False)]
