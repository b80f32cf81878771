"""One finished smoke run for all end-to-end tests; each works on a copy of it."""

import shutil
from pathlib import Path

import pytest
from command_case import Outcome, run_process

SMOKE = "+recipe=smoke"


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory) -> tuple[Path, Outcome]:
    """Working folder of `+recipe=smoke`, run once as a process, and how it ended. Do not change."""
    folder = tmp_path_factory.mktemp("smoke")
    return folder, run_process(folder, SMOKE)


@pytest.fixture
def finished(smoke_run, tmp_path) -> Path:
    """A working folder of one's own in which `+recipe=smoke` has been run."""
    shutil.copytree(smoke_run[0] / "outputs", tmp_path / "outputs")
    return tmp_path
