from types import SimpleNamespace

import pytest
import torch
from decoding_case import WINDOW, make_family, make_tree, noted, random_ids

from medusa_train.decode.forward import Block, Reader, layer_windows
from medusa_train.errors import ModelError
from medusa_train.ops.tree import chain_tree

# Three siblings at the root, and cousins two levels further down
WIDE = make_tree(
    [
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 0, 0),
    ]
)


def model_with(**settings):
    """What `layer_windows` and `Block` read of a model."""
    return SimpleNamespace(
        config=SimpleNamespace(model_type="made_up", **settings),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=100,
        position_bias=lambda distance: torch.zeros(1, *distance.shape),
    )


def path_to(tree, node):
    """Nodes from the root to this one."""
    nodes = [node]
    while tree.parent[nodes[-1]] >= 0:
        nodes.append(tree.parent[nodes[-1]])
    return nodes[::-1]


@pytest.mark.parametrize(
    "family", ["llama", "mistral-sliding", "qwen3-sliding", "gemma2", "gemma3", "gpt2"]
)
@pytest.mark.parametrize("length", [1, WINDOW, 19])
def test_each_node_reads_as_if_its_path_were_all_there_is(family, length):
    backbone = make_family(family)
    prompt = random_ids(length)
    nodes = random_ids(WIDE.nodes + 1, seed=1)
    reader = Reader(backbone)
    with torch.no_grad():
        reader.prefill([prompt], capacity=length + len(nodes))
        (found,) = reader.read(torch.tensor([nodes]), WIDE)
        for node in range(len(nodes)):
            alone = torch.tensor([prompt + [nodes[n] for n in path_to(WIDE, node)]])
            expected = backbone.hidden_states(alone, torch.ones_like(alone, dtype=torch.bool))
            torch.testing.assert_close(found[node], expected[0, -1], rtol=1e-4, atol=1e-5)


def test_what_was_committed_reads_like_a_fresh_prompt(tiny):
    prompt, nodes, path = random_ids(9), random_ids(WIDE.nodes + 1, seed=1), path_to(WIDE, 8)
    kept = prompt + [nodes[n] for n in path]
    used, fresh = Reader(tiny), Reader(tiny)
    with torch.no_grad():
        used.prefill([prompt], capacity=40)
        used.read(torch.tensor([nodes]), WIDE)
        used.cache.commit([path])
        fresh.prefill([kept], capacity=40)
        found, expected = (r.read(torch.tensor([[77]]), chain_tree(0)) for r in (used, fresh))
    assert used.cache.lengths == [len(kept)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_are_the_cached_length_plus_the_depth(monkeypatch, tiny):
    asked = noted(monkeypatch, tiny, "forward", lambda _, positions, **__: positions.tolist())
    reader = Reader(tiny)
    with torch.no_grad():
        reader.prefill([[5, 6, 7]], capacity=20)
        reader.read(torch.zeros(1, 12, dtype=torch.long), WIDE)
    assert asked == [[[0, 1, 2]], [[3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 7]]]


def test_positions_end_with_the_context():
    """What lies beyond cannot be part of an answer; learned positions have no row for it."""
    block = Block(model_with(), make_tree([(0,), (1,), (0, 0)]), 10)  # pyright: ignore
    found = block.positions(torch.tensor([3, 97, 98, 99]))
    assert found.tolist() == [[3, 4, 4, 5], [97, 98, 98, 99], [98, 99, 99, 99], [99] * 4]


def seen(mask, row=0):
    return [node.eq(0).nonzero().flatten().tolist() for node in mask[row, 0]]


def mask_of(model, tree, length):
    """Of one row with so many certain tokens."""
    return Block(model, tree, 10).mask([length], length + len(tree.depth))


def test_a_mask_shows_the_prefix_and_the_ancestors():
    tree = make_tree([(0,), (1,), (0, 0)])
    found = mask_of(model_with(), tree, 2)
    assert seen(found) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert seen(mask_of(model_with(), tree, 0)) == [[0], [0, 1], [0, 2], [0, 1, 3]]
    assert mask_of(model_with(), tree, 10).shape == (1, 1, 4, 14)


def test_each_row_sees_its_own_prefix_and_nothing_behind_its_own_block():
    tree = make_tree([(0,), (1,), (0, 0)])
    mask = Block(model_with(), tree, 10).mask([2, 0, 4], 9)  # pyright: ignore
    assert mask.shape == (3, 1, 4, 9)  # pyright: ignore
    assert seen(mask, 0) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert seen(mask, 1) == [[0], [0, 1], [0, 2], [0, 1, 3]]
    assert seen(mask, 2)[3] == [0, 1, 2, 3, 4, 5, 7]


def test_of_all_places_a_row_sees_the_same():
    """As compiled forwards ask for, whose shapes must not change."""
    tree = make_tree([(0,), (1,), (0, 0)])
    block = Block(model_with(), tree, 10)  # pyright: ignore
    for lengths in ([2], [2, 6]):
        assert seen(block.mask(lengths, 10)) == seen(block.mask([2], 6))


def test_a_window_counts_positions_and_not_places():
    tree = make_tree([(0,), (1,), (0, 0)])
    assert seen(mask_of(model_with(sliding_window=3), tree, 4)) == [
        [2, 3, 4],
        [3, 4, 5],
        [3, 4, 6],
        [4, 5, 7],
    ]


def test_a_window_may_end_inside_the_tree():
    tree = make_tree([(0,), (1,), (1, 0), (1, 0, 0)])
    assert seen(mask_of(model_with(sliding_window=2), tree, 4)) == [
        [3, 4],
        [4, 5],
        [4, 6],
        [6, 7],
        [7, 8],
    ]


def test_layers_of_two_types_get_a_mask_each():
    settings = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    masks = mask_of(model_with(**settings), chain_tree(1), 2)
    assert {kind: seen(mask) for kind, mask in masks.items()} == {
        "sliding_attention": [[1, 2], [2, 3]],
        "full_attention": [[0, 1, 2], [0, 1, 2, 3]],
    }


ALL = 2**31


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({}, {"": ALL}),
        ({"sliding_window": None}, {"": ALL}),
        ({"sliding_window": 6}, {"": 6}),
        ({"sliding_window": 6, "use_sliding_window": False}, {"": ALL}),
        ({"sliding_window": 6, "layer_types": ["full_attention"]}, {"full_attention": ALL}),
        (
            {"sliding_window": None, "layer_types": ["sliding_attention"]},
            {"sliding_attention": ALL},
        ),
    ],
)
def test_windows(settings, windows):
    assert layer_windows(model_with(**settings)) == windows  # pyright: ignore


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention", "mamba", "hybrid"])
def test_layers_that_see_in_another_way_are_refused(kind):
    """Such as those whose state a rejected guess cannot be taken out of again."""
    model = model_with(layer_types=["full_attention", kind])
    with pytest.raises(ModelError, match=f"made_up has layers of type {kind}, expected"):
        layer_windows(model)  # pyright: ignore
