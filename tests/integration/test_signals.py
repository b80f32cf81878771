"""SIGTERM, whoever gets it: all processes save together and end, and SLURM starts them again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from command_case import TIMEOUT, environment, signal_when, start

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
ENDLESS = (
    "+recipe=smoke",
    "stages=[medusa1]",
    "medusa1.optim.epochs=100000",
    "medusa1.optim.log_every=1",
    "medusa1.optim.eval_every=1000000",
    "medusa1.optim.save_every=1000000",
)


def await_(come: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not come():
        assert process.poll() is None, "ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.02)  # between looks, not for luck


def trains(stage: Path) -> bool:
    """Whether the first step is logged."""
    metrics = stage / "metrics.jsonl"
    return metrics.exists() and "train/loss" in metrics.read_text()


def signal_rank(launcher: int) -> None:
    """The second process alone."""
    workers = psutil.Process(launcher).children()
    (second,) = [worker for worker in workers if worker.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGTERM)


SENT: dict[str, Callable[[int], None]] = {
    "a rank": signal_rank,
    "torchrun": lambda launcher: os.kill(launcher, signal.SIGTERM),
    "the process group": lambda launcher: os.killpg(launcher, signal.SIGTERM),
}


@pytest.mark.parametrize("to", SENT)
def test_both_processes_save_and_end_after_sigterm_to(to, tmp_path, smoke_run):
    rows = smoke_run[0] / "outputs" / "smoke" / "distill"
    torchrun = (BIN / "torchrun", "--standalone", "--nproc_per_node", "2", "-m", "medusa_train")
    run = tmp_path / "outputs" / "smoke"
    process = subprocess.Popen(
        [*torchrun, *ENDLESS, f"paths.distill={rows}"],
        cwd=tmp_path,
        env=environment({"DS_ACCELERATOR": "cpu"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        await_(lambda: trains(run / "medusa1"), process)
        SENT[to](process.pid)
        # torchrun's own, whatever its processes return: 1, or now and then it aborts on leaving
        assert process.wait(TIMEOUT) in (1, -signal.SIGABRT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    (state,) = (run / "medusa1" / "checkpoints").glob("step-*/state.json")
    step = json.loads(state.read_text())["step"]
    assert step >= 1
    for rank in range(2):
        said = (run / f"medusa_train.rank{rank}.log").read_text()
        assert f"stopped by SIGTERM after step {step}; a checkpoint is written" in said


def test_a_single_process_ends_with_the_status_of_a_signal(tmp_path, smoke_run):
    rows = smoke_run[0] / "outputs" / "smoke" / "distill"
    process = start(tmp_path, *ENDLESS, f"paths.distill={rows}")
    stage = tmp_path / "outputs" / "smoke" / "medusa1"
    assert signal_when(process, signal.SIGTERM, lambda: trains(stage)) == 128 + signal.SIGTERM
    assert len(list((stage / "checkpoints").glob("step-*/state.json"))) == 1


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """SLURM's commands and environment; `srun` does what the file `job` says."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in {
        "srun": 'printf "%s\\n" "$@" > srun.said; . ./job',
        "scontrol": '[ "$1" != show ] && echo "$@" > scontrol.said; echo node7',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{script}\n")
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{BIN}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "54321",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }


def submit(folder: Path, cluster: dict[str, str], job: str) -> subprocess.Popen[str]:
    (folder / "job").write_text(job)
    command = [str(SCRIPT), "+recipe=smoke", "stages=[distill,medusa1]"]
    return subprocess.Popen(
        command, cwd=folder, env=environment(cluster), stderr=subprocess.PIPE, text=True
    )


def finish(folder: Path, *stages: str) -> None:
    for stage in stages:
        manifest = folder / "outputs" / "smoke" / stage / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text('{"status": "done"}')


def test_a_slurm_job_that_is_told_to_stop_passes_it_on_and_is_queued_again(tmp_path, cluster):
    finish(tmp_path, "distill")
    job = "trap 'kill $!; touch told; exit 1' TERM\nsleep 1000 &\ntouch began\nwait"
    process = submit(tmp_path, cluster, job)
    await_((tmp_path / "began").exists, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)

    assert (tmp_path / "told").exists()
    assert (tmp_path / "scontrol.said").read_text() == "requeue 54321\n"
    assert process.returncode == 0
    said = (tmp_path / "srun.said").read_text().split()
    assert said[1:] == [
        *("torchrun", "--nnodes", "2", "--nproc_per_node", "4"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", "node7:24321", "--rdzv_id", "54321"),
        *("-m", "medusa_train", "+recipe=smoke", "stages=[distill,medusa1]"),
    ]


@pytest.mark.parametrize(
    ("done", "job", "status"),
    [
        (("distill", "medusa1"), "exit 0", 0),
        (("distill",), "exit 0", 1),  # the launcher's word is not enough
        (("distill",), "exit 3", 3),
    ],
)
def test_a_slurm_job_that_ends_by_itself_is_not_queued_again(done, job, status, tmp_path, cluster):
    finish(tmp_path, *done)
    process = submit(tmp_path, cluster, job)
    _, said = process.communicate(timeout=TIMEOUT)

    assert process.returncode == status
    assert ("medusa1 is not done" in said) == (status != 0)
    assert not (tmp_path / "scontrol.said").exists()


def test_a_slurm_job_needs_a_recipe(tmp_path):
    done = subprocess.run([str(SCRIPT)], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
