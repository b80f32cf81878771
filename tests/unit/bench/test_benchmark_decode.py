"""Decoding is compared fairly: both sides do the same work."""

import torch


def test_both_sides_of_decoding_run_the_models_equally_often(case):
    from bench.decode import GAMMA, _ours, _transformers, cut_draft

    from medusa_train.decode import DraftModel, Plain

    draft, guide = cut_draft(case.backbone, 1)
    calls = {"target": 0, "draft": 0}

    def count(decoder, name):
        def hook(*_):
            calls[name] += 1

        return decoder.register_forward_hook(hook)

    # Ours runs its own twin of the decoder that transformers runs
    hooks = [
        count(case.backbone.model.get_decoder(), "target"),
        count(case.backbone._decoder, "target"),
        count(draft.get_decoder(), "draft"),
        count(guide._decoder, "draft"),
    ]
    prompt = case.prompts(1, max_new_tokens=64)[0]

    def forwards(answer):
        calls.update(target=0, draft=0)
        assert answer(prompt) == 24
        return dict(calls)

    plain = forwards(_ours(case, Plain(case.backbone), 24))
    assert plain == {"target": 24, "draft": 0}
    assert forwards(_transformers(case, None, 24)) == plain
    ours = forwards(_ours(case, DraftModel(case.backbone, guide, gamma=GAMMA), 24))
    peer = forwards(_transformers(case, draft, 24))
    for hook in hooks:
        hook.remove()
    # Ours reads the prompt apart from the first check; the peer guesses less at the very end
    assert 0 <= ours["target"] - peer["target"] <= 1
    assert abs(ours["draft"] - peer["draft"]) <= GAMMA
    assert ours["draft"] > ours["target"]


def test_the_draft_shares_the_targets_weights(case):
    from bench.decode import cut_layers

    draft, target = cut_layers(case.backbone.model, 1), case.backbone.model
    assert len(draft.model.layers) == 1
    assert draft.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    whole = cut_layers(target, 99)
    ids = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(whole(ids).logits, target(ids).logits, rtol=0, atol=0)


def test_trees_have_the_nodes_they_are_named_for():
    from bench.decode import NUM_HEADS, TREE_NODES, bushy_paths

    from medusa_train.ops.tree import build_tree

    for nodes in TREE_NODES:
        tree = build_tree(bushy_paths(nodes), num_heads=NUM_HEADS, max_rank=8)
        assert tree.nodes == nodes
        assert tree.depth[-1] == NUM_HEADS
