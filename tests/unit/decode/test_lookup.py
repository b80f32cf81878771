import pytest
from decoding_case import answer_of, noted, random_ids, transformers_greedy
from method_case import make_method

from medusa_train.decode import Lookup
from medusa_train.decode.lookup import Text

PROMPT = random_ids(12, seed=3)
LENGTH = 24


def continuation(ids, *, most=4, longest_ngram=3):
    text = Text(longest_ngram)
    text.extend(ids)
    return text.continuation(most)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], []),
        ([5], []),
        ([5, 6, 7], []),  # nothing has stood before
        ([5, 6, 7, 5], [6, 7, 5, 6]),  # on and on in the circle
        ([5, 6, 7, 8, 9, 5], [6, 7, 8, 9]),  # at most four
        ([1, 2, 9, 3, 2, 8, 1, 2], [9, 3, 2, 8]),  # two tokens tell more than one
        ([3, 2, 8, 4, 2, 7, 5, 2], [7, 5, 2, 7]),  # where it last stood
        ([1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], [9, 4, 2, 3]),
        ([7, 7], [7, 7, 7, 7]),
        ([7, 7, 7, 7], [7, 7, 7, 7]),  # the last place before the end
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
    ],
)
def test_what_followed_the_longest_known_ngram(ids, found):
    assert continuation(ids) == found


def test_the_length_of_ngrams_is_a_setting():
    ids = [1, 2, 9, 3, 2, 8, 1, 2]
    assert continuation(ids, longest_ngram=1) == [8, 1, 2, 8]
    assert continuation(ids, longest_ngram=2) == [9, 3, 2, 8]


def test_tokens_may_come_in_any_portions():
    ids = random_ids(300, seed=1)
    ids = [token % 7 for token in ids]
    text = Text(3)
    for begin, end in [(0, 5), (5, 6), (6, 6), (6, 90), (90, 300)]:
        text.extend(ids[begin:end])
        assert text.continuation(9) == continuation(ids[:end], most=9)
    assert text.ids == ids


@pytest.mark.parametrize(("name", "settings"), [("gamma", {"gamma": 0}), ("longest_ngram", {})])
def test_numbers_below_one_are_refused(tiny, name, settings):
    with pytest.raises(ValueError, match=f"{name} must be a whole number, at least 1, got 0"):
        Lookup(tiny, **{"longest_ngram": 0, **settings})


def test_an_answer_that_repeats_the_prompt_takes_few_steps(tiny):
    truth = transformers_greedy(tiny, PROMPT, LENGTH + 4)
    found = answer_of(make_method("lookup", tiny, PROMPT + truth, right=True), PROMPT, LENGTH)
    assert found.ids == truth[:LENGTH]
    assert found.accepted == [4, 4, 4, 4, 4]


def test_a_step_reads_no_more_guesses_than_were_found(monkeypatch, tiny):
    """Where nothing has stood before, it is a step of plain decoding."""
    truth = transformers_greedy(tiny, PROMPT, LENGTH)
    sizes = noted(monkeypatch, tiny, "forward", lambda ids, **_: ids.shape[1])
    found = answer_of(Lookup(tiny, gamma=6), PROMPT, LENGTH)
    assert found.ids == truth
    text, emitted = PROMPT + truth, 1
    for size, accepted in zip(sizes[1:], found.accepted, strict=True):
        assert size == 1 + len(continuation(text[: len(PROMPT) + emitted], most=6))
        emitted += accepted + 1
    assert sizes.count(1) > 5
