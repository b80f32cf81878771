"""A finished run that is asked for more, or whose files were changed by hand."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_case import manifest, run_here

from medusa_train.data.rows import SCHEMA, part_path
from medusa_train.evaluate.results import read_results

pytestmark = pytest.mark.slow

SMOKE = "+recipe=smoke"
JOINT = "stages=[distill,medusa1,medusa2,draft,evaluate]"


def test_medusa2_is_added_without_a_merge_and_merged_when_it_is_measured(finished):
    run = finished / "outputs" / "smoke"
    done = run_here(finished, SMOKE, JOINT)
    assert done.status == 1
    assert "evaluate was made with other settings" in done.err
    assert "medusa2 was no part of the run then" in done.err

    assert run_here(finished, SMOKE, "stages=[medusa2]", "medusa2.merge=false").status == 0
    trained = manifest(run / "medusa2")["summary"]
    assert not (run / "medusa2" / "model").exists()
    (run / "evaluate").rename(run / "evaluate_before")

    done = run_here(finished, SMOKE, JOINT)

    assert done.status == 0
    assert "its adapter is merged now" in done.err
    found = manifest(run / "medusa2")["summary"]
    assert found.pop("merged_dtype") is not None
    assert found == {name: value for name, value in trained.items() if name != "merged_dtype"}
    results = read_results(run / "evaluate" / "results.json")
    assert results.heads.backbone_change is not None
    assert read_results(run / "evaluate_before" / "results.json").heads.backbone_change is None


def change_row(split: Path, **fields: object) -> Path:
    """Change fields of the second row of the first part."""
    path = part_path(split, 0)
    rows = pq.read_table(path).to_pylist()
    rows[1] |= {"id": "odd", **fields}
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return path


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ids": [], "mask": []}, "ids is empty"),
        ({"mask": [False]}, "mask has 1 places, expected one for each of the"),
        ({"ids": [1, 99999], "mask": [False, True]}, "ids has 99999 at token 1, expected 0 to"),
    ],
)
def test_a_row_changed_by_hand_is_named_before_training_and_before_measuring(
    finished, fields, says
):
    rows = finished / "outputs" / "smoke" / "distill"
    path = change_row(rows / "calibration", **fields)
    (finished / "outputs" / "smoke" / "evaluate" / "manifest.json").unlink()
    for stage in (
        ("stages=[evaluate]",),
        ("stages=[medusa1]", "run_name=other", f"paths.distill={rows}"),
        ("stages=[draft]", "run_name=other", f"paths.distill={rows}"),
    ):
        done = run_here(finished, SMOKE, *stage)

        assert done.status == 1
        assert f"row odd in {path} (number 1): {says}" in done.err


def test_a_manifest_changed_by_hand_is_named_before_measuring(finished):
    run = finished / "outputs" / "smoke"
    path = run / "medusa1" / "manifest.json"
    whole = json.loads(path.read_text())
    (run / "evaluate" / "manifest.json").unlink()
    for content, says in (
        ({**whole, "summary": {}}, "summary.tokens is null, expected a number"),
        ({name: whole[name] for name in ("stage", "status")}, "fingerprint is missing or no text"),
        ("no JSON", "stage is missing or no text"),
    ):
        path.write_text(json.dumps(content))

        done = run_here(finished, SMOKE, "stages=[evaluate]")

        assert done.status == 1
        assert says in done.err
        assert "put it back as it was" in done.err
