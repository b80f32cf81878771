"""A run that measures further methods, lossy ones among them, from the command to the report."""

import json
import shutil

import pytest
from command_case import manifest, run_here

from medusa_train.evaluate.results import read_results

pytestmark = pytest.mark.slow

SMOKE = "+recipe=smoke"
ALSO = ("lookup", "draft_adaptive", "medusa_typical")
ASKED = f"evaluate.also=[{','.join(ALSO)}]"


def test_further_methods_are_measured_and_reported_and_a_lossy_one_is_called_that(finished):
    folder = finished / "outputs" / "smoke" / "evaluate"
    shutil.rmtree(folder)

    done = run_here(finished, SMOKE, "stages=[evaluate]", ASKED)

    assert done.status == 0, done.err
    results = read_results(folder / "results.json")
    assert tuple(results.methods.others) == ALSO
    assert [method.lossy for method in results.methods.others.values()] == [False, False, True]
    for name in ("lookup", "draft_adaptive"):
        assert results.methods.others[name].exactness.identical == 4  # float32
        assert results.comparison.medusa_over_others[name].ratio > 0
    answers = json.loads((folder / "answers.json").read_text())
    assert set(ALSO) < set(answers)
    assert answers["medusa_typical"] != answers["plain"]  # drawn from a random model
    rows = [line for line in (folder / "report.md").read_text().splitlines() if "typical" in line]
    assert sum(row.startswith("|") for row in rows) == 2
    assert all("(lossy)" in row for row in rows)
    assert manifest(folder)["summary"]["medusa_typical_lossy/speedup"] > 0


def test_an_adaptive_draft_without_a_draft_model_is_refused_before_anything_runs(tmp_path):
    done = run_here(tmp_path, SMOKE, "stages=[distill,medusa1,evaluate]", ASKED)

    assert done.status == 2  # as for any setting
    assert "evaluate.also has draft_adaptive, but" in done.err
    assert list((tmp_path / "outputs" / "smoke").glob("*/manifest.json")) == []
