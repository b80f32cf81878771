"""Memory of decoding is told in full: second copies of weights, caches, and what else there is."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from medusa_train.model.packed import can_pack

CPU = torch.device("cpu")


def rows_of(case):
    from bench.decode_memory import run

    return {row.name: row for row in run(case)}


@pytest.fixture
def half(case):
    """The case in bfloat16, of which decoding keeps rearranged weights."""
    from medusa_train.model.backbone import Backbone
    from medusa_train.model.tiny import tiny_llama

    # Sizes that the layout of the kernels does not round up
    model, tokenizer = tiny_llama(hidden_size=256)
    backbone = Backbone(model.bfloat16(), tokenizer, name="tiny")  # pyright: ignore
    if not can_pack(backbone.lm_head.weight):
        pytest.skip("this build of torch rearranges nothing")
    return replace(case, backbone=backbone)


def test_rearranged_weights_are_counted(half):
    from bench.decode import decoding_heads

    rows, backbone = rows_of(half), half.backbone

    linears = [m.weight for m in backbone.model.modules() if isinstance(m, nn.Linear)]
    second = sum(weight.nbytes for weight in linears) / 1e6
    found = rows["weights_backbone"]
    assert found.value - found.peer == pytest.approx(second, rel=0.01)
    assert found.peer == pytest.approx(backbone.model.get_memory_footprint() / 1e6, rel=0.01)
    heads = decoding_heads(backbone)
    matrices = sum(p.nbytes for p in heads.parameters() if p.dim() == 2) / 1e6
    for name in ("weights_heads", "weights_heads_peak"):
        assert rows[name].value - rows[name].peer == pytest.approx(matrices, rel=0.01)
    assert rows["weights_draft"].ratio > 1.5


def test_in_float32_there_is_no_second_copy(case):
    rows = rows_of(case)

    for name in ("weights_backbone", "weights_heads", "weights_draft"):
        assert rows[name].ratio == pytest.approx(1, rel=0.01)


def test_the_need_is_what_the_caches_hold_and_all_of_it_is_in_the_peak(case):
    from bench.decode import GAMMA, cut_draft
    from bench.decode_memory import cached_mb

    from medusa_train.decode import DraftModel

    _, draft = cut_draft(case.backbone, 1)
    method = DraftModel(case.backbone, draft, gamma=GAMMA)
    method.start([[1, 2, 3]], room=20)
    method.step([4])
    for model, reader in ((case.backbone, method._reader), (draft, method._draft_reader)):
        stored = [*reader.cache._keys, *reader.cache._values]
        assert sum(s.nbytes for s in stored) / 1e6 == cached_mb(model, 3 + 20 + GAMMA + 1)
    rows = rows_of(case)
    for name in ("memory_n0", "memory_n4", "memory_draft"):
        assert rows[name].value > rows[name].peer
    assert rows["memory_draft"].peer > 1.9 * rows["memory_n0"].peer  # the draft has a cache too


def test_what_is_kept_is_told_from_what_is_only_passed_through():
    from bench.memory import memory_use

    megabyte = partial(torch.ones, 1_000_000, dtype=torch.uint8)

    def make():
        passing = torch.cat([megabyte(), megabyte()])
        return passing[:1_000_000].clone()

    used = memory_use(make, CPU)
    assert used.peak == pytest.approx(4_000_000, rel=0.01)
    assert used.kept == pytest.approx(1_000_000, rel=0.01)
