"""The GPU check goes through all that it does on a CPU."""

import json
import sys
from pathlib import Path

import pytest
from command_case import run_command

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


def test_a_dry_run_passes_every_check_and_measures_everything(tmp_path):
    folder = tmp_path / "results"
    command = [str(SCRIPT), "--dry-run", str(folder)]

    done = run_command(command, tmp_path, {"PYTHON": sys.executable}, timeout=460)

    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    checks = record["checks"]
    left_out = checks.pop("compiled")
    assert {name: check.get("reason") for name, check in checks.items()} == dict.fromkeys(checks)
    assert {check["outcome"] for check in checks.values()} == {"passed"}
    assert (left_out["outcome"], left_out["reason"]) == ("skipped", "a dry run compiles nothing")
    assert done.status == 0
    assert record["passed"] is True
    assert list(checks) == [
        *("tests", "smoke", "reference", "torch", "zero1", "zero2", "zero3"),
        *("model", "trees", "decode", "train", "large"),
    ]
    numbers = {name: check["numbers"] for name, check in checks.items()}
    assert numbers["tests"]["tests"] > numbers["tests"]["skipped"]
    assert numbers["tests"]["failures"] == numbers["tests"]["errors"] == 0
    assert numbers["torch"]["medusa1_largest_difference"] == 0
    assert numbers["zero3"]["medusa2_largest_difference"] <= record["loss_tolerance"]
    assert numbers["trees"]["overhead_64_nodes"] > 0
    assert numbers["decode"]["plain_vs_transformers"]["ratio"] > 0
    assert numbers["train"]["loss_memory_k5_over_k1"]["ratio"] > 0
    assert [name for name in numbers["large"] if "nodes" in name] == [
        f"overhead_{nodes}_nodes" for nodes in (1, 8, 16, 32, 64)
    ]
    assert numbers["large"]["overhead_64_nodes"]["ratio"] > 0
    assert str(tmp_path) not in path.read_text()
