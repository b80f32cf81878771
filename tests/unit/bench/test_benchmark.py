"""The benchmark measures what it says: fixed names, true peaks, a peer that does the same work."""

import json
import math
from pathlib import Path

import pytest
import torch

CPU = torch.device("cpu")
KEYS = {"name", "value", "peer", "ratio", "unit", "spread"}
NAMES = {
    "decode": [
        "plain_vs_transformers",
        "draft_vs_assisted",
        "medusa_overhead_8_nodes",
        "medusa_overhead_16_nodes",
    ],
    "latency": [f"step_c16_n{nodes}" for nodes in (0, 1, 4)],
    "memory": [
        *("weights_backbone", "weights_heads", "weights_heads_peak", "weights_draft"),
        *("memory_n0", "memory_n4", "memory_draft"),
    ],
    "train": [
        "loss_memory_k5_over_k1",
        "loss_memory_vs_stacked",
        "train_tokens_per_s",
        "loss_memory_k5_over_k1_shared",
        "loss_memory_vs_stacked_shared",
        "train_tokens_per_s_shared",
        "medusa1_online_vs_stacked",
        "medusa1_cached_vs_stacked",
        "medusa1_cached_reduced_vs_stacked",
        "medusa2_memory_vs_stacked",
        "medusa2_vs_stacked",
    ],
    "distill": ["distill_tokens_per_s"],
    "growth": [
        f"growth_{what}_k{heads}_v{vocabulary}_p{positions}"
        for heads, vocabulary, positions in (
            *((heads, 80, 16) for heads in (1, 2, 4, 8)),
            *((4, vocabulary, 16) for vocabulary in (160, 320)),
            *((4, 80, positions) for positions in (8, 32, 64)),
        )
        for what in ("memory", "time")
    ],
}


@pytest.mark.parametrize("name", list(NAMES))
def test_rows_and_table(name, tmp_path, capsys):
    import benchmark

    path = tmp_path / "new" / "rows.json"
    assert benchmark.main([name, "--tiny", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["name"] for row in rows] == NAMES[name]
    table = capsys.readouterr().out
    assert "measures nothing" in table
    for row in rows:
        assert row.keys() == KEYS
        assert row["name"] in table
        assert row["value"] > 0
        assert row["ratio"] == pytest.approx(row["value"] / row["peer"])
        assert math.isfinite(row["spread"])
        assert row["spread"] >= 0


def test_loss_memory_is_measured_to_be_flat_in_the_number_of_heads(case):
    from bench.loss import build_training
    from bench.memory import peak_bytes

    five, one = (build_training(case, "own", num_heads=k, positions=512) for k in (5, 1))
    logits = 512 * case.backbone.vocab_size * 4
    ours = peak_bytes(five.ours, CPU)
    assert logits < ours < 1.15 * peak_bytes(one.ours, CPU)
    assert peak_bytes(five.stacked, CPU) > 5 * logits


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_stacking_gives_the_same_losses_and_gradients(case, lm_head):
    from bench.loss import build_training

    training = build_training(case, lm_head, num_heads=3, positions=16)
    parameters = list(training.objective.parameters())
    ours = training.ours()
    gradients = [p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad.zero_()
    torch.testing.assert_close(training.stacked(), ours)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_peer_that_computes_something_else_is_refused(case):
    from bench.loss import build_training

    training = build_training(case, "own", num_heads=2, positions=16)
    training.check()
    object.__setattr__(training, "stacked", lambda: 2 * training.ours())
    with pytest.raises(RuntimeError, match="expected"):
        training.check()


@pytest.fixture
def stored(case, tmp_path):
    from bench.steps import stored_rows

    return stored_rows(case, tmp_path)


@pytest.mark.parametrize("name", ["cached", "stacked"])
def test_whole_steps_give_the_same_losses_and_gradients(case, stored, name):
    from bench.steps import medusa1_sides

    sides = medusa1_sides(case, stored)
    parameters = list(sides["online"].objective.parameters())
    losses = sides["online"].accumulate(stored)
    gradients = [p.grad.clone() for p in parameters]
    sides["online"].clear()
    torch.testing.assert_close(sides[name].accumulate(stored), losses)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradient)


def test_whole_steps_of_medusa2_give_the_same_losses_and_gradients(stored):
    from bench.case import build_case
    from bench.steps import check, medusa2_sides

    sides = medusa2_sides(build_case(model=None, repeats=5, tiny=True))
    trained = {n: p for n, p in sides["ours"].objective.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():  # else the student is the teacher
        if "lora_B" in name:
            parameter.data += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(len(name))
            )
    losses = sides["ours"].accumulate(stored)
    assert losses.min() > 0.01
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    sides["ours"].clear()
    torch.testing.assert_close(sides["stacked"].accumulate(stored), losses)
    for name, parameter in trained.items():
        assert gradients[name].abs().max() > 0
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    sides["ours"].clear()
    check(sides, stored, names=("ours", "stacked"))


def test_whole_steps_that_compute_something_else_are_refused(case, stored):
    from dataclasses import replace

    from bench.steps import check, medusa1_sides

    sides = medusa1_sides(case, stored)
    wrong = sides["stacked"].stacked
    sides["stacked"] = replace(sides["stacked"], stacked=lambda *batch: 2 * wrong(*batch))
    with pytest.raises(RuntimeError, match="losses of stacked"):
        check(sides, stored, names=("online", "stacked"))


def test_peak_counts_what_lives_at_once():
    from bench.memory import peak_bytes

    def work():
        for size in (3, 10, 2):  # million bytes, each released before the next
            torch.ones(size * 1_000_000, dtype=torch.uint8)
        a = torch.ones(4_000_000, dtype=torch.uint8)
        b = torch.ones(5_000_000, dtype=torch.uint8)
        return a, b

    before = torch.ones(50_000_000, dtype=torch.uint8)  # not part of it
    assert peak_bytes(work, CPU) == pytest.approx(10_000_000, rel=0.01)
    del before


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no high-water mark"
)
def test_the_kernel_sees_the_same_peak():
    from bench.memory import peak_bytes, peak_resident_bytes

    def work():
        return (torch.ones(25_000_000) + 1).sum()  # two of 100 MB at once

    work()
    assert peak_bytes(work, CPU) == pytest.approx(200e6, rel=0.01)
    assert peak_resident_bytes(work) == pytest.approx(200e6, rel=0.1)


def test_medians_ratio_and_spread():
    from bench.rows import compare

    row = compare("x", [2.0, 4.0, 6.0, 8.0, 100.0], [1.0, 2.0, 3.0, 4.0, 20.0], unit="tokens/s")
    assert (row.value, row.peer, row.ratio) == (6.0, 3.0, 2.0)
    assert row.spread == 0.0  # ratios 2, 2, 2, 2, 5
    assert compare("x", [1, 2, 3, 4, 5], [1] * 5, unit="s").spread == pytest.approx(2 / 3)


def test_rounds_take_turns_and_warmup_does_not_count():
    from bench.rows import interleave

    order = []

    def workload(name):
        def run():
            order.append(name)
            return len(order)

        return run

    figures = interleave({"a": workload("a"), "b": workload("b")}, repeats=2, warmup=1)
    assert "".join(order) == "abbaab"
    assert figures == {"a": [4, 5], "b": [3, 6]}


def test_only_tokens_of_the_answer_count():
    from bench.distill import answer_length, left_padded

    assert answer_length([5, 9, 7, 7], {9}) == 2
    assert answer_length([5, 6], {9}) == 2
    ids, attend = left_padded([[1], [2, 3]], CPU)
    assert ids.tolist() == [[0, 1], [2, 3]]
    assert attend.tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("repeats", ["4", "x"])
def test_too_few_repeats_are_refused(repeats, capsys):
    import benchmark

    with pytest.raises(SystemExit) as exit_:
        benchmark.main(["decode", "--repeats", repeats])
    assert exit_.value.code == 2
    assert "at least 5" in capsys.readouterr().err


def test_a_missing_model_is_an_error_in_words(capsys):
    import benchmark

    assert benchmark.main(["decode", "--model", "./nowhere"]) == 1
    assert "no such folder" in capsys.readouterr().err
