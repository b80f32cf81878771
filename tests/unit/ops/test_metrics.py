import torch

from medusa_train.ops.loss import IGNORE
from medusa_train.ops.metrics import target_ranks, top_k_hits


def test_ranks_count_the_tokens_above():
    logits = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert target_ranks(logits, torch.tensor([0, 1, IGNORE])).tolist() == [0, 2, IGNORE]


def test_ties_fall_to_the_lower_id_as_argmax_has_it():
    logits = torch.tensor([[1.0, 1.0, 1.0]]).expand(3, 3)
    assert target_ranks(logits, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]
    assert logits[0].argmax().item() == 0


def test_hits_and_targets_leave_out_positions_without_target():
    ranks = torch.tensor([[0, 4, IGNORE], [IGNORE, IGNORE, IGNORE]])
    hits, targets = top_k_hits(ranks, 1)
    assert hits.tolist() == [1, 0]
    assert targets.tolist() == [2, 0]
    assert top_k_hits(ranks, 5)[0].tolist() == [2, 0]
