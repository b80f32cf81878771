"""Acceptance by sampling keeps the target's law: 200,000 draws each, and faults that must be seen.

Laws depend on the tokens before. What acceptance leaves open of three tokens, plain sampling adds.

Legend: R draws, N nodes, V vocabulary.
"""

from functools import cache

import pytest
import torch
from law_case import DRAWS, SIGMAS, off, processors, random_numbers
from torch import Tensor

from medusa_train.ops.accept import follow, reject
from medusa_train.ops.sample import Sampling, draw, probabilities
from medusa_train.ops.tree import build_tree

SIZE = 5
AS_IT_IS = Sampling(temperature=1.0)
SETTINGS = {
    "temperature 1": AS_IT_IS,
    "temperature 0.5": Sampling(temperature=0.5),
    "temperature 2": Sampling(temperature=2.0),
    "greedy": Sampling(temperature=1e-6),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "all": Sampling(temperature=0.8, top_k=4, top_p=0.9, min_p=0.05),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


@cache
def logits(seed: int) -> list[Tensor]:
    """After nothing, one token and two tokens: [V], [V, V], [V, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn([SIZE] * depth, generator=generator) for depth in (1, 2, 3)]


def laws(seed: int, sampling: Sampling) -> list[Tensor]:
    return [probabilities(table, sampling) for table in logits(seed)]


def exact(sampling: Sampling) -> Tensor:
    """Of three tokens, through transformers' processors, [V, V, V]."""
    joint = torch.ones((), dtype=torch.float64)
    for table in logits(0):
        rows = table.double().reshape(-1, SIZE)
        if sampling.greedy:
            rows = torch.where(rows == rows.amax(-1, keepdim=True), 0.0, float("-inf"))
        processed = processors(sampling)(torch.zeros(len(rows), 1).long(), rows)  # pyright: ignore
        joint = joint.unsqueeze(-1) * processed.softmax(-1).reshape(table.shape)
    return joint


def completed(tokens: Tensor, known: Tensor, sampling: Sampling) -> Tensor:
    """Tokens [R, 3], of which the first `known` [R] stay; the rest is sampled plainly."""
    numbers = random_numbers(len(tokens), 3, seed=99)
    for place, table in enumerate(laws(0, sampling)):
        law = table[tuple(tokens[:, before] for before in range(place))].expand(len(tokens), SIZE)
        added = draw(law, numbers[:, place])
        tokens[:, place] = torch.where(place < known, tokens[:, place], added)
    return tokens


# Two guesses in a row that the draft has drawn


def softmax_of_the_rest(target, draft, guesses, accept, again):
    accepted, _ = reject(target, draft, guesses, accept, again)
    rest = (target[:, :-1] - draft).clamp(min=0).softmax(-1)
    return accepted, draw(torch.cat([rest, target[:, -1:]], 1), again)


def fresh_draw_after_a_mismatch(target, draft, guesses, accept, again):
    same = draw(target[:, :-1], accept) == guesses
    return same.int().cumprod(-1).sum(-1), draw(target, again)


def from_drawn_drafts(sampling: Sampling, *, pick=draw, verify=reject, offered=None, wanted=None):
    """Three tokens, [R, 3]; each setting but the first puts a fault in.

    Args:
        sampling: of target and draft.
        pick: how the draft takes its guesses.
        verify: how they are accepted.
        offered: sampling of the draft's laws as they reach `verify`.
        wanted: that of the target's.
    """
    guess, accept, again = random_numbers(3, DRAWS, 3)
    drafts = laws(1, sampling)
    first = pick(drafts[0].expand(DRAWS, SIZE), guess[:, 0])
    second = pick(drafts[1][first], guess[:, 1])
    shown, truth = laws(1, offered or sampling), laws(0, wanted or sampling)
    accepted, after = verify(
        torch.stack([truth[0].expand(DRAWS, SIZE), truth[1][first], truth[2][first, second]], 1),
        torch.stack([shown[0].expand(DRAWS, SIZE), shown[1][first]], 1),
        torch.stack([first, second], 1),
        accept[:, :2],
        again,
    )
    tokens = torch.stack([first, second, first], 1)
    following = after.gather(1, accepted.unsqueeze(1))
    return completed(tokens.scatter(1, accepted.unsqueeze(1), following), accepted + 1, sampling)


@every_setting
def test_drawn_drafts(setting):
    sampling = SETTINGS[setting]
    assert off(from_drawn_drafts(sampling), exact(sampling)) <= SIGMAS


def argmax(law: Tensor, numbers: Tensor) -> Tensor:
    return law.argmax(-1)


FAULTS = {
    "the draft takes its best token": dict(pick=argmax),
    "softmax of the rest": dict(verify=softmax_of_the_rest),
    "a fresh draw after a mismatch": dict(verify=fresh_draw_after_a_mismatch),
    "the draft's law without the settings": dict(offered=AS_IT_IS),
    "the target's law without the settings": dict(wanted=AS_IT_IS),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("setting", ["temperature 0.5", "top-k", "top-p", "all"])
def test_faults_with_drawn_drafts_are_seen(setting, fault):
    sampling = SETTINGS[setting]
    assert off(from_drawn_drafts(sampling, **FAULTS[fault]), exact(sampling)) > 3 * SIGMAS


# A tree of fixed guesses: two siblings with children, one token below two parents

TREE = build_tree([(0,), (1,), (0, 0), (0, 1), (1, 0)], num_heads=2, max_rank=2)
TOKENS = [0, 2, 0, 1, 3, 1]
# Children on the way to each leaf alone
PATHS = [
    [[child for child in below if child in trail] for below in TREE.children]
    for trail, below in zip(TREE.trails.tolist(), TREE.children, strict=True)
    if not below
]


def chosen_in_tree(sampling: Sampling, numbers: Tensor) -> Tensor:
    """What the target draws at each node with the numbers of its place, [R, 3] -> [R, N]."""
    tables, at_nodes = laws(0, sampling), []
    for node in range(len(TOKENS)):
        trail = [TOKENS[n] for n in TREE.trails[node].tolist() if n >= 0]
        at_nodes.append(tables[len(trail)][tuple(trail)])
    return draw(torch.stack(at_nodes).expand(len(numbers), -1, -1), numbers[:, TREE.depth])


def emitted(chosen, following, children=TREE.children) -> list[int]:
    """Tokens on the accepted path, and the one that follows it."""
    path = follow(children, TOKENS, chosen)
    return [*(TOKENS[node] for node in path[1:]), following[path[-1]]]


def from_tree(sampling: Sampling, *, draws=1, rule=lambda chosen: emitted(chosen, chosen)):
    """Three tokens, [R, 3].

    Args:
        sampling: of the target.
        draws: how often each node is decided.
        rule: from these draws of one row, one after the other, to the tokens that are emitted.
    """
    chosen = torch.cat(
        [chosen_in_tree(sampling, random_numbers(DRAWS, 3, seed=seed)) for seed in range(draws)], 1
    )
    digits = SIZE ** torch.arange(chosen.shape[1])  # each kind of row is worked out once
    kinds, kind = (chosen * digits).sum(1).unique(return_inverse=True)
    rows = [rule(row) for row in (kinds.unsqueeze(1) // digits % SIZE).tolist()]
    known = torch.tensor([len(row) for row in rows])[kind]
    return completed(torch.tensor([[*row, 0, 0][:3] for row in rows])[kind], known, sampling)


def fresh_draw_after_the_path(chosen):
    """The first draws decide on the path, others follow it."""
    return emitted(chosen[: len(TOKENS)], chosen[len(TOKENS) :])


def longest_of_a_draw_per_path(chosen):
    """Each path to a leaf draws for itself, also at a node that it shares with another."""
    found = []
    for i, alone in enumerate(PATHS):
        drawn = chosen[i * len(TOKENS) : (i + 1) * len(TOKENS)]
        found.append(emitted(drawn, drawn, alone))
    return max(found, key=len)


@every_setting
def test_a_tree(setting):
    sampling = SETTINGS[setting]
    assert off(from_tree(sampling), exact(sampling)) <= SIGMAS


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("temperature 1", dict(draws=2, rule=fresh_draw_after_the_path)),
        ("top-k", dict(draws=2, rule=fresh_draw_after_the_path)),
        ("top-k", dict(draws=len(PATHS), rule=longest_of_a_draw_per_path)),
        ("top-p", dict(draws=len(PATHS), rule=longest_of_a_draw_per_path)),
    ],
)
def test_faults_in_a_tree_are_seen(setting, fault):
    sampling = SETTINGS[setting]
    assert off(from_tree(sampling, **fault), exact(sampling)) > 3 * SIGMAS


def test_a_tree_drawn_without_the_settings_is_seen():
    assert off(from_tree(AS_IT_IS), exact(SETTINGS["temperature 0.5"])) > 3 * SIGMAS


# Pairs of laws by value

PAIRS = {
    "close": ([0.5, 0.25, 0.15, 0.1], [0.4, 0.4, 0.1, 0.1]),
    "identical": ([0.45, 0.35, 0.2, 0.0], [0.45, 0.35, 0.2, 0.0]),
    "disjoint": ([0.0, 0.3, 0.0, 0.7], [0.6, 0.0, 0.4, 0.0]),
    "one-hot target": ([0.0, 0.0, 1.0, 0.0], [0.3, 0.3, 0.2, 0.2]),
    "one-hot draft": ([0.3, 0.3, 0.2, 0.2], [0.0, 0.0, 1.0, 0.0]),
    "one-hot both, same": ([0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]),
    "one-hot both, different": ([0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    "draft zero where the target is not": ([0.35, 0.3, 0.25, 0.1], [0.75, 0.25, 0.0, 0.0]),
    "target cut where the draft is not": ([0.6, 0.4, 0.0, 0.0], [0.3, 0.3, 0.3, 0.1]),
    "rare and likely": ([1 - 3e-4, 1e-4, 2e-4, 0.0], [1 - 3e-4, 2e-4, 0.0, 1e-4]),
}


def from_pair(target, draft, *, pick=draw, verify=reject):
    """One guess, or what comes in its place, [R, 1]."""
    guess, accept, again = random_numbers(3, DRAWS, 2, seed=5)
    target, draft = (torch.tensor(law).expand(DRAWS, 4) for law in (target, draft))
    guesses = pick(draft, guess[:, 0])
    accepted, after = verify(
        torch.stack([target, target], 1),
        draft.unsqueeze(1),
        guesses.unsqueeze(1),
        accept[:, :1],
        again,
    )
    return torch.where(accepted > 0, guesses, after[:, 0]).unsqueeze(1)


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_laws(pair):
    target, draft = PAIRS[pair]
    assert off(from_pair(target, draft), torch.tensor(target).double()) <= SIGMAS


@pytest.mark.parametrize(
    ("pair", "fault"),
    [
        ("close", dict(verify=softmax_of_the_rest)),
        ("disjoint", dict(verify=softmax_of_the_rest)),
        ("one-hot target", dict(verify=softmax_of_the_rest)),
        ("draft zero where the target is not", dict(verify=softmax_of_the_rest)),
        ("target cut where the draft is not", dict(verify=softmax_of_the_rest)),
        ("close", dict(verify=fresh_draw_after_a_mismatch)),
        ("identical", dict(verify=fresh_draw_after_a_mismatch)),
        ("close", dict(pick=argmax)),
        ("identical", dict(pick=argmax)),
    ],
)
def test_faults_with_pairs_of_laws_are_seen(pair, fault):
    target, draft = PAIRS[pair]
    assert off(from_pair(target, draft, **fault), torch.tensor(target).double()) > 3 * SIGMAS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_over_thirty_nats(dtype):
    """Both laws are float32; a guess of no probability in the target is never emitted."""
    scores = torch.tensor([[10.0, 9.5, 3.0, -20.0, 9.0], [9.5, 10.0, -20.0, 8.0, 3.0]]).to(dtype)
    cut = Sampling(temperature=1.0, top_p=0.999)
    target = probabilities(scores[0], cut)
    assert (target > 0).tolist() == [True, True, False, False, True]
    draft = probabilities(scores[1], AS_IT_IS)
    guess, accept, again = random_numbers(3, DRAWS, 2)
    guesses = draw(draft.expand(DRAWS, 5), guess[:, :1].squeeze(1)).unsqueeze(1)
    accepted, after = reject(
        target.expand(DRAWS, 2, 5), draft.expand(DRAWS, 1, 5), guesses, accept[:, :1], again
    )
    found = torch.where(accepted.unsqueeze(1) > 0, guesses, after[:, :1])
    assert off(found, target.double()) <= SIGMAS
