"""The loss of a whole step against a literal transcription of the formula, value and gradient."""

import pytest
import torch
from torch.nn import functional as F
from training_case import MemorySink, make_backbone, make_config, make_fit, make_heads, make_rows

from medusa_train.data.hidden_states import online_source
from medusa_train.ops import loss
from medusa_train.ops.loss import IGNORE, linear_cross_entropy
from medusa_train.train.engine import TorchEngine
from medusa_train.train.medusa1 import Medusa1Objective
from medusa_train.train.run import make_teacher


def transcription(backbone, heads, rows, head_weight, *, soft=False):
    """sum_k w^k / N_k * sum over rows and t of CE(head_k(h[t]), y[t + k + 2]), one at a time.

    With `soft` it is the divergence from what the backbone itself says at t + k + 1, over the
    heads' ids.
    """
    head_ids = torch.arange(320) if heads.token_map is None else heads.token_map
    total = torch.zeros((), dtype=torch.float32)
    for k in range(len(heads)):
        terms = []
        for row in rows:
            ids = torch.tensor([row.ids])
            with torch.no_grad():
                hidden = backbone.model.model(input_ids=ids).last_hidden_state[0]
            for t in range(len(row.ids)):
                known = t + k + 2 < len(row.ids) and row.ids[t + k + 2] in head_ids.tolist()
                if known and row.mask[t + k + 2]:
                    block = heads[k].layers[0].linear
                    z = hidden[t] + F.silu(block.weight @ hidden[t] + block.bias)
                    if heads[k].lm_head is None:
                        logits = backbone.lm_head.weight @ z
                    else:
                        logits = heads[k].lm_head @ z
                    place = torch.tensor(head_ids.tolist().index(row.ids[t + k + 2]))
                    said = backbone.lm_head.weight @ hidden[t + k + 1]
                    said = said[head_ids].softmax(0)
                    entropy = torch.special.entr(said).sum() if soft else 0.0
                    terms.append(F.cross_entropy(logits, said if soft else place) - entropy)
        total = total + head_weight**k * torch.stack(terms).sum() / len(terms)
    return total


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("lm_head", ["own", "shared", "reduced"])
def test_value_and_gradient_are_those_of_the_formula(lm_head, soft):
    backbone, rows = make_backbone(), make_rows(4)
    token_map = torch.arange(0, 320, 2) if lm_head == "reduced" else None
    heads = make_heads(backbone, lm_head=lm_head, token_map=token_map)
    torch.manual_seed(3)
    for parameter in heads.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    expected = transcription(backbone, heads, rows, 0.7, soft=soft)
    parameters = list(heads.parameters())
    wanted = torch.autograd.grad(expected, parameters)

    objective = Medusa1Objective(
        heads,
        online_source(backbone.hidden_states, backbone.device),
        shared_lm_head=backbone.lm_head.weight if lm_head == "shared" else None,
        head_weight=0.7,
        compute_dtype=torch.float32,
        teacher=make_teacher(backbone, heads.token_map, torch.float32) if soft else None,
    )
    counts = objective.target_counts(rows).tolist()
    scales = [w / n for w, n in zip(objective.weights(0), counts, strict=True)]
    engine = TorchEngine(objective, make_config().medusa1.optim)
    sums = [engine.accumulate(objective.batch([row]), scales) for row in rows]
    found = (torch.stack(sums).sum(0) * torch.tensor(scales)).sum()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=0)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_the_chunked_loss_is_the_formula_to_a_millionth(monkeypatch, soft, low_rank):
    """On ragged labels, in float32, against float64; value and every gradient."""
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 50 * 7)  # chunks of 7 positions
    torch.manual_seed(0)
    inputs = [torch.randn(40, 16), torch.randn(50, 16), torch.randn(40, 3), torch.randn(50, 3)]
    inputs = [tensor.requires_grad_() for tensor in inputs[: 4 if low_rank else 2]]
    targets = torch.randint(0, 50, (40,))
    targets[torch.rand(40) < 0.4] = IGNORE
    goals = torch.randn(40, 50).softmax(1)
    found = linear_cross_entropy(
        *inputs[:2],
        targets,
        low_rank=(inputs[2], inputs[3]) if low_rank else None,
        soft=(lambda at: goals[at]) if soft else None,
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = exact[0] @ exact[1].T + (exact[2] @ exact[3].T if low_rank else 0)
    keep = targets != IGNORE
    if soft:
        wanted = goals.double()[keep]
        expected = (wanted * (wanted.log() - logits[keep].log_softmax(1))).sum()
    else:
        expected = F.cross_entropy(logits[keep], targets[keep], reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    grads = zip(
        torch.autograd.grad(found, inputs), torch.autograd.grad(expected, exact), strict=True
    )
    for got, gradient in grads:
        assert (got - gradient).norm() < 1e-6 * gradient.norm()


def test_untrained_heads_equal_the_lm_head_bit_for_bit():
    backbone = make_backbone()
    row = make_rows(1)[0]
    hidden = backbone.hidden_states(
        torch.tensor([row.ids]), torch.ones(1, len(row.ids), dtype=torch.bool)
    )[0]
    expected = F.linear(hidden, backbone.lm_head.weight)
    for lm_head in ("own", "shared"):
        heads = make_heads(backbone, lm_head=lm_head, num_layers=2)
        for head in heads.heads:
            shared = backbone.lm_head.weight if lm_head == "shared" else None
            assert torch.equal(head.logits(hidden, shared=shared), expected)


def test_the_whole_batch_through_the_loop_has_that_loss(tmp_path):
    sink = MemorySink([])
    fit = make_fit(tmp_path, sink=sink, batch_size=8, max_steps=1)
    expected = transcription(make_backbone(), make_heads(make_backbone()), fit.rows, 0.8)
    fit.run()
    found = sink.lines[1][1]["train/loss"]
    assert found == pytest.approx(expected.item(), rel=1e-5)
