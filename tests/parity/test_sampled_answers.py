"""With one seed, every method that fixes its guesses beforehand gives plain sampling's very answer.

And with the processors that change greedy answers, every method gives that of `transformers`.
"""

from functools import cache

import pytest
import torch
from decoding_case import DEPTH, TREES, OracleHeads, make_family, make_tree, mixed_ranks, random_ids
from law_case import make_small, processors
from method_case import METHODS, make_method

from medusa_train.decode import (
    DraftModel,
    Lookup,
    Medusa,
    Plain,
    Sampling,
    generate,
    generate_batch,
)
from medusa_train.model.heads import untrained_heads
from medusa_train.ops.sample import best_ids

PROMPT = random_ids(14, seed=2)
LENGTH = 40
BEYOND = DEPTH * 2 + 2
END = 65

SETTINGS = {
    "temperature": Sampling(temperature=0.8, seed=3),
    "hot": Sampling(temperature=2.0, seed=4),
    "filters": Sampling(temperature=1.2, top_k=30, top_p=0.9, min_p=0.02, seed=5),
    "penalties": Sampling(
        temperature=0.9,
        repetition_penalty=1.4,
        min_new_tokens=20,
        banned_ids=(END + 1, 32, 100),
        seed=6,
    ),
}
GREEDY = {
    "repetition": Sampling(repetition_penalty=1.3),
    "a reward for repetition": Sampling(repetition_penalty=0.8),
    "least length": Sampling(min_new_tokens=5),
    "banned": Sampling(banned_ids=tuple(range(0, 259, 3))),
    "all": Sampling(repetition_penalty=1.2, min_new_tokens=7, banned_ids=(1, 2, 3, 200)),
}


def answer(method, sampling, *, length=LENGTH, end_ids=(), prompt=PROMPT):
    return generate(method, prompt, max_new_tokens=length, end_ids=end_ids, sampling=sampling)


@cache
def case(family, setting):
    """A model, plain sampling's answer, and that text with more behind it."""
    backbone = make_family(family)
    long = answer(Plain(backbone), SETTINGS[setting], length=LENGTH + BEYOND).ids
    return backbone, long[:LENGTH], PROMPT + long


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_seed_decides(setting):
    backbone, truth, text = case("llama", setting)
    assert text[len(PROMPT) :][:LENGTH] == truth  # a longer answer begins alike
    assert len(set(truth)) > 10
    sampling = SETTINGS[setting]
    assert answer(Plain(backbone), sampling).ids == truth
    others = {
        tuple(answer(Plain(backbone), Sampling(temperature=1.0, seed=seed)).ids[:4])
        for seed in range(20)
    }
    assert len(others) > 15


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt2"])
def test_medusa_with_heads_that_are_often_right(family, setting, tree):
    backbone, truth, text = case(family, setting)
    heads = OracleHeads(backbone, text, mixed_ranks(len(text)))
    method = Medusa(backbone, heads, make_tree(TREES[tree]))  # pyright: ignore
    found = answer(method, SETTINGS[setting])
    assert found.ids == truth
    assert sum(found.accepted) > 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_medusa_with_random_heads(setting):
    backbone, truth, _ = case("llama", setting)
    heads = untrained_heads(backbone.lm_head.weight, num_heads=DEPTH)  # pyright: ignore
    assert answer(Medusa(backbone, heads, make_tree(TREES["64 nodes"])), SETTINGS[setting]).ids == (
        truth
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["qwen3-sliding", "gemma3"])
def test_lookup(family, setting):
    backbone, truth, text = case(family, setting)
    found = answer(make_method("lookup", backbone, text), SETTINGS[setting])
    assert found.ids == truth
    assert sum(found.accepted) > 0
    assert answer(Lookup(backbone), SETTINGS[setting]).ids == truth


@pytest.mark.parametrize("name", ["plain", "medusa", "lookup"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_end_ids_and_the_least_length(setting, name):
    """An end id that the answer holds; with the penalties it is held back for 20 tokens."""
    backbone, truth, text = case("llama", setting)
    sampling = SETTINGS[setting]
    for end in truth[3:30:6]:
        expected = answer(Plain(backbone), sampling, end_ids=[end])
        found = answer(make_method(name, backbone, text), sampling, end_ids=[end])
        assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason)
        if sampling.min_new_tokens:
            assert end not in found.ids[:20]
        else:
            assert found.ids == truth[: truth.index(end) + 1]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_drawn_drafts_repeat_themselves_and_keep_to_the_settings(setting, adaptive):
    """Their answer is another one of the same law; with its seed it comes again."""
    backbone, *_ = case("llama", setting)
    sampling = SETTINGS[setting]
    method = make_method("adaptive" if adaptive else "draft", backbone, noise=0.02)
    found = answer(method, sampling, end_ids=[END])
    assert answer(method, sampling, end_ids=[END]).ids == found.ids
    assert sum(found.accepted) > 0
    assert not set(found.ids) & set(sampling.banned_ids)
    assert END not in found.ids[: sampling.min_new_tokens]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("setting", GREEDY)
def test_processors_of_greedy_answers(name, setting):
    """Also inside accepted blocks; the end id is one that would have come early."""
    backbone, sampling = make_family("llama"), GREEDY[setting]
    ends = answer(Plain(backbone), Sampling()).ids[2:4]
    ids = torch.tensor([PROMPT])
    expected = backbone.model.generate(  # pyright: ignore
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        repetition_penalty=float(sampling.repetition_penalty),
        min_new_tokens=sampling.min_new_tokens or None,
        suppress_tokens=list(sampling.banned_ids) or None,
    )[0, len(PROMPT) :].tolist()
    assert expected != answer(Plain(backbone), Sampling(), end_ids=ends).ids
    free = answer(Plain(backbone), sampling).ids
    found = answer(make_method(name, backbone, PROMPT + free), sampling, end_ids=ends)
    assert found.ids == expected
    if name != "plain" and len(expected) > 12:
        assert sum(found.accepted) > 0


@pytest.mark.parametrize("name", ["plain", "draft", "medusa", "lookup"])
def test_many_seeds_say_all_that_is_likely_and_one_seed_the_same_twice(name):
    """Not the best token alone, though laws are worked out: of six ids here three are left."""
    model, sampling = make_small(seed=2, spread=0.7), Sampling(temperature=1.0, top_k=3)
    heads = untrained_heads(model.lm_head.weight, num_heads=DEPTH)  # pyright: ignore
    method = {
        "plain": lambda: Plain(model),
        "draft": lambda: DraftModel(model, make_small(seed=3), gamma=2),
        "medusa": lambda: Medusa(model, heads, make_tree(TREES["grown"], max_rank=6)),
        "lookup": lambda: Lookup(model, gamma=2, longest_ngram=1),
    }[name]()
    settings = dict(max_new_tokens=3, end_ids=(), sampling=sampling, seeds=list(range(300)))
    first, second = (
        [answer.ids for answer in generate_batch(method, [LOOP] * 300, **settings)]
        for _ in range(2)
    )
    assert first == second
    for place in range(3):
        assert len({ids[place] for ids in first}) >= 3
    assert len({ids[0] for ids in first}) == 3


LOOP = [1, 2, 1, 2, 1, 2]


@cache
def stepwise(sampling, length, end_ids):
    """The small model's greedy answer, one token at a time without a cache."""
    model, text = make_small(seed=4), list(LOOP)
    process = processors(sampling, prompt=len(LOOP), end_ids=end_ids)
    for _ in range(length):
        ids = torch.tensor([text])
        with torch.no_grad():
            hidden = model.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[:, -1]
        text.append(int(best_ids(process(ids, model.logits(hidden)))))  # pyright: ignore
        if text[-1] in end_ids:
            break
    return text[len(LOOP) :]


@pytest.mark.parametrize("name", ["plain", "draft", "medusa", "lookup"])
@pytest.mark.parametrize("penalty", [1.0, 1.05, 1.3, 2.0, 5.0])
def test_a_model_that_would_run_in_circles(name, penalty):
    """Six ids, each of which has been said already: guesses change what is penalised."""
    model, sampling = make_small(seed=4), Sampling(repetition_penalty=penalty, min_new_tokens=5)
    heads = untrained_heads(model.lm_head.weight, num_heads=DEPTH)  # pyright: ignore
    tree = make_tree(TREES["grown"], max_rank=6)
    method = {
        "plain": lambda: Plain(model),
        "draft": lambda: DraftModel(model, make_small(seed=4, spread=1.4), gamma=4),
        "medusa": lambda: Medusa(model, heads, tree),
        "lookup": lambda: Lookup(model, gamma=4, longest_ngram=1),
    }[name]()
    for ends in [(), (0,), (1,), (2,), (3,), (4,), (5,)]:
        found = answer(method, sampling, prompt=LOOP, end_ids=ends, length=30)
        assert found.ids == stepwise(sampling, 30, ends)
