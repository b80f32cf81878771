"""`scripts/exactness.py` goes through every method; its status says whether answers are equal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    rows = [line.split("│") for line in run.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == 12
    assert {row[3].strip() for row in rows} == {"0"}
    assert max(float(row[2]) for row in rows) > 1.5


def test_a_fault_is_told_by_the_status(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import exactness

    monkeypatch.setattr(exactness, "_reference", lambda backbone, prompt, length: [7] * length)
    arguments = ["--model", "random:llama", "--prompts", "2", "--max-new-tokens", "4"]
    assert exactness.main(arguments) == 1
