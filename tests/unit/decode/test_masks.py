"""Masks in every precision and attention: rows of unequal length, trees, padding, no NaN.

And what is accepted in part leaves a cache that reads like a fresh prompt, also behind a window.
"""

from functools import cache

import pytest
import torch
from decoding_case import make_family, make_tree, random_ids

from medusa_train.decode.forward import Reader
from medusa_train.model.backbone import Backbone
from medusa_train.ops.tree import chain_tree

TREE = make_tree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
PROMPTS = [random_ids(length, seed=length) for length in (1, 9, 20)]
# Of each row: nothing but the root, a path to the middle, a path to a leaf
ROUNDS = [[[0], [0, 1, 4], [0, 2, 5]], [[0, 1, 3, 6], [0], [0, 2]], [[0], [0], [0, 1, 3, 6]]]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@cache
def backbone_of(family, dtype=torch.float32, attention=None, **settings):
    if attention is not None:
        settings["attn_implementation"] = attention
    made = make_family(family, **settings)
    return Backbone(made.model.to(dtype), made.tokenizer, name=made.name)  # pyright: ignore


def path_to(node):
    return [n for n in [0, *TREE.trails[node].tolist()] if n >= 0]


@torch.inference_mode()
def check(found_with, judged_by, *, tolerance, tree=TREE, prompts=PROMPTS, rounds=ROUNDS):
    """Every node of every row in every round against its whole path read at once."""
    reader = Reader(found_with)
    last = reader.prefill(prompts, capacity=80)
    texts = [list(prompt) for prompt in prompts]
    compare(last, texts, judged_by, tolerance)
    size = len(tree.depth)
    for number, paths in enumerate(rounds):
        nodes = [random_ids(size, seed=100 * number + row) for row in range(len(texts))]
        found = reader.read(torch.tensor(nodes), tree)
        for row, text in enumerate(texts):
            ways = [text + [nodes[row][n] for n in path_to(node)] for node in range(size)]
            compare(found[row], ways, judged_by, tolerance)
        reader.cache.commit(paths)
        for text, row, path in zip(texts, nodes, paths, strict=True):
            text += [row[node] for node in path]
        assert reader.cache.lengths == [len(text) for text in texts]


def compare(found, texts, judge, tolerance):
    """Final hidden states, [T, D], against those at the end of each text."""
    assert found.isfinite().all()
    for state, text in zip(found, texts, strict=True):
        ids = torch.tensor([text])
        expected = judge.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))[0, -1]
        assert (state.float() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3-sliding"])
def test_every_precision_and_attention_reads_alike(family, dtype, attention):
    check(
        backbone_of(family, dtype, attention),
        backbone_of(family),
        tolerance=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_capped_scores_and_learned_positions(family, dtype):
    check(backbone_of(family, dtype), backbone_of(family), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["mistral-sliding", "qwen2-sliding", "gemma3", "phi3-sliding"])
def test_a_short_window_and_partial_acceptance(family):
    """Window 6: it ends inside the prompt, inside the answer and inside the tree."""
    backbone = backbone_of(family, sliding_window=6)
    prompts = [random_ids(length, seed=7) for length in (13, 5, 6)]
    rounds = [[[0, 2, 5], [0], [0, 1, 3, 6]], *ROUNDS]
    check(backbone, backbone, tolerance=TOLERANCE[torch.float32], prompts=prompts, rounds=rounds)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_a_chain_longer_than_the_window(family):
    backbone = backbone_of(family)
    tree = chain_tree(12)
    with torch.inference_mode():
        reader = Reader(backbone)
        reader.prefill([[5, 6, 7]], capacity=40)
        ids = random_ids(13)
        (found,) = reader.read(torch.tensor([ids]), tree)
        texts = [[5, 6, 7, *ids[: end + 1]] for end in range(13)]
        compare(found, texts, backbone, TOLERANCE[torch.float32])


@torch.inference_mode()
def test_one_reader_for_short_and_long_prompts(tiny):
    """Nothing is laid out for the first of them."""
    reader = Reader(tiny)
    for length in (3, 300, 1, 40):
        prompt = random_ids(length, seed=length)
        compare(reader.prefill([prompt], capacity=length + 7), [prompt], tiny, 2e-5)
        (found,) = reader.read(torch.tensor([[9] * 7]), TREE)
        compare(found[:2], [[*prompt, 9], [*prompt, 9, 9]], tiny, 2e-5)


@torch.inference_mode()
def test_rows_that_leave_take_their_length_with_them(tiny):
    reader = Reader(tiny)
    reader.prefill(PROMPTS, capacity=40)
    reader.cache.keep_rows([2, 0])
    found = reader.read(torch.tensor([[9], [8]]), chain_tree(0))[:, 0]
    compare(found, [[*PROMPTS[2], 9], [*PROMPTS[0], 8]], tiny, 2e-5)
