"""The joint loss against a literal transcription of the formula, value and gradient."""

import pytest
import torch
from medusa2_case import disturb, make_objective
from torch.nn import functional as F
from training_case import make_backbone, make_config, make_heads, make_rows

from medusa_train.train.engine import TorchEngine


def transcription(objective, rows, settings, ramp):
    """L_base + lambda_0 * ramp * sum_k w^k / N_k * sum CE(head_k(h[t]), y[t + k + 2]).

    Everything goes through the models' own forward passes, one row and one position at a time.
    """
    student, heads = objective.student, objective.heads
    model = student._peft[0] if student._peft else student._model[0]
    base, near, ahead = [], [], [[] for _ in heads]
    for row in rows:
        ids = torch.tensor([row.ids])
        logits = model(input_ids=ids).logits[0]
        hidden = student.decoder(input_ids=ids).last_hidden_state[0]
        with torch.no_grad():
            original = objective.original(input_ids=ids).logits[0]
        for t in range(len(row.ids)):
            if t + 1 < len(row.ids) and row.mask[t + 1]:
                q = original[t].softmax(0)
                near.append((q * (q.log() - logits[t].log_softmax(0))).sum())
                base.append(F.cross_entropy(logits[t], torch.tensor(row.ids[t + 1])))
            for k, head in enumerate(heads):
                if t + k + 2 < len(row.ids) and row.mask[t + k + 2]:
                    z = head.layers(hidden[t : t + 1])
                    if head.lm_head is None:
                        found = model.get_output_embeddings()(z)
                    else:
                        found = z @ head.lm_head.T
                    goal = torch.tensor(row.ids[t + k + 2])
                    if settings.soft_targets:
                        goal = original[t + k + 1].softmax(0)
                    entropy = torch.special.entr(goal).sum() if settings.soft_targets else 0
                    ahead[k].append(F.cross_entropy(found[0], goal) - entropy)
    kinds = {"self_distill": near, "cross_entropy": base}
    total = torch.stack(kinds[settings.base_loss]).mean()
    if settings.keep_near:
        total = total + settings.keep_near * torch.stack(near).mean()
    for k, terms in enumerate(ahead):
        weight = settings.heads_weight * ramp * settings.head_weight**k
        total = total + weight * torch.stack(terms).mean()
    return total


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads_ramp": "sine", "heads_weight": 0.7, "soft_targets": True},
        {"heads_ramp": "linear", "base_loss": "cross_entropy", "keep_near": 0.3},
        {"backbone": "full"},
        {"backbone": "full", "tie": True, "base_loss": "cross_entropy"},
    ],
    ids=["lora", "sine", "near", "full", "tied"],
)
def test_value_and_gradient_are_those_of_the_formula(lm_head, changes):
    changes = dict(changes)
    tied = {"tie_word_embeddings": changes.pop("tie", False)}
    backbone, rows = make_backbone(**tied), make_rows(3)
    objective = make_objective(backbone, heads=make_heads(backbone, lm_head=lm_head), **changes)
    object.__setattr__(objective, "original", make_backbone(**tied).model)
    disturb(objective)
    ramp = {"constant": 1.0, "linear": 0.25, "sine": 0.3826834}
    settings = objective._settings
    expected = transcription(objective, rows, settings, ramp[settings.heads_ramp])
    trained = [p for p in objective.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected, trained)

    counts = objective.target_counts(rows).tolist()
    scales = [w / n for w, n in zip(objective.weights(0.25), counts, strict=True)]
    engine = TorchEngine(objective, make_config().medusa2.optim)
    sums = [engine.accumulate(objective.batch([row]), scales) for row in rows]
    found = (torch.stack(sums).sum(0) * torch.tensor(scales)).sum()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=0)
    for parameter, gradient in zip(trained, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=2e-6)


def test_one_graph_is_loss_after_loss():
    objective, rows = make_objective(), make_rows(3)
    disturb(objective)
    trained = [p for p in objective.parameters() if p.requires_grad]
    batch = objective.batch(rows)
    scales = list(objective.weights(0.5))
    wanted = torch.autograd.grad((objective(batch) * torch.tensor(scales)).sum(), trained)
    TorchEngine(objective, make_config().medusa2.optim).accumulate(batch, scales)
    for parameter, gradient in zip(trained, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)
