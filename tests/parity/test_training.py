"""What must not change what is learnt: cutting up a batch, stopping, resuming."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from decoding_case import answer_of, transformers_greedy
from training_case import (
    ALONE,
    MemorySink,
    largest_difference,
    make_backbone,
    make_config,
    make_fit,
    make_rows,
    make_stage,
    write_rows,
)

from medusa_train.decode import Medusa
from medusa_train.errors import Interrupted
from medusa_train.model.draft import load_draft
from medusa_train.model.weights import load_heads
from medusa_train.ops.tree import build_tree, chain
from medusa_train.track.manifest import Stage
from medusa_train.train.draft import train_draft
from medusa_train.train.medusa1 import train_medusa1


def test_four_micro_batches_of_one_are_one_of_four(tmp_path):
    counts, rows = make_fit(tmp_path / "x").objective, make_rows(8)
    rows[3] = replace(rows[3], mask=[False] * len(rows[3].ids))  # alone an empty micro-batch
    unequal = {tuple(counts.target_counts([row]).tolist()) for row in rows}
    assert len(unequal) > 4
    assert (0, 0, 0) in unequal
    sinks = [MemorySink([]), MemorySink([])]
    states = []
    for sink, size in zip(sinks, (1, 4), strict=True):
        fit = make_fit(tmp_path / str(size), rows=rows, sink=sink, micro_batch_size=size, epochs=3)
        fit.run()
        states.append(fit.engine.trained_state())
    assert largest_difference(*states) < 1e-5
    for (_, one), (_, four) in zip(sinks[0].lines, sinks[1].lines, strict=True):
        for name in one.keys() - {"perf/tokens_per_s", "perf/memory_gb", "data/empty_batches"}:
            assert one[name] == pytest.approx(four[name], rel=1e-5), name
    empty = [sink.lines[-2][1]["data/empty_batches"] for sink in sinks]
    assert empty == [3, 0]


def test_a_mean_for_each_micro_batch_would_have_been_noticed(tmp_path):
    """The parity above is no accident of equal counts: the usual mistake is far outside it."""
    fit = make_fit(tmp_path)
    rows, batch = make_rows(4), fit.objective.batch
    whole = fit.objective(batch(rows)) / fit.objective.target_counts(rows)
    means = [fit.objective(batch([r])) / fit.objective.target_counts([r]) for r in rows]
    assert (torch.stack(means).mean(0) - whole).abs().max() > 1e-3


def kill_at(fit, step):
    original = fit.objective.batch

    def batch(rows):
        if fit.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(rows)

    fit.objective.batch = batch


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_run_ends_bit_for_bit_like_an_unbroken_one(tmp_path, stop):
    settings = {"epochs": 3, "save_every": 4, "weight_decay": 0.01}
    unbroken = make_fit(tmp_path / "a", **settings)
    expected = unbroken.run()
    first = make_fit(tmp_path / "b", **settings)
    kill_at(first, stop)
    with pytest.raises(Interrupted):
        first.run()
    second = make_fit(tmp_path / "b", **settings)
    assert second.state.step == (stop + 1 if stop else 0)  # at 0 it came while evaluating
    found = second.run()
    assert largest_difference(second.engine.trained_state(), unbroken.engine.trained_state()) == 0
    for name in ("step", "tokens", "losses", "held_out"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("train", [train_medusa1, train_draft])
def test_a_stage_that_is_run_again_goes_on_and_logs_like_an_unbroken_one(
    tmp_path, monkeypatch, train
):
    distill, config = write_rows(tmp_path / "distill"), make_config()
    name = "medusa1" if train is train_medusa1 else "draft"
    whole = make_stage(tmp_path / "whole", name)
    expected = train(config, whole, distill, make_backbone(), ALONE)

    broken = make_stage(tmp_path / "broken", name)
    from medusa_train.train import loop

    original = loop.Fit._micro_batches
    with monkeypatch.context() as patch:

        def interrupt(self):
            if self.state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self)

        patch.setattr(loop.Fit, "_micro_batches", interrupt)
        with pytest.raises(Interrupted):
            train(config, broken, distill, make_backbone(), ALONE)
    found = train(config, broken, distill, make_backbone(), ALONE)
    for key in expected.keys() - {"seconds"}:
        assert found[key] == expected[key], key
    assert _comparable(broken) == _comparable(whole)


def _comparable(stage: Stage):
    import json

    lines = [json.loads(line) for line in (stage.folder / "metrics.jsonl").open()]
    return [
        {k: v for k, v in x.items() if k != "time" and not k.startswith("perf/")} for x in lines
    ]


def test_the_backbone_is_bit_identical_afterwards(tmp_path):
    distill, backbone = write_rows(tmp_path / "distill"), make_backbone()
    before = {name: t.clone() for name, t in everything(backbone).items()}
    text = transformers_greedy(backbone, [72, 105], 20)
    config = make_config("medusa1.optim.epochs=10")  # 20 steps
    for lm_head in ("own", "shared"):
        chosen = replace(config, heads=replace(config.heads, lm_head=lm_head))
        train_medusa1(chosen, make_stage(tmp_path / lm_head), distill, backbone, ALONE)
    train_draft(config, make_stage(tmp_path, "draft"), distill, backbone, ALONE)
    after = everything(backbone)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert transformers_greedy(backbone, [72, 105], 20) == text
    assert all(p.grad is None for p in backbone.model.parameters())
    heads = load_heads(
        tmp_path / "own" / "medusa1" / "heads",
        dtype=torch.float32,
        device=backbone.device,
        backbone=backbone,
    )
    tree = build_tree(chain(3), num_heads=3, max_rank=320)
    assert answer_of(Medusa(backbone, heads, tree), [72, 105], 20).ids == text


def everything(backbone):
    """Weights and buffers, those that are not saved among them."""
    return {**backbone.model.state_dict(), **dict(backbone.model.named_buffers())}


def test_a_draft_of_all_layers_starts_as_the_target(tmp_path):
    distill, backbone = write_rows(tmp_path / "distill"), make_backbone()
    config = make_config("draft.num_layers=2", "draft.optim.lr=1e-30")
    stage = make_stage(tmp_path, "draft")
    train_draft(config, stage, distill, backbone, ALONE)
    draft = load_draft(stage.folder / "model", dtype=torch.float32, device=backbone.device)
    ids = torch.tensor([make_rows(1)[0].ids])
    attend = torch.ones_like(ids, dtype=torch.bool)
    expected = backbone.logits(backbone.hidden_states(ids, attend))
    assert torch.equal(draft.logits(draft.hidden_states(ids, attend)), expected)
