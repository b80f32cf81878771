from types import SimpleNamespace

import pytest
import torch
from decoding_case import WINDOW, make_family, make_tree, noted, random_ids

from medusa_train.decode.forward import Block, Reader, chain_block, layer_windows
from medusa_train.errors import ModelError

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
    config = SimpleNamespace(model_type="made_up", **settings)
    return SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))


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
        reader.prefill(prompt, capacity=length + len(nodes))
        block = Block(backbone, WIDE.attend(), WIDE.depth, length)
        found = reader.read(torch.tensor(nodes), block)
        for node in range(len(nodes)):
            alone = torch.tensor([prompt + [nodes[n] for n in path_to(WIDE, node)]])
            expected = backbone.hidden_states(alone, torch.ones_like(alone, dtype=torch.bool))
            torch.testing.assert_close(found[node], expected[0, -1], rtol=1e-4, atol=1e-5)


def test_what_was_committed_reads_like_a_fresh_prompt(tiny):
    prompt, nodes, path = random_ids(9), random_ids(WIDE.nodes + 1, seed=1), path_to(WIDE, 8)
    kept = prompt + [nodes[n] for n in path]
    used, fresh = Reader(tiny), Reader(tiny)
    with torch.no_grad():
        used.prefill(prompt, capacity=40)
        used.read(torch.tensor(nodes), Block(tiny, WIDE.attend(), WIDE.depth, 40))
        used.cache.commit(path)
        fresh.prefill(kept, capacity=40)
        one = chain_block(tiny, 1, 40)
        found, expected = (r.read(torch.tensor([77]), one) for r in (used, fresh))
    assert used.cache.length == len(kept)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_are_the_cached_length_plus_the_depth(monkeypatch, tiny):
    asked = noted(monkeypatch, tiny, "forward", lambda _, positions, **__: positions.tolist())
    reader = Reader(tiny)
    with torch.no_grad():
        reader.prefill([5, 6, 7], capacity=20)
        reader.read(torch.zeros(12, dtype=torch.long), Block(tiny, WIDE.attend(), WIDE.depth, 20))
    assert asked == [[[0, 1, 2]], [[3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 7]]]


def seen(mask):
    return [row.eq(0).nonzero().flatten().tolist() for row in mask[0, 0]]


def test_a_mask_shows_the_prefix_and_the_ancestors():
    tree = make_tree([(0,), (1,), (0, 0)])
    block = Block(model_with(), tree.attend(), tree.depth, 10)
    assert seen(block.mask(2)) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert seen(block.mask(0)) == [[0], [0, 1], [0, 2], [0, 1, 3]]
    assert block.mask(10).shape == (1, 1, 4, 14)


def test_a_window_counts_positions_and_not_places():
    tree = make_tree([(0,), (1,), (0, 0)])
    block = Block(model_with(sliding_window=3), tree.attend(), tree.depth, 10)
    assert seen(block.mask(4)) == [[2, 3, 4], [3, 4, 5], [3, 4, 6], [4, 5, 7]]


def test_a_window_may_end_inside_the_tree():
    tree = make_tree([(0,), (1,), (1, 0), (1, 0, 0)])
    block = Block(model_with(sliding_window=2), tree.attend(), tree.depth, 10)
    assert seen(block.mask(4)) == [[3, 4], [4, 5], [4, 6], [6, 7], [7, 8]]


def test_layers_of_two_types_get_a_mask_each():
    settings = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    masks = chain_block(model_with(**settings), 2, 10).mask(2)  # pyright: ignore
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


def test_layers_that_see_in_another_way_are_refused():
    model = model_with(layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ModelError, match="made_up has layers of type chunked_attention, expected"):
        layer_windows(model)  # pyright: ignore
