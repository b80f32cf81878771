import copy

import pytest
import torch
from decoding_case import (
    DEPTH,
    TREES,
    OracleHeads,
    answer_of,
    expected_acceptances,
    grown,
    make_llama,
    make_tree,
    mixed_ranks,
    noted,
    random_ids,
    transformers_greedy,
)

from medusa_train.decode import Medusa, Typical
from medusa_train.decode.medusa import HeadGuesses
from medusa_train.errors import ModelError
from medusa_train.model.heads import untrained_heads
from medusa_train.ops.tree import chain, chain_tree

PROMPT = random_ids(10)
LENGTH = 60


@pytest.fixture(scope="module")
def text(tiny):
    return PROMPT + transformers_greedy(tiny, PROMPT, LENGTH + 12)


def make_heads(tiny, lm_head, token_map=None, *, num_heads=3):
    """Heads whose blocks differ, so that no two heads guess alike."""
    heads = untrained_heads(
        tiny.lm_head.weight, num_heads=num_heads, lm_head=lm_head, token_map=token_map
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in heads.named_parameters():
        if "layers" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return heads


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("seed", [1, 2])
def test_acceptances_are_those_that_the_ranks_allow(tiny, text, tree, seed):
    ranks = mixed_ranks(len(text), seed=seed)
    laid_out = make_tree(TREES[tree])
    method = Medusa(tiny, OracleHeads(tiny, text, ranks), laid_out)  # pyright: ignore
    found = answer_of(method, PROMPT, LENGTH)
    assert found.ids == text[len(PROMPT) :][:LENGTH]
    expected = expected_acceptances(laid_out, ranks, prompt=len(PROMPT), length=LENGTH)
    assert found.accepted == expected
    assert LENGTH / (found.steps + 1) > 1.3


def test_heads_that_are_always_right_fill_every_step(tiny, text):
    ranks = torch.full((len(text), DEPTH), 2)
    choices = [path for depth in range(1, 5) for path in [(2,) * depth, (*(2,) * (depth - 1), 0)]]
    method = Medusa(tiny, OracleHeads(tiny, text, ranks), make_tree(choices))  # pyright: ignore
    found = answer_of(method, PROMPT, LENGTH)
    assert found.ids == text[len(PROMPT) :][:LENGTH]
    assert found.accepted == [4] * 12
    assert method.longest_block == 5


@pytest.mark.parametrize("lm_head", ["own", "shared", "reduced"])
def test_any_lm_head_decodes_exactly(tiny, text, lm_head):
    token_map = torch.tensor(sorted(set(text))) if lm_head == "reduced" else None
    heads = make_heads(tiny, lm_head, token_map)
    size = heads.shape.head_vocab_size
    tree = make_tree([p for p in grown(50) if len(p) < 4], num_heads=3, max_rank=size)
    found = answer_of(Medusa(tiny, heads, tree), PROMPT, LENGTH)
    assert found.ids == text[len(PROMPT) :][:LENGTH]


@pytest.mark.parametrize("lm_head", ["own", "shared", "reduced"])
def test_guesses_are_the_best_tokens_of_each_head(tiny, lm_head):
    token_map = torch.arange(3, 90, 2) if lm_head == "reduced" else None
    heads = make_heads(tiny, lm_head, token_map)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(4, tiny.hidden_size, generator=generator)
    ranks = [3, 1, 2]
    with torch.no_grad():
        guesses = HeadGuesses(tiny, heads, ranks)
        found = guesses(states)
        assert torch.equal(guesses(states[1:2]), found[1:2])
        same = HeadGuesses(tiny, heads, [2, 2, 2]).each_head(states)
    expected = []
    for k, rank in enumerate(ranks):
        full = tiny.lm_head(heads[k].layers(states)).detach()[:, :259]
        if token_map is not None:
            outside = torch.ones(259, dtype=torch.bool).index_fill(0, token_map, False)
            full[:, outside] = float("-inf")
        expected.append(full.topk(rank).indices)
        assert torch.equal(same[k], full.topk(2).indices)
    assert torch.equal(found, torch.cat(expected, dim=1))


def test_heads_see_one_state_a_step_and_the_lm_head_every_node_once(monkeypatch, tiny):
    """Of the prompt, the LM head sees the last position alone."""
    heads, asked = make_heads(tiny, "own"), []

    def for_decoding(*, shared):
        return lambda hidden: asked.append(len(hidden)) or heads[1].logits(hidden)

    monkeypatch.setattr(heads[0], "for_decoding", for_decoding)
    rows = noted(monkeypatch, tiny, "logits", lambda hidden: hidden.numel() // tiny.hidden_size)
    found = answer_of(Medusa(tiny, heads, make_tree(chain(3), num_heads=3)), PROMPT, 10)
    assert rows == [1] + [4] * found.steps
    assert asked == [1] * found.steps


def test_the_tree_costs_no_context(tiny):
    method = Medusa(tiny, make_heads(tiny, "own"), make_tree(chain(3), num_heads=3))
    assert method.max_positions == 2048
    assert method.longest_block == 4


def test_a_tree_without_guesses_is_plain_decoding(tiny, text):
    """The smallest a search for trees may come to."""
    found = answer_of(Medusa(tiny, make_heads(tiny, "own"), chain_tree(0)), PROMPT, 9)
    assert (found.ids, found.accepted) == (text[len(PROMPT) :][:9], [0] * 8)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"epsilon": -0.1}, "epsilon must be from 0 to 1, got -0.1"),
        ({"epsilon": 1.1}, "epsilon must be"),
        ({"epsilon": float("nan")}, "epsilon must be"),
        ({"delta": -1.0}, "delta must be a finite number, 0 or more, got -1.0"),
        ({"delta": float("nan")}, "delta must be"),
        ({"delta": float("inf")}, "delta must be"),
    ],
)
def test_a_typical_acceptance_that_makes_no_sense_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Typical(**numbers)


def test_heads_and_trees_that_do_not_fit_are_refused(tiny):
    """In words and at once: later it would be an index of the device, or other heads' guesses."""
    heads, tree = make_heads(tiny, "own"), make_tree(chain(3), num_heads=3)
    reduced = make_heads(tiny, "reduced", torch.arange(4))
    other = make_llama(hidden_size=16)
    for made, message in [
        (lambda: Medusa(other, heads, tree), "heads for hidden size 32, the model has 16"),
        (
            lambda: Medusa(make_llama(vocab_size=300), heads, tree),
            "heads for a vocabulary of 320, the model has 300",
        ),
        (
            lambda: Medusa(tiny, copy.deepcopy(heads).bfloat16(), tree),
            r"heads in torch.bfloat16, the model is in torch.float32: use heads.to\(model.dtype\)",
        ),
        (
            lambda: Medusa(tiny, heads, make_tree(chain(4), num_heads=4)),
            "a tree 4 deep needs as many heads, there are 3",
        ),
        (
            lambda: Medusa(tiny, reduced, make_tree([(4,)], num_heads=3)),
            "the tree asks a head for 5 tokens, each has 4",
        ),
        (
            lambda: Medusa(tiny, heads, make_tree([(259,)], num_heads=3, max_rank=320)),
            "the tree asks a head for 260 tokens, each has 259",  # the rest is padding
        ),
    ]:
        with pytest.raises(ModelError, match=message):
            made()
