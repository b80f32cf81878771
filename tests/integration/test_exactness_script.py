"""`scripts/exactness.py` goes through every method; its status says whether answers are equal."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.ops.tree import build_tree

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_all_methods_say_what_transformers_says():
    command = [sys.executable, "scripts/exactness.py", "--model", "random:llama"]
    run = subprocess.run(
        [*command, "--prompts", "3", "--max-new-tokens", "8"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "3 prompts" in run.stdout
    rows = [line.split("│") for line in run.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == 12
    assert {row[3].strip() for row in rows} == {"0"}
    assert max(float(row[2]) for row in rows) > 1.5


@pytest.fixture
def exactness(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("exactness")


def test_a_fault_is_told_by_the_status(exactness, monkeypatch):
    monkeypatch.setattr(exactness, "_reference", lambda backbone, prompt, length: [7] * length)
    arguments = ["--model", "random:llama", "--prompts", "2", "--max-new-tokens", "4"]
    assert exactness.main(arguments) == 1


@pytest.mark.parametrize("option", ["--prompts", "--batch-size", "--max-new-tokens"])
@pytest.mark.parametrize("count", ["0", "-3", "x"])
def test_what_would_compare_nothing_is_refused(exactness, option, count, capsys):
    with pytest.raises(SystemExit):
        exactness.main([option, count])
    assert option in capsys.readouterr().err


def test_heads_that_cannot_be_read_are_told_of_before_anything_runs(exactness, tmp_path, capsys):
    assert exactness.main(["--model", "random:llama", "--heads", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("num_heads", [1, 2, 5])
def test_trees_for_any_number_of_heads(exactness, num_heads):
    trees = exactness.trees(num_heads)
    assert len(trees) == 8
    for paths in trees.values():
        build_tree(paths, num_heads=num_heads, max_rank=64)
