from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from decoding_case import make_family
from medusa2_case import disturb, logits_of, make_objective, make_settings
from torch.nn import functional as F
from training_case import (
    ALONE,
    make_backbone,
    make_config,
    make_heads,
    make_rows,
)

from medusa_train.ops.loss import IGNORE
from medusa_train.train.engine import TorchEngine, build_engine

CPU = torch.device("cpu")


def gather(module):
    return nullcontext()


def test_before_any_update_it_is_the_original_model():
    objective, rows = make_objective(), make_rows(5)
    measured = objective.measure(objective.batch(rows), gather)
    kl, count = measured.others["kl"]
    assert abs(kl) < 1e-4 * count
    fresh = make_backbone()
    for row, ranks in zip(rows, measured.ranks, strict=True):
        assert ranks.shape[1] == len(row.ids) - 1 - row.answer_start
    hits = sum(
        int(logits[t].argmax()) == row.ids[t + 1]
        for row, logits in zip(rows, logits_of(fresh.model, rows), strict=True)
        for t in range(row.answer_start - 1, len(row.ids) - 1)
    )
    assert measured.others["agreement"] == (hits, count)


def test_the_loss_of_self_distillation_starts_at_zero():
    objective, rows = make_objective(), make_rows(4)
    losses = objective(objective.batch(rows))
    assert abs(losses[0].item()) < 1e-3
    assert (losses[1:] > 1).all()


def test_the_teacher_does_not_move_while_the_student_does():
    backbone, rows = make_backbone(), make_rows(4)
    expected = logits_of(backbone.model, rows)
    objective = make_objective(backbone)
    engine = TorchEngine(objective, make_config().medusa2.optim)
    names = {n for n, p in objective.named_parameters() if p.requires_grad}
    scales = [w / 100 for w in objective.weights(1)]
    start = engine.trained_state()
    for _ in range(20):
        engine.accumulate(objective.batch(rows), scales)
        engine.step()
    assert {n for n, p in objective.named_parameters() if p.requires_grad} == names
    assert not [n for n, t in engine.trained_state().items() if torch.equal(t, start[n])]
    wrapped = objective.student._peft[0]
    moved = logits_of(wrapped, rows)
    assert max((a - b).abs().max() for a, b in zip(moved, expected, strict=True)) > 1e-2
    with wrapped.disable_adapter():
        again = logits_of(wrapped, rows)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_labels_are_shifted_once():
    """A model that always knows the next token has a base loss of zero."""
    objective = make_objective(base_loss="cross_entropy")
    rows = make_rows(3)
    batch = objective.batch(rows)
    expected = [
        row.ids[t + 1]
        for row in rows
        for t in range(row.states_start, len(row.ids) - 1)
        if any(row.mask[t + 1 : t + 5])
    ]
    knows = torch.zeros(len(expected), objective.student.lm_head.out_features)
    knows[torch.arange(len(expected)), torch.tensor(expected)] = 50.0
    objective.student.lm_head.forward = lambda hidden, targets, **_: F.cross_entropy(
        knows, targets, ignore_index=IGNORE, reduction="sum"
    )
    base = next(objective.losses(objective.trunk(batch), batch))
    assert base.item() == pytest.approx(0, abs=1e-6)


def test_an_answer_of_one_token_teaches_the_base_and_breaks_no_head():
    row = replace(make_rows(1)[0], ids=[5, 6, 7], mask=[False, False, True])
    objective = make_objective()
    batch = objective.batch([row])
    assert objective.target_counts([row]).tolist() == [1, 1, 0, 0]
    losses = objective(batch)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert losses[2:].tolist() == [0, 0]
    trained = [p for p in objective.parameters() if p.requires_grad]
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in trained)


def test_positions_that_do_not_count_change_nothing():
    """Whatever the original model says there: neither losses nor gradients move."""
    row = make_rows(1)[0]
    row = replace(row, mask=[t in (6, 7, 8) for t in range(len(row.ids))])
    found = []
    for noise in (0.0, 5.0):
        objective = make_objective(soft_targets=True)
        disturb(objective)
        batch = objective.batch([row])
        read = torch.cat([batch.teachers[0][batch.base_targets != IGNORE]])
        heads = [batch.teachers[1 + k][t != IGNORE] for k, t in enumerate(batch.targets)]
        others = torch.ones(len(batch.states), dtype=torch.bool)
        others[torch.cat([read, *heads])] = False
        assert others.any()
        batch.states[others] += noise
        losses = objective(batch)
        losses.sum().backward()
        grads = [p.grad for p in objective.parameters() if p.requires_grad]
        found.append([losses.detach(), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("changes", [{}, {"backbone": "full"}])
def test_checkpointing_changes_no_gradient(changes):
    rows, found = make_rows(3), []
    for checkpointing in (False, True):
        objective = make_objective(gradient_checkpointing=checkpointing, **changes)
        disturb(objective)
        engine = TorchEngine(objective, make_config().medusa2.optim)
        engine.accumulate(objective.batch(rows), list(objective.weights(1)))
        found.append([p.grad.clone() for p in objective.parameters() if p.requires_grad])
    assert all(g.abs().sum() > 0 for g in found[1])  # of every LoRA, every head
    for plain, checked in zip(*found, strict=True):
        torch.testing.assert_close(plain, checked, rtol=1e-5, atol=1e-6)


def test_what_is_trained_is_said(caplog):
    objective, config = make_objective(), make_config()
    with caplog.at_level("INFO", logger="medusa_train"):
        build_engine(objective, config.medusa2.optim, config.deepspeed, world=ALONE, device=CPU)
    count = sum(p.numel() for p in objective.student.parameters() if p.requires_grad)
    assert f"training backbone: 30 tensors, {count:,} parameters, learning rate x 1" in caplog.text
    assert "training heads: 9 tensors" in caplog.text
    assert "learning rate x 4" in caplog.text


def test_the_models_own_dropout_is_off_and_that_of_the_lora_is_not():
    """GPT-2 is shipped with dropout; self-distillation must still start at zero."""
    backbone = make_family("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    rows = make_rows(3)
    still = make_objective(backbone)(make_objective(backbone).batch(rows))
    assert abs(still[0].item()) < 1e-3
    settings = replace(make_settings().lora, dropout=0.5)
    moving = make_objective(make_family("gpt2"), lora=settings)
    disturb(moving)
    batch = moving.batch(rows)
    assert not torch.equal(moving(batch), moving(batch))


def test_heads_learn_faster_than_the_backbone():
    backbone = make_backbone()
    objective = make_objective(backbone, heads=make_heads(backbone), heads_lr_factor=4.0)
    factors = {group.name: group.lr_factor for group in objective.groups()}
    assert factors == {"backbone": 1.0, "heads": 4.0}
    grouped = {id(p) for group in objective.groups() for p in group.parameters}
    assert grouped == {id(p) for p in objective.parameters() if p.requires_grad}
