"""Blocks through torch.compile: the same answers, and no more graphs than shapes."""

from functools import partial

import pytest
import torch
from decoding_case import answer_of, make_llama, make_tree, noisy_draft, random_ids

from medusa_train.decode import DraftModel, Lookup, Medusa, Plain, generate_batch
from medusa_train.model import language_model
from medusa_train.model.compiled import compile_for_decoding
from medusa_train.model.heads import untrained_heads

TREE = make_tree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
METHODS = {
    "plain": lambda b, **how: Plain(b, **how),
    "medusa": lambda b, **how: Medusa(
        b,
        untrained_heads(b.lm_head.weight, num_heads=3),  # pyright: ignore
        TREE,
        **how,
    ),
    "draft": lambda b, **how: DraftModel(b, noisy_draft(b, 0.02), gamma=3, **how),
    "adaptive": lambda b, **how: DraftModel(b, noisy_draft(b, 0.02), gamma=3, adaptive=True, **how),
    "lookup": lambda b, **how: Lookup(b, gamma=10, **how),
}


@pytest.fixture
def graphs(monkeypatch):
    """Whatever the compiler has made, which runs as it stands."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = partial(torch.compile, backend=backend)

    def without_mode(module, *, dynamic, mode):
        return compiled(module, dynamic=dynamic)

    monkeypatch.setattr("medusa_train.model.compiled.torch.compile", without_mode)
    yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("name", METHODS)
def test_answers_are_those_of_decoding_without_it(graphs, name):
    backbone, prompt = make_llama(), random_ids(12)
    expected = answer_of(METHODS[name](backbone), prompt, 24)
    found = answer_of(METHODS[name](backbone, compiled=True), prompt, 24)
    assert found.ids == expected.ids
    assert found.accepted == expected.accepted
    assert graphs


def test_a_further_prompt_needs_no_further_graph(graphs):
    method = METHODS["medusa"](make_llama(), compiled=True)
    answer_of(method, random_ids(12), 8)
    before = len(graphs)
    answer_of(method, random_ids(30, seed=1), 8)
    assert len(graphs) == before


def test_many_sizes_of_block_are_all_compiled(graphs):
    backbone = make_llama()
    draft = noisy_draft(backbone, 0.02)
    for gamma in range(1, 12):
        answer_of(DraftModel(backbone, draft, gamma=gamma, compiled=True), random_ids(9), 14)
    assert len(graphs) >= 11


def test_rows_that_leave_a_batch(graphs):
    backbone, prompts = make_llama(), [random_ids(5), random_ids(11, seed=1), random_ids(8, seed=2)]
    ends = generate_batch(Plain(backbone), prompts, max_new_tokens=12, end_ids=())[0].ids[4:5]
    answers = [
        [a.ids for a in generate_batch(m, prompts, max_new_tokens=12, end_ids=ends)]
        for m in (Plain(backbone), Plain(backbone, compiled=True))
    ]
    assert answers[0] == answers[1]
    assert len({len(answer) for answer in answers[0]}) > 1


def test_a_twin_is_compiled_that_reads_grouped_heads_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        language_model,
        "compile_for_decoding",
        lambda decoder: seen.append(decoder) or compile_for_decoding(decoder),
    )
    backbone = make_llama()
    _ = backbone._compiled_decoder
    assert seen[0] is not backbone.decoder
    assert seen[0].config._attn_implementation == "grouped_sdpa"
    assert backbone.decoder.config._attn_implementation == "sdpa"
