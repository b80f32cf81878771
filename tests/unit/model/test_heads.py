import pytest
import torch
from training_case import make_backbone, make_heads

from medusa_train.model.heads import HeadsShape, MedusaHeads
from medusa_train.ops.loss import IGNORE


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


def test_blocks_and_lm_heads_are_all_separate(backbone):
    heads = make_heads(backbone, num_layers=2)
    pointers = [p.data_ptr() for p in heads.parameters()]
    assert len(pointers) == len(set(pointers)) == 3 * (2 * 2 + 1)
    assert backbone.lm_head.weight.data_ptr() not in pointers


def test_blocks_start_at_zero(backbone):
    heads = make_heads(backbone)
    assert all(p.abs().sum() == 0 for n, p in heads.named_parameters() if "linear" in n)


def test_an_lm_head_that_was_never_copied_is_seen_at_once(backbone):
    heads = MedusaHeads(make_heads(backbone).shape)
    assert heads[0].logits(torch.ones(1, 16)).isnan().all()


def test_shared_heads_own_no_lm_head_and_ask_for_one(backbone):
    heads = make_heads(backbone, lm_head="shared")
    assert not any("lm_head" in name for name, _ in heads.named_parameters())
    with pytest.raises(ValueError, match="pass it as `shared`"):
        heads[0].logits(torch.ones(1, 16))
    shared = backbone.lm_head.weight.detach()
    found = heads[0].logits(torch.ones(1, 16), shared=shared)
    assert torch.equal(found, backbone.lm_head(torch.ones(1, 16)))


def test_reduced_ids_there_and_back(backbone):
    heads = make_heads(backbone, lm_head="reduced", token_map=torch.tensor([2, 5, 300]))
    ids = torch.tensor([[5, 2, 300], [0, 319, IGNORE]])
    found = heads.to_head_ids(ids)
    assert found.tolist() == [[1, 0, 2], [IGNORE, IGNORE, IGNORE]]
    assert heads.to_backbone_ids(found[0]).tolist() == [5, 2, 300]
    hidden = torch.randn(4, 16)
    full = backbone.lm_head(hidden)[:, [2, 5, 300]]
    torch.testing.assert_close(heads[1].logits(hidden), full)


def test_a_map_without_reduced_heads_is_refused():
    shape = HeadsShape(
        num_heads=1, num_layers=1, lm_head="own", hidden_size=4, vocab_size=8, head_vocab_size=8
    )
    with pytest.raises(ValueError, match="token_map of None ids expected"):
        MedusaHeads(shape, torch.arange(8))


def test_the_loss_of_a_head_is_the_cross_entropy_of_its_logits(backbone):
    heads = make_heads(backbone)
    torch.nn.init.normal_(heads[1].layers[0].linear.weight)  # pyright: ignore
    hidden, targets = torch.randn(6, 16), torch.tensor([1, IGNORE, 3, 319, 0, IGNORE])
    expected = torch.nn.functional.cross_entropy(
        heads[1].logits(hidden), targets, ignore_index=IGNORE, reduction="sum"
    )
    torch.testing.assert_close(heads[1](hidden, targets), expected)
