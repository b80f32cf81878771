"""The command line for tests: in this process where that is enough, else as one of its own."""

import contextlib
import io
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from medusa_train import __main__ as command

TIMEOUT = 240  # seconds after which a hanging process fails its test


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str


def run_here(cwd: Path, *arguments: str) -> Outcome:
    """Run the command in this process: a second instead of ten, and it can be patched.

    An exception that the command line would show with a traceback fails the test.
    """
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["medusa_train", *arguments]
    command._started = False
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _root_logging(),
    ):
        try:
            command.main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 0
        finally:
            sys.argv = before
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return Outcome(status=status, out=out.getvalue(), err=err.getvalue())


def run_process(
    cwd: Path, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> Outcome:
    """Run `python -m medusa_train` in a process of its own."""
    return run_command([sys.executable, "-m", "medusa_train", *arguments], cwd, env, timeout)


def run_command(
    command_line: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Outcome:
    """Run any command; what it prints is shown when its test fails."""
    done = subprocess.run(
        command_line,
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    print(done.stdout, done.stderr)  # noqa: T201
    return Outcome(status=done.returncode, out=done.stdout, err=done.stderr)


def start(cwd: Path, *arguments: str) -> ForkServerProcess:
    """Start the command as a process to be killed; what it says goes to `said.log` in `cwd`.

    It is forked from a server that has imported torch and runs nothing: many starts take as long
    as one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["medusa_train.pipeline"])
    process = context.Process(target=_be_the_command, args=(str(cwd), arguments))
    process.start()
    return process


def signal_when(process: ForkServerProcess, number: int, come: Callable[[], bool]) -> int:
    """Send a signal to a process as soon as something holds; its status, below 0 if killed."""
    deadline = time.monotonic() + TIMEOUT
    while process.is_alive() and not come():
        assert time.monotonic() < deadline
        time.sleep(0.001)  # between looks, not for luck
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, number)
    return ended(process)


def ended(process: ForkServerProcess) -> int:
    """Wait for the end of a process; its status."""
    process.join(TIMEOUT)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"still running after {TIMEOUT} s")
    return process.exitcode


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's traces, one thread, no hub."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(extra or {})}


def losses(stage: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and training losses of each such line of a stage's `metrics.jsonl`."""
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], {name: line[name] for name in line if name.endswith("loss")})
        for line in lines
        if "train/loss" in line
    ]


def manifest(stage: Path) -> dict[str, Any]:
    """The manifest of a stage folder."""
    return json.loads((stage / "manifest.json").read_text())


def _be_the_command(cwd: str, arguments: Sequence[str]) -> None:
    os.chdir(cwd)
    said = os.open("said.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)  # as `environment` asks of the others
    sys.argv = ["medusa_train", *arguments]
    command.main()


@contextlib.contextmanager
def _root_logging() -> Iterator[None]:
    """Put the root logger back as it was: the command sets up its own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = handlers
        root.setLevel(level)
