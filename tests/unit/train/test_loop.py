import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_case import CPU, MemorySink, largest_difference, make_config, make_fit, make_rows

from medusa_train.data.batch import step_rows
from medusa_train.errors import ConfigError
from medusa_train.parallel import World
from medusa_train.train import loop
from medusa_train.train.loop import total_steps
from medusa_train.train.objective import ParameterGroup
from medusa_train.train.window import empty_window

TRAIN = {
    "train/loss",
    "train/lr",
    "train/lr/heads",
    "train/grad_norm",
    "perf/tokens_per_s",
    "perf/memory_gb",
    "data/supervised_share",
    "data/empty_batches",
    "data/epoch",
}


def test_what_is_logged_and_when(tmp_path):
    sink = MemorySink([])
    state = make_fit(tmp_path, sink=sink, log_every=3, eval_every=2).run()
    evaluated = [step for step, metrics in sink.lines if "eval/loss" in metrics]
    logged = [step for step, metrics in sink.lines if "train/loss" in metrics]
    assert evaluated == [0, 2, 4]
    assert logged == [3, 4]
    train = next(metrics for _, metrics in sink.lines if "train/loss" in metrics)
    weighted = sum(0.8**k * train[f"train/head{k}/loss"] for k in range(3))
    assert train["train/loss"] == pytest.approx(weighted)
    assert train.keys() - {"train/grad_norm/heads"} == TRAIN | {
        f"train/head{k}/loss" for k in range(3)
    }
    evaluated = sink.lines[0][1]
    names = {f"eval/head{k}/{name}" for k in range(3) for name in ("top1", "top5", "loss")}
    assert names | {"eval/loss", "eval/tokens_per_step"} == evaluated.keys()
    assert 1 <= evaluated["eval/tokens_per_step"] <= 4
    assert state.step == 4
    assert state.tokens == 2 * sum(sum(row.mask[1:]) for row in make_rows(8))
    assert state.held_out["top1"] == [sink.lines[-1][1][f"eval/head{k}/top1"] for k in range(3)]


def test_the_logged_loss_is_the_mean_over_all_targets_of_the_window(tmp_path):
    sink = MemorySink([])
    fit = make_fit(tmp_path, sink=sink, lr=1e-30, log_every=2, max_steps=2)
    fit.run()
    sums = fit.objective(fit.objective.batch(make_rows(8))).detach()  # both steps see all rows
    counts = fit.objective.target_counts(make_rows(8))
    found = [sink.lines[1][1][f"train/head{k}/loss"] for k in range(3)]
    assert found == pytest.approx((sums / counts).tolist(), rel=1e-5)


def test_the_logged_loss_of_a_head_is_not_weighted(tmp_path):
    """Heads that say the same of the same targets log the same; weights are in the total alone."""
    rows = [replace(row, ids=[7] * 20, mask=[t >= 6 for t in range(20)]) for row in make_rows(4)]
    sink = MemorySink([])
    fit = make_fit(tmp_path, rows=rows, sink=sink, max_steps=1)
    fit.held_out = rows
    fit.objective._source = lambda rows: [
        torch.ones(len(row.ids) - 1 - row.states_start, 16) for row in rows
    ]
    fit.run()
    for kind in ("eval", "train"):
        line = next(metrics for _, metrics in sink.lines if f"{kind}/loss" in metrics)
        first, *others = (line[f"{kind}/head{k}/loss"] for k in range(3))
        assert first > 1
        assert others == pytest.approx([first, first])
        assert line[f"{kind}/loss"] == pytest.approx((1 + 0.8 + 0.64) * first)


def test_heads_that_no_answer_reaches_log_zero_and_stay_as_they_are(tmp_path):
    """Answers of one token behind two of a prompt teach the first head alone."""
    rows = [replace(row, ids=row.ids[:3], mask=[False, False, True]) for row in make_rows(8)]
    sink = MemorySink([])
    fit = make_fit(tmp_path, rows=rows, sink=sink, weight_decay=0.0)
    fit.held_out = rows
    before = fit.engine.trained_state()
    fit.run()
    values = [value for _, metrics in sink.lines for value in metrics.values()]
    assert all(math.isfinite(value) for value in values)
    for k, zero in ((0, False), (1, True), (2, True)):
        logged = [m[f"train/head{k}/loss"] for _, m in sink.lines if "train/loss" in m]
        assert [loss == 0 for loss in logged] == [zero] * 4
    for name, tensor in fit.engine.trained_state().items():
        assert torch.equal(tensor, before[name]) == (".heads.0." not in name), name


def test_training_lowers_the_loss_of_what_is_trained_on(tmp_path):
    sink = MemorySink([])
    make_fit(tmp_path, sink=sink, epochs=20).run()
    losses = [metrics["train/loss"] for _, metrics in sink.lines if "train/loss" in metrics]
    assert losses[-1] < 0.8 * losses[0]


def test_the_rate_follows_warm_up_and_schedule(tmp_path):
    sink = MemorySink([])
    make_fit(tmp_path, sink=sink, warmup_ratio=0.5, schedule="linear", lr=0.5).run()
    rates = [metrics["train/lr"] for _, metrics in sink.lines if "train/lr" in metrics]
    assert rates == [0.25, 0.5, 0.5, 0.25]


def test_each_group_has_the_rate_that_is_logged_for_it(tmp_path):
    sink = MemorySink([])
    fit = make_fit(tmp_path, sink=sink, schedule="constant", warmup_ratio=0.0, lr=0.5)
    heads = list(fit.objective.parameters())
    fit.objective.groups = lambda: [
        ParameterGroup(name="slow", parameters=heads[:1]),
        ParameterGroup(name="fast", parameters=heads[1:], lr_factor=4.0),
    ]
    fit.run()
    logged = next(metrics for _, metrics in sink.lines if "train/loss" in metrics)
    assert (logged["train/lr"], logged["train/lr/slow"], logged["train/lr/fast"]) == (0.5, 0.5, 2.0)


def test_the_share_of_supervised_tokens_and_the_memory(tmp_path):
    sink = MemorySink([])
    make_fit(tmp_path, sink=sink, log_every=2, max_steps=2).run()
    rows = make_rows(8)  # both steps together read all of them
    own, every = sum(sum(row.mask[1:]) for row in rows), sum(len(row.ids) for row in rows)
    logged = sink.lines[1][1]
    assert logged["data/supervised_share"] == pytest.approx(own / every)
    assert 0.01 < logged["perf/memory_gb"] < 1000


def test_batches_without_targets_are_counted_and_change_nothing(tmp_path):
    rows = make_rows(8)
    silent = [replace(row, mask=[False] * len(row.ids)) for row in rows]
    sink = MemorySink([])
    fit = make_fit(tmp_path / "all", rows=silent, sink=sink, weight_decay=0.1)
    before = fit.engine.trained_state()
    state = fit.run()
    assert largest_difference(fit.engine.trained_state(), before) == 0
    assert state.empty_batches == 8
    assert sink.lines[-2][1]["data/empty_batches"] == 8
    assert sink.lines[-2][1]["train/loss"] == 0


def test_a_batch_without_targets_beside_others_is_counted_too(tmp_path):
    fit = make_fit(tmp_path, batch_size=8, epochs=1)
    mute = {row.id for micro in fit._micro_batches()[:2] for row in micro}
    fit.rows = [
        replace(row, mask=[False] * len(row.ids)) if row.id in mute else row for row in fit.rows
    ]
    assert fit.run().empty_batches == 2
    assert all(bool(torch.isfinite(t).all()) for t in fit.engine.trained_state().values())


def test_rows_of_a_step_lie_together_by_length_whoever_shares_them(tmp_path):
    fit = make_fit(tmp_path, rows=make_rows(16), batch_size=8)
    chosen = {f"row{i}" for i in step_rows(0, num_rows=16, batch_size=8, seed=0)}
    alone = fit._micro_batches()
    lengths = [len(row.ids) for micro in alone for row in micro]
    assert lengths == sorted(lengths, reverse=True)
    assert {row.id for micro in alone for row in micro} == chosen
    shares = []
    for rank in range(2):
        fit.world = World(rank=rank, size=2)
        shares.append(fit._micro_batches())
    assert [micro for pair in zip(*shares, strict=True) for micro in pair] == alone


def saves(fit) -> list[tuple[int, bool]]:
    """Step and `best` of each checkpoint; filled while it runs."""
    found, save = [], fit.checkpoints.save

    def noting(engine, state, *, best):
        found.append((state.step, best))
        save(engine, state, best=best)

    fit.checkpoints = SimpleNamespace(save=noting)
    return found


def test_what_beats_all_before_it_is_saved_as_the_best(tmp_path):
    fit = make_fit(tmp_path, epochs=3, eval_every=1, save_every=100)
    scores = iter([9.9, 1.2, 1.6, 1.6, 1.9, 1.1, 1.4])  # the first is before any update
    fit.objective.score = lambda measured: next(scores)
    found = saves(fit)
    state = fit.run()
    assert found == [(1, True), (2, True), (4, True), (6, False)]
    assert (state.best_step, state.best_score) == (4, 1.9)


@pytest.mark.parametrize(("minutes", "steps"), [(0.5, [2, 4, 6]), (None, [6]), (1e9, [6])])
def test_a_checkpoint_so_many_minutes_after_the_last(tmp_path, monkeypatch, minutes, steps):
    clock = iter(range(20, 1000, 20))  # seconds: as if so many went by between two looks at it
    fit = make_fit(tmp_path, save_every=100, eval_every=100, epochs=3, save_minutes=minutes)
    fit.objective.score = lambda measured: 0.0
    fake = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "time", fake)
    fit._saved_at = 0.0
    found = saves(fit)
    fit.run()
    assert [step for step, _ in found] == steps


def test_only_the_clock_of_the_first_process_counts_and_all_save(tmp_path):
    fit = make_fit(tmp_path, save_minutes=1e-9)
    assert fit._is_overdue()
    fit.world = World(rank=1, size=2)
    assert not fit._is_overdue()

    class TellsOfTheFirst(World):
        def sum(self, values):
            values[-3] = 1  # before the signals of two processes
            return values

    fit.world = TellsOfTheFirst(rank=1, size=2)
    assert fit._step(empty_window(fit.objective.names, CPU), [])


def test_the_progress_line_says_loss_and_score(tmp_path, caplog):
    with caplog.at_level("INFO"):
        state = make_fit(tmp_path).run()
    score = state.held_out["tokens_per_step"][0]
    assert re.search(rf"test 4/4, .*, loss \d+\.\d+, tokens per step {score:.3f}", caplog.text)


def test_number_of_steps():
    optim = make_config().medusa1.optim
    assert total_steps(optim, 9) == 4
    assert total_steps(replace(optim, max_steps=3), 9) == 3
    assert total_steps(replace(optim, max_steps=30), 9) == 4
    with pytest.raises(ConfigError, match="only 3 training rows"):
        total_steps(optim, 3)


def test_a_finished_run_trains_no_more(tmp_path):
    first = make_fit(tmp_path).run()
    sink = MemorySink([])
    again = make_fit(tmp_path, sink=sink).run()
    assert again == first
    assert sink.lines == []
