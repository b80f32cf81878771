import matplotlib
import matplotlib.image
import numpy as np
import pytest
from results_case import results_of, tiny_model

from medusa_train.decode.generation import Generation
from medusa_train.evaluate import plots
from medusa_train.evaluate.results_schema import DraftInfo, HeadsInfo, TreeInfo
from medusa_train.evaluate.statistics import Measurement

PROMPTS = 30


def synthetic(rate, step_seconds, depth, steps=20):
    """Answers whose steps accept drafts one after another, each at the given rate."""
    draws = np.random.default_rng(0)
    found = []
    for i in range(PROMPTS):
        prompt_rate = min(0.95, rate * draws.uniform(0.6, 1.4))
        runs = draws.random((steps, depth)) < prompt_rate
        accepted = runs.cumprod(axis=1).sum(axis=1).tolist() if depth else [0] * steps
        generation = Generation(
            ids=list(range(1 + sum(accepted) + len(accepted))),
            finish_reason="length",
            accepted=accepted,
            prefill_seconds=0.02,
            decode_seconds=step_seconds * steps,
        )
        found.append(Measurement(prompt_id=str(i), kind="k", generation=generation))
    return found


def results(medusa=True, draft=True, steps=20):
    measured = {"plain": synthetic(0, 0.03, 0, steps)}
    if medusa:
        measured["medusa"] = synthetic(0.6, 0.04, 4, steps)
    if draft:
        for gamma in (2, 3, 10):
            measured[f"draft_model/gamma={gamma}"] = synthetic(
                0.7, 0.03 + 0.01 * gamma, gamma, steps
            )
    weights = {
        "architecture": "a",
        "parameters": 1,
        "bytes": 4,
        "training_tokens": 1,
        "training_seconds": 1.0,
    }
    return results_of(
        measured,
        tiny_model(PROMPTS),
        heads=HeadsInfo(**weights, top1=[0.5], top5=[0.7]) if medusa else None,
        draft=DraftInfo(**weights) if draft else None,
        tree=TreeInfo(nodes=4, depth=4, paths=[[0]], chosen=[]) if medusa else None,
    )


def bars(found):
    """Label and height of each bar."""
    axes = plots._speedup_figure(found).axes[0]
    labels = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    return list(zip(labels, [bar.get_height() for bar in axes.patches], strict=True))


def lines(found):
    """Label and heights of each line."""
    axes = plots._acceptance_figure(found).axes[0]
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def test_pictures_have_the_size_they_should_and_are_not_blank(tmp_path):
    paths = plots.draw_plots(tmp_path, results())
    assert [path.name for path in paths] == ["speedup.png", "acceptance.png"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)  # nothing half written is left
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image.shape[:2] == (600, 1050)
        assert image.std() > 0.05


def test_bars_show_every_method_and_gamma_in_order():
    found = results()
    by_gamma = found.draft.by_gamma
    assert bars(found) == [
        ("plain", 1.0),
        *((f"draft gamma {gamma}", by_gamma[gamma].speedup) for gamma in ("2", "3", "10")),
        ("Medusa 4 nodes", found.methods.medusa.speedup),
    ]


def test_whiskers_are_the_intervals():
    found = results(draft=False)
    axes = plots._speedup_figure(found).axes[0]
    upright = [c.get_segments()[0] for c in axes.collections if len(c.get_segments()) == 1]
    ends = [tuple(segment[:, 1]) for segment in upright]
    assert ends == [(1.0, 1.0), pytest.approx(found.methods.medusa.speedup_ci95)]


def test_lines_show_the_shares_by_depth():
    found = results()
    draft, medusa = found.methods.draft_model, found.methods.medusa
    assert lines(found) == {
        "Medusa": medusa.acceptance_by_depth,
        f"draft model, gamma {draft.gamma}": draft.acceptance_by_depth,
    }


def test_absent_methods_are_left_out():
    assert [label for label, _ in bars(results(draft=False))] == ["plain", "Medusa 4 nodes"]
    assert list(lines(results(draft=False))) == ["Medusa"]
    assert [label for label, _ in bars(results(medusa=False, draft=False))] == ["plain"]


def test_without_steps_the_picture_says_so(tmp_path):
    found = results(steps=0)
    assert lines(found) == {}
    texts = [text.get_text() for text in plots._acceptance_figure(found).axes[0].texts]
    assert texts == ["no step with drafts was measured"]
    assert len(plots.draw_plots(tmp_path, found)) == 2
