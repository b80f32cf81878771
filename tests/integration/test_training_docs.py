"""The commands of docs/training.md, and the names of metrics it explains."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command_case import manifest, run_here

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def commands(program: str) -> list[list[str]]:
    """Arguments of each command of the text that begins so."""
    blocks = re.findall(r"^```bash\n((?s:.*?))^```$", TEXT, re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line.removeprefix(program)) for line in lines if line.startswith(program)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """What the commands for this package leave, run in order."""
    folder = tmp_path_factory.mktemp("docs")
    found = commands("python -m medusa_train")
    assert len(found) == 2
    for arguments in found:
        assert run_here(folder, *arguments).status == 0
    return folder / "outputs"


def test_each_run_of_the_multirun_has_its_own_value_and_folder(outputs):
    rates = [
        manifest(outputs / f"smoke-{i}" / "medusa1")["settings"]["medusa1"]["optim"]["lr"]
        for i in range(2)
    ]
    assert rates == [1e-3, 3e-3]
    assert {p.name for p in outputs.iterdir() if p.is_dir()} == {"smoke", "smoke-0", "smoke-1"}


def test_every_metric_that_is_logged_is_explained(outputs):
    lines = (outputs / "smoke-0" / "medusa1" / "metrics.jsonl").read_text().splitlines()
    logged = {name for line in lines for name in json.loads(line)} - {"step", "time"}
    general = {re.sub(r"head\d", "{head}", name) for name in logged}
    general = {name.replace("{head}/loss", "{loss}/loss") for name in general}
    general = {re.sub(r"^(train/\w+)/heads$", r"\1/{group}", name) for name in general}
    explained = set(re.findall(r"`((?:train|eval|perf|data)/[^`]+)`", TEXT))
    assert general - explained == set()
    assert general >= explained - {"eval/top1", "eval/kl", "eval/agreement"}


def test_the_other_commands_name_files_that_exist():
    [job], [sweep] = commands("sbatch"), commands("wandb sweep")
    root = Path(__file__).parents[2]
    for argument in (job[3], sweep[0]):
        assert (root / argument).is_file()
