import pytest
import torch
from torch.nn import functional as F

from medusa_train.ops import loss
from medusa_train.ops.loss import IGNORE, head_targets, linear_cross_entropy


def test_the_worked_example_of_six_tokens():
    ids = torch.arange(10, 16)
    supervised = torch.tensor([False, False, False, True, True, True])
    no = IGNORE
    assert head_targets(ids, supervised, 2).tolist() == [
        [no, 13, 14, 15, no, no],
        [13, 14, 15, no, no, no],
    ]
    assert head_targets(ids, supervised, 1, first=1).tolist() == [[no, no, 13, 14, 15, no]]


def test_a_row_shorter_than_the_reach_of_a_head_has_no_target():
    targets = head_targets(torch.tensor([5, 6]), torch.tensor([True, True]), 3)
    assert targets.shape == (3, 2)
    assert (targets == IGNORE).all()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_neither_value_nor_gradient(monkeypatch, chunk):
    torch.manual_seed(0)
    vocab = 11
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * vocab * chunk)
    hidden = torch.randn(8, 5, requires_grad=True)
    weight = torch.randn(vocab, 5, requires_grad=True)
    targets = torch.tensor([0, 10, IGNORE, 3, 3, IGNORE, 7, 1])
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(expected * 0.3, (hidden, weight))
    found = linear_cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(found * 0.3, (hidden, weight))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(got, wanted)


def test_without_targets_it_is_zero_and_so_is_the_gradient():
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    found = linear_cross_entropy(hidden, weight, torch.full((3,), IGNORE))
    found.backward()
    assert found.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_a_frozen_lm_head_gets_no_gradient():
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2])).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_bfloat16_products_give_a_float32_sum():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16), torch.randn(32, 16)
    targets = torch.randint(0, 32, (64,))
    exact = linear_cross_entropy(hidden, weight, targets)
    rough = linear_cross_entropy(hidden, weight, targets, compute_dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert rough.item() != exact.item()
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
