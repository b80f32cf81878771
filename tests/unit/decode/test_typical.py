"""Typical acceptance: lossy by name, by the paper's rule, and greedy where nothing is drawn."""

import math

import pytest
import torch
from decoding_case import (
    TREES,
    OracleHeads,
    answer_of,
    make_tree,
    mixed_ranks,
    random_ids,
    transformers_greedy,
)
from law_case import make_small, processors

from medusa_train.decode import Medusa, Plain, Sampling, Typical, generate, generate_batch
from medusa_train.decode.chooser import Chooser
from medusa_train.decode.medusa import HeadGuesses
from medusa_train.model.heads import untrained_heads
from medusa_train.ops.tree import build_tree

PROMPT = random_ids(12, seed=3)
LENGTH = 40


def test_it_is_marked_as_lossy_and_nothing_else_is(tiny):
    heads = untrained_heads(tiny.lm_head.weight, num_heads=4)
    tree = make_tree(TREES["chain"], num_heads=4)
    exact, lossy = Medusa(tiny, heads, tree), Medusa(tiny, heads, tree, typical=Typical())
    assert (exact.lossy, lossy.lossy, Plain(tiny).lossy) == (False, True, False)
    assert (exact.name, lossy.name) == ("medusa", "medusa/typical")
    assert (Typical().epsilon, Typical().delta) == (0.09, 0.3)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_without_temperature_it_is_greedy(tiny, tree, temperature):
    truth = transformers_greedy(tiny, PROMPT, LENGTH + 12)
    text = PROMPT + truth
    heads = OracleHeads(tiny, text, mixed_ranks(len(text)))
    made = [
        Medusa(tiny, heads, make_tree(TREES[tree]), typical=rule)  # pyright: ignore
        for rule in (None, Typical())
    ]
    sampling = Sampling(temperature=temperature)
    exact, lossy = (
        generate(method, PROMPT, max_new_tokens=LENGTH, end_ids=(), sampling=sampling)
        for method in made
    )
    assert lossy.ids == exact.ids == truth[:LENGTH]
    assert lossy.accepted == exact.accepted


# Against the rule written out, on a small model

TREE = build_tree(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 0, 0), (1, 0, 0)],
    num_heads=3,
    max_rank=6,
)


def law_after(model, text, sampling):
    """Without a cache, through transformers' processors, [V]."""
    ids = torch.tensor([text])
    with torch.no_grad():
        hidden = model.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[:, -1]
        process = processors(sampling)
        law = process(ids, model.logits(hidden).double()).softmax(-1)[0]  # pyright: ignore
    return hidden, law


def expected_path(model, guesses, text, sampling, rule):
    """Tokens that the rule accepts behind a text, whose last token is certain."""
    hidden, _ = law_after(model, text[:-1], sampling)
    ranked, starts = guesses(hidden)[0].tolist(), [0, 3, 5]
    best = (0, 0.0, [])
    for path in TREE.paths:
        tokens = [ranked[starts[depth] + rank] for depth, rank in enumerate(path)]
        likelihood, so_far = 0.0, list(text)
        for token in tokens:
            _, law = law_after(model, so_far, sampling)
            entropy = -sum(p * math.log(p) for p in law.tolist() if p > 0)
            if not law[token] > min(rule.epsilon, rule.delta * math.exp(-entropy)):
                break
            likelihood += math.log(law[token])
            so_far.append(token)
        else:
            if (len(tokens), likelihood) > best[:2]:
                best = (len(tokens), likelihood, tokens)
    return best[2]


@pytest.mark.parametrize("rule", [Typical(), Typical(epsilon=0.3, delta=0.9)])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=1.0, top_k=3, seed=3),
        Sampling(temperature=1.0, repetition_penalty=1.5, seed=4),
    ],
)
def test_each_step_accepts_what_the_rule_says(rule, sampling):
    model = make_small(seed=2, spread=0.7)
    heads = untrained_heads(model.lm_head.weight, num_heads=3)  # pyright: ignore
    generator = torch.Generator().manual_seed(5)
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    guesses = HeadGuesses(model, heads, TREE.ranks_by_depth)
    method, text, lengths = Medusa(model, heads, TREE, typical=rule), [1, 3, 0], set()
    chooser = Chooser(
        sampling,
        [text],
        seeds=[sampling.seed],
        length=50,
        end_ids=(),
        vocab_size=model.vocab_size,
        device=model.device,
    )
    text += method.start([text], room=50, chooser=chooser)
    while len(text) < 40:
        expected = expected_path(model, guesses, text, sampling, rule)
        (block,) = method.step(text[-1:])
        assert block[:-1] == expected
        _, law = law_after(model, text + expected, sampling)
        assert law[block[-1]] > 0
        text += block
        lengths.add(len(expected))
    assert len(lengths) > 1


def test_rows_equal_their_own_runs(tiny):
    prompts = [random_ids(length, seed=length) for length in (1, 9, 30)]
    truth = [answer_of(Plain(tiny), prompt, LENGTH + 12).ids for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, truth, strict=True)]
    heads = OracleHeads(tiny, texts[0], mixed_ranks(90), *texts[1:])
    method = Medusa(tiny, heads, make_tree(TREES["deep"]), typical=Typical())  # pyright: ignore
    sampling = Sampling(temperature=0.3, seed=2)
    settings = dict(max_new_tokens=LENGTH, end_ids=(), sampling=sampling)
    found = generate_batch(method, prompts, **settings)
    alone = [generate(method, prompt, **settings) for prompt in prompts]
    assert [answer.ids for answer in found] == [answer.ids for answer in alone]
    assert [answer.accepted for answer in found] == [answer.accepted for answer in alone]
    assert max(map(max, [answer.accepted for answer in found])) > 1
