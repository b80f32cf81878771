"""Many prompts at once: every row is answered as by itself, whatever the others do."""

from functools import cache

import pytest
import torch
from decoding_case import answer_of, make_family, noted, random_ids, transformers_greedy
from method_case import GUESSING, METHODS, make_method

from medusa_train.decode import Plain, Sampling, StopStrings, generate, generate_batch
from medusa_train.errors import DataError

PROMPTS = [random_ids(length, seed=length) for length in (1, 5, 12, 13, 26, 40)]
LENGTH = 24
FAMILIES = ["llama", "mistral-sliding", "qwen3-sliding", "gemma3", "gpt2"]
every_method = pytest.mark.parametrize("name", METHODS)


def latin(ids):
    return "".join(map(chr, ids))


@cache
def case(family, **settings):
    """A model and the true answers to all prompts, up to the end of the context."""
    backbone = make_family(family, **dict(settings))
    room = [min(LENGTH, backbone.max_positions - len(prompt)) for prompt in PROMPTS]
    rows = zip(PROMPTS, room, strict=True)
    return backbone, [transformers_greedy(backbone, prompt, count) for prompt, count in rows]


def method_of(name, backbone, answers, *, noise=0.01):
    """Guesses from all texts that it is going to write."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return make_method(name, backbone, *texts, noise=noise)


def batch(method, *, length=LENGTH, end_ids=(), **settings):
    return generate_batch(method, PROMPTS, max_new_tokens=length, end_ids=end_ids, **settings)


def story(generation):
    """All of an answer but how long it took."""
    return generation.ids, generation.finish_reason, generation.accepted


@every_method
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_their_own_runs(family, name):
    """Their guesses too: a row that saw another's tokens or states would guess otherwise."""
    backbone, truth = case(family)
    method = method_of(name, backbone, truth)
    found = batch(method)
    assert [answer.ids for answer in found] == truth
    alone = [answer_of(method, prompt, LENGTH) for prompt in PROMPTS]
    assert list(map(story, found)) == list(map(story, alone))
    if name in GUESSING:
        assert len({tuple(answer.accepted) for answer in found}) > 3


@every_method
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_the_context_ends(family, name):
    backbone, truth = case(family, max_position_embeddings=44)
    assert [len(answer) for answer in truth] == [24, 24, 24, 24, 18, 4]
    found = batch(method_of(name, backbone, truth))
    assert [answer.ids for answer in found] == truth
    unbounded = batch(method_of(name, backbone, truth), length=10**6)
    assert [len(answer.ids) for answer in unbounded] == [44 - len(prompt) for prompt in PROMPTS]
    assert [answer.ids for answer in unbounded[4:]] == truth[4:]
    assert {answer.finish_reason for answer in unbounded} == {"length"}


@every_method
@pytest.mark.parametrize("seed", range(4))
def test_drawn_rows_that_the_context_ends_accept_what_they_do_alone(name, seed):
    """Also of guesses behind the end, which are counted with the step that made them."""
    backbone, truth = case("gpt2", max_position_embeddings=44)
    method, sampling = method_of(name, backbone, truth), Sampling(temperature=1.5, seed=seed)
    found = batch(method, length=10**6, sampling=sampling)
    settings = dict(max_new_tokens=10**6, end_ids=(), sampling=sampling)
    alone = [generate(method, prompt, **settings) for prompt in PROMPTS]
    assert list(map(story, found)) == list(map(story, alone))


@every_method
def test_rows_that_end_early_leave(monkeypatch, name):
    backbone, truth = case("llama")
    ends = [truth[0][3], truth[2][9], truth[5][0]]
    method = method_of(name, backbone, truth)
    sizes = noted(monkeypatch, backbone, "forward", lambda ids, **_: len(ids))
    found = batch(method, end_ids=ends)
    seen = list(sizes)
    alone = [answer_of(method, prompt, LENGTH, end_ids=ends) for prompt in PROMPTS]
    assert list(map(story, found)) == list(map(story, alone))
    lengths = [len(answer.ids) for answer in found]
    assert lengths[5] == 1
    assert len(set(lengths)) >= 4
    assert seen[0] == 6 > seen[1] > seen[-1]
    assert seen == sorted(seen, reverse=True)


@every_method
def test_rows_that_a_string_ends(name):
    backbone, truth = case("mistral-sliding")
    stop = StopStrings([latin(truth[1][4:6]), latin(truth[3][10:13])], latin)
    method = method_of(name, backbone, truth)
    found = batch(method, stop=stop)
    alone = [
        generate(method, prompt, max_new_tokens=LENGTH, end_ids=(), stop=stop) for prompt in PROMPTS
    ]
    assert list(map(story, found)) == list(map(story, alone))
    assert found[1].ids == truth[1][:6]
    assert found[3].ids == truth[3][:13]


WARM = {
    "filters": Sampling(temperature=0.9, top_k=40, top_p=0.9),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.3, min_new_tokens=6, banned_ids=(5, 70)
    ),
}


@every_method
@pytest.mark.parametrize("setting", WARM)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sampled_rows_equal_their_own_runs(family, setting, name):
    """Each by its seed; the numbers of a row are not those of its place in the batch."""
    backbone, _ = case(family)
    sampling, seeds = WARM[setting], [4, 9, 4, 1, 0, 2**40]

    def alone(method, row, **settings):
        seeded = Sampling(**{**settings, "seed": seeds[row]})
        return generate(
            method, PROMPTS[row], max_new_tokens=LENGTH, end_ids=[9, 200], sampling=seeded
        )

    settings = {field: getattr(sampling, field) for field in Sampling.__slots__}
    plain = [alone(Plain(backbone), row, **settings).ids for row in range(len(PROMPTS))]
    method = method_of(name, backbone, plain, noise=0.02)
    found = batch(method, end_ids=[9, 200], sampling=sampling, seeds=seeds)
    rows = [alone(method, row, **settings) for row in range(len(PROMPTS))]
    assert list(map(story, found)) == list(map(story, rows))
    if name in ("plain", "medusa", "lookup"):
        assert [answer.ids for answer in found] == plain


def test_without_seeds_all_rows_have_that_of_the_settings(tiny):
    sampling = Sampling(temperature=1.0, seed=7)
    found = generate_batch(
        Plain(tiny), [PROMPTS[1]] * 3, max_new_tokens=8, end_ids=(), sampling=sampling
    )
    alone = generate(Plain(tiny), PROMPTS[1], max_new_tokens=8, end_ids=(), sampling=sampling)
    assert [answer.ids for answer in found] == [alone.ids] * 3


def test_there_is_a_seed_for_each_row_or_none(tiny):
    with pytest.raises(DataError, match="2 seeds for 3 prompts; give one for each"):
        generate_batch(Plain(tiny), PROMPTS[:3], max_new_tokens=8, end_ids=(), seeds=[1, 2])


@every_method
def test_one_row_none_and_no_tokens(tiny, name):
    truth = transformers_greedy(tiny, PROMPTS[2], 9)
    method = make_method(name, tiny, PROMPTS[2] + truth)
    assert generate_batch(method, [], max_new_tokens=9, end_ids=()) == []
    (one,) = generate_batch(method, [PROMPTS[2]], max_new_tokens=9, end_ids=())
    assert one.ids == truth
    nothing = generate_batch(method, PROMPTS, max_new_tokens=0, end_ids=())
    assert [(answer.ids, answer.finish_reason) for answer in nothing] == [([], "length")] * 6


def test_one_prompt_that_cannot_be_answered_is_refused_before_the_others_are(monkeypatch, tiny):
    asked = noted(monkeypatch, tiny, "forward", lambda *_, **__: None)
    for prompt, message in [([], "no tokens"), ([1] * 2048, "a prompt of 2048 tokens leaves no")]:
        with pytest.raises(DataError, match=message):
            generate_batch(Plain(tiny), [[1, 2], prompt], max_new_tokens=4, end_ids=())
    assert asked == []


@pytest.fixture
def fresh_memory_is_not_a_number():
    """So that reading what was never written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_is_not_a_number")
@pytest.mark.parametrize("name", GUESSING)
def test_places_that_a_slow_row_has_not_written_yet(name):
    """A row whose guesses are all wrong lies far behind one whose guesses are all right."""
    backbone, truth = case("llama")
    texts = [PROMPTS[2] + truth[2], PROMPTS[3] + [0] * LENGTH]
    found = generate_batch(
        make_method(name, backbone, *texts, noise=0.02),
        PROMPTS[2:4],
        max_new_tokens=LENGTH,
        end_ids=(),
    )
    assert [answer.ids for answer in found] == truth[2:4]
    assert found[0].accepted != found[1].accepted
