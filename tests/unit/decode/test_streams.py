"""Answers step by step: the same ones, and nothing is left behind wherever one is abandoned."""

import pytest
import torch
from decoding_case import answer_of, random_ids, transformers_greedy
from method_case import GUESSING, METHODS, make_method

from medusa_train.decode import Plain, Sampling, StopStrings, generate, stream
from medusa_train.errors import DataError

PROMPT, OTHER = random_ids(12, seed=3), random_ids(31, seed=8)
LENGTH = 24
every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module")
def text(tiny):
    return PROMPT + transformers_greedy(tiny, PROMPT, LENGTH + 12)


@every_method
@pytest.mark.parametrize("length", [1, 5, LENGTH])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=5)])
def test_parts_joined_are_the_answer(tiny, text, name, length, sampling):
    method = make_method(name, tiny, text)
    for ends in ([], text[20:21]):
        settings = dict(max_new_tokens=length, end_ids=ends, sampling=sampling)
        parts = list(stream(method, PROMPT, **settings))
        whole = generate(method, PROMPT, **settings)
        assert [token for part in parts for token in part.tokens] == whole.ids
        assert [part.accepted for part in parts] == [None, *whole.accepted]
        reasons = [part.finish_reason for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [whole.finish_reason]
        seconds = [part.seconds for part in parts]
        assert seconds[0] > 0
        assert seconds == sorted(seconds)
        assert all(part.tokens for part in parts)


@pytest.mark.parametrize("name", GUESSING)
def test_a_part_tells_how_many_of_its_tokens_were_guessed(tiny, text, name):
    method = make_method(name, tiny, text, noise=0.01)
    parts = list(stream(method, PROMPT, max_new_tokens=LENGTH, end_ids=()))
    assert len(parts[0].tokens) == 1
    for part in parts[1:-1]:
        assert len(part.tokens) == part.accepted + 1
    assert len({part.accepted for part in parts[1:]}) > 1


def test_nothing_to_say_is_an_empty_stream(tiny):
    assert list(stream(Plain(tiny), PROMPT, max_new_tokens=0, end_ids=())) == []
    with pytest.raises(DataError, match="the prompt has no tokens"):
        stream(Plain(tiny), [], max_new_tokens=3, end_ids=())  # before anybody asks for a part


@every_method
def test_an_abandoned_stream_leaves_nothing_to_the_next(tiny, text, name):
    """Speculative, plain and transformers' own, before and after, on one model."""
    method = make_method(name, tiny, text)
    for parts in range(4):
        abandoned = stream(method, OTHER, max_new_tokens=40, end_ids=())
        for _ in range(parts):
            next(abandoned)
            assert not torch.is_inference_mode_enabled()
        assert answer_of(method, PROMPT, LENGTH).ids == text[len(PROMPT) :][:LENGTH]
        assert answer_of(Plain(tiny), OTHER, 8).ids == transformers_greedy(tiny, OTHER, 8)
        abandoned.close()
        assert answer_of(method, PROMPT, LENGTH).ids == text[len(PROMPT) :][:LENGTH]


@pytest.mark.parametrize("second", METHODS)
@pytest.mark.parametrize("first", ["plain", "draft", "medusa"])
def test_two_methods_on_one_model_in_turn(tiny, text, first, second):
    """Each on its own prompt, a part of one after a part of the other."""
    other = OTHER + transformers_greedy(tiny, OTHER, LENGTH + 12)
    streams = [
        stream(make_method(first, tiny, text), PROMPT, max_new_tokens=LENGTH, end_ids=()),
        stream(make_method(second, tiny, other), OTHER, max_new_tokens=LENGTH, end_ids=()),
    ]
    answers = [[], []]
    while streams != [None, None]:
        for i, parts in enumerate(streams):
            part = next(parts, None) if parts else None
            if part is None:
                streams[i] = None
            else:
                answers[i] += part.tokens
    assert answers == [text[len(PROMPT) :][:LENGTH], other[len(OTHER) :][:LENGTH]]


def test_one_method_cannot_write_two_answers_at_a_time(tiny):
    """The second begins on the cache of the first, which must not go on as if nothing were."""
    method = Plain(tiny)
    first = stream(method, PROMPT, max_new_tokens=LENGTH, end_ids=())
    next(first)
    second = stream(method, OTHER, max_new_tokens=3, end_ids=())
    next(second)
    with pytest.raises(DataError, match="plain has begun another answer before this one was done"):
        next(first)
    assert len(list(second)) == 2


@every_method
def test_a_string_ends_the_stream_and_no_part_goes_beyond(tiny, text, name):
    def latin(ids):
        return "".join(map(chr, ids))

    answer = latin(text[len(PROMPT) :])
    for place in range(3, 12):
        string = answer[place : place + 3]
        stop = StopStrings([string], latin)
        method = make_method(name, tiny, text)
        parts = list(stream(method, PROMPT, max_new_tokens=LENGTH, end_ids=(), stop=stop))
        shown = "".join(latin(part.tokens) for part in parts)
        assert shown == answer[: answer.index(string) + 3]
        assert parts[-1].finish_reason == "stop"
