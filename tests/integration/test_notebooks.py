"""Every notebook runs, cell by cell, in the folder of a finished smoke run."""

import json
import sys
from pathlib import Path

import pytest
from command_case import run_command

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks_and_they_hold_no_output():
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        assert not any(cell.get("outputs") for cell in json.loads(notebook.read_text())["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_cells_run(finished, notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    done = run_command([sys.executable, "-c", code], finished)
    assert done.status == 0, done.err
