"""The next token at any node is what transformers' processors would make of the text up to it."""

import pytest
import torch
from law_case import processors

from medusa_train.decode import Sampling
from medusa_train.decode.chooser import ACCEPT, DRAW, GUESS, Chooser
from medusa_train.ops.accept import NO_TOKEN
from medusa_train.ops.tree import build_tree, chain_tree

SIZE = 40
ENDS = [7, 9]
PROMPTS = [[1, 2, 3, 3], [5], [30, 31, 7, 8, 2, 2]]
ANSWERS = [[4, 4], [6, 1, 9], []]

# A sibling twice as deep as the other, and a path that repeats tokens of prompt, answer and itself
TREE = build_tree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)], num_heads=3, max_rank=2)
NODES = [[0, 10, 11, 12, 3, 10, 12], [0, 6, 5, 9, 9, 5, 6], [0, 2, 2, 2, 2, 2, NO_TOKEN]]

SETTINGS = {
    "nothing": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.0, top_k=5),
    "top-p": Sampling(temperature=1.0, top_p=0.6),
    "min-p": Sampling(temperature=1.0, min_p=0.2),
    "filters": Sampling(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.8),
    "a reward for repetition": Sampling(temperature=1.0, repetition_penalty=0.5),
    "least length": Sampling(temperature=1.0, min_new_tokens=5),
    "banned": Sampling(temperature=1.0, banned_ids=(0, 3, 17)),
    "all": Sampling(
        temperature=0.8,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        min_new_tokens=4,
        banned_ids=(3, 39),
    ),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def make_chooser(sampling, *, seeds=(0, 1, 2), rows=(0, 1, 2), length=20):
    """Prompts are read and answers begun."""
    chooser = Chooser(
        sampling,
        [PROMPTS[row] for row in rows],
        seeds=seeds,
        length=length,
        end_ids=ENDS,
        vocab_size=SIZE,
        device=torch.device("cpu"),
    )
    chooser.note([ANSWERS[row] for row in rows])
    return chooser


def lead(nodes=NODES, tree=TREE):
    """Tokens on the way to each node [B, N, M], and its depth."""
    tokens, trails = torch.tensor(nodes), tree.trails
    trail = torch.where(trails < 0, NO_TOKEN, tokens[:, trails.clamp(min=0)])
    return trail, torch.tensor(tree.depth)


def random_logits(*size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*size, SIZE, generator=generator)


def path_to(row, node):
    """Tokens below the root on the way to a node; a missing guess is none."""
    tokens = [NODES[row][n] for n in TREE.trails[node].tolist() if n >= 0]
    return [token for token in tokens if token != NO_TOKEN]


@every_setting
def test_laws_are_those_of_transformers_at_every_node(setting):
    sampling, logits = SETTINGS[setting], random_logits(3, 7)
    found = make_chooser(sampling).laws(logits, *lead())
    assert found.dtype == torch.float32
    for row, prompt in enumerate(PROMPTS):
        process = processors(sampling, prompt=len(prompt), end_ids=ENDS)
        for node in range(7):
            ids = torch.tensor([prompt + ANSWERS[row] + path_to(row, node)])
            if row == 2 and node == 6:  # the place counts, though there is no token
                ids = torch.cat([ids, ids[:, -1:]], dim=1)
            expected = process(ids, logits[row, node].double().unsqueeze(0)).softmax(-1)  # pyright: ignore
            assert torch.equal(found[row, node] > 0, expected[0] > 0)
            torch.testing.assert_close(found[row, node].double(), expected[0], rtol=1e-4, atol=1e-9)


@every_setting
@pytest.mark.parametrize("greedy", [False, True])
def test_a_node_is_chosen_as_if_one_token_had_come_at_a_time(setting, greedy):
    """Whoever feeds a path token by token to a chooser gets the same at its end."""
    sampling = SETTINGS[setting]
    if greedy:
        sampling = Sampling(
            repetition_penalty=sampling.repetition_penalty,
            min_new_tokens=sampling.min_new_tokens,
            banned_ids=sampling.banned_ids,
        )
    logits = random_logits(3, 7, seed=1)
    chosen = make_chooser(sampling).choose(logits, *lead())
    for row in range(3):
        for node in range(7):
            path = path_to(row, node)
            if len(path) < TREE.depth[node]:
                continue
            alone = make_chooser(sampling, seeds=[row], rows=[row])
            for token in path:
                alone.note([[token]])
            nothing = lead([[0]], chain_tree(0))
            assert alone.choose(logits[row, node].view(1, 1, -1), *nothing) == chosen[row, node]


@every_setting
def test_what_is_excluded_is_never_chosen(setting):
    sampling = SETTINGS[setting]
    chooser = make_chooser(sampling, length=400)
    nothing = lead([[0]] * 3, chain_tree(0))
    for seed in range(60):
        logits = random_logits(3, 1, seed=seed)
        law = chooser.laws(logits, *nothing)
        chosen = chooser.choose(logits, *nothing)
        assert (law.gather(2, chosen.unsqueeze(-1)) > 0).all()
        assert not set(chosen.flatten().tolist()) & set(sampling.banned_ids)
        chooser.note([[11], [11], [11]])


def test_logits_are_left_as_they_were():
    logits = random_logits(3, 7)
    before = logits.clone()
    make_chooser(SETTINGS["all"]).choose(logits, *lead())
    make_chooser(SETTINGS["banned"]).choose(logits, *lead())
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("sampling", "takes_best"),
    [
        (Sampling(), True),
        (Sampling(temperature=1e-5, top_k=3), True),
        (Sampling(temperature=0.5), False),
        (Sampling(banned_ids=(1,)), False),
        (Sampling(min_new_tokens=1), False),
        (Sampling(repetition_penalty=1.1), False),
    ],
)
def test_when_the_models_best_token_is_all_that_is_wanted(sampling, takes_best):
    assert make_chooser(sampling).takes_best is takes_best


def test_banned_ids_that_the_model_does_not_have():
    chooser = make_chooser(Sampling(banned_ids=(2, SIZE, 10**6)))
    logits = random_logits(3, 1)
    logits[..., 2] = 100
    assert (chooser.choose(logits, *lead([[0]] * 3, chain_tree(0))) != 2).all()


# Random numbers


def test_numbers_belong_to_the_seed_and_the_place_alone():
    warm = Sampling(temperature=1.0)
    depth = torch.tensor([0, 1, 1, 4])
    together = make_chooser(warm, seeds=[3, 8, 3])  # answers of 2, 3 and 0 tokens so far
    numbers = together.numbers(DRAW, depth)
    assert torch.equal(numbers[:, 1], numbers[:, 2])
    places = torch.arange(20)
    fresh = make_chooser(warm, seeds=[3], rows=[2]).numbers(DRAW, places)[0]
    assert torch.equal(numbers[0], fresh[2 + depth])
    assert torch.equal(numbers[2], fresh[depth])
    other = make_chooser(warm, seeds=[8], rows=[2]).numbers(DRAW, places)[0]
    assert torch.equal(numbers[1], other[3 + depth])
    together.keep([1])
    assert torch.equal(together.numbers(DRAW, depth), numbers[1:2])


@pytest.mark.parametrize("length", [1, 2, 7, 15, 16, 17, 33])
def test_a_longer_answer_only_adds_numbers(length):
    warm = Sampling(temperature=1.0)
    places = torch.arange(length)
    for stream in (DRAW, ACCEPT, GUESS):
        long = make_chooser(warm, rows=[2], seeds=[5], length=500).numbers(stream, places)
        short = make_chooser(warm, rows=[2], seeds=[5], length=length).numbers(stream, places)
        assert torch.equal(long, short)


def test_numbers_are_even_and_independent():
    """Of seeds in a row, as batches use them: over seeds, over places and over streams."""
    chooser = Chooser(
        Sampling(temperature=1.0),
        [[1]] * 4000,
        seeds=range(4000),
        length=4,
        end_ids=(),
        vocab_size=2,
        device=torch.device("cpu"),
    )
    places = torch.arange(4)
    numbers = torch.stack([chooser.numbers(stream, places) for stream in (DRAW, ACCEPT, GUESS)])
    flat = numbers.movedim(1, -1).reshape(12, 4000)  # of each stream and place, over seeds
    counts = torch.stack([torch.histc(row, 10, 0, 1) for row in flat])
    assert ((counts - 400).abs() < 4.5 * (400 * 0.9) ** 0.5).all()
    likeness = torch.corrcoef(torch.cat([flat[:, 1:], flat[:, :-1]]))  # also with the next seed
    assert (likeness - torch.eye(24)).abs().max() < 4.5 / 4000**0.5


def test_rows_that_stay_keep_their_tokens_and_places():
    sampling = SETTINGS["all"]
    logits = random_logits(3, 7, seed=2)
    chooser = make_chooser(sampling)
    trail, depth = lead()
    everyone = chooser.choose(logits, trail, depth)
    chooser.keep([2, 0])
    assert torch.equal(chooser.choose(logits[[2, 0]], trail[[2, 0]], depth), everyone[[2, 0]])
