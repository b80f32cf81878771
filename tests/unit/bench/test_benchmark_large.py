"""The bound on a large model of the GPU check, and how much of it is compiled."""

import pytest


def ratios(**found):
    return {name: {"ratio": ratio} for name, ratio in found.items()}


@pytest.mark.parametrize(
    ("found", "slow"),
    [
        ({"overhead_64_nodes": 1.15, "overhead_64_nodes_compiled": 1.1}, []),
        ({"overhead_64_nodes": 1.16}, ["overhead_64_nodes"]),
        ({"overhead_64_nodes": 1.0, "overhead_64_nodes_compiled": 1.2}, ["..._compiled"]),
        ({"overhead_64_nodes": float("nan")}, ["overhead_64_nodes"]),
        ({"overhead_64_nodes": 1.0, "overhead_32_nodes": 9.0}, []),
    ],
)
def test_the_largest_tree_has_a_bound(found, slow):
    from bench.large import too_slow

    slow = [name.replace("...", "overhead_64_nodes") for name in slow]
    assert too_slow(ratios(**found)) == slow


@pytest.mark.parametrize(("late", "made"), [(0, [0, 64, 1, 8, 16, 32]), (99, [0, 64])])
def test_the_largest_tree_is_compiled_first_and_the_others_while_there_is_time(
    late, made, monkeypatch
):
    from bench import large

    now = iter(range(0, 10_000, max(late, 1)))
    monkeypatch.setattr(large.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(large, "_clock", lambda method: method)

    def make(nodes, *, compiled):
        assert compiled
        return nodes

    assert list(large._compiled(make)) == made


def test_a_step_is_compared_with_a_plain_one_of_the_same_run():
    from bench.large import _rows

    rows = _rows({0: lambda: 2.0, 8: lambda: 3.0}, "_compiled")
    row = rows.pop("overhead_8_nodes_compiled")
    assert not rows
    assert row == {"value": 3.0, "peer": 2.0, "ratio": 1.5, "unit": "ms/step", "spread": 0.0}


def test_a_small_card_is_left_out(tmp_path, monkeypatch):
    import torch
    from bench.gpu import Place, large

    class Card:
        total_memory = 16 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Card)
    place = Place(device="cuda", work=tmp_path, deadline=0.0)
    numbers = {}
    assert large(place, numbers) == "a model of 7B parameters wants a card with 22 GiB"
    assert numbers == {}


def test_the_shape_is_that_of_llama_7b():
    import torch
    from bench.large import SHAPES
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES["cuda"], tie_word_embeddings=False))  # pyright: ignore
    assert model.num_parameters() == 6_738_415_616
