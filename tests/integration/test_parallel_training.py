"""Two processes learn what one does, under ZeRO 1, 2 and 3; and stop and resume together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_case import largest_difference, write_rows

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = str(Path(__file__).with_name("training_process.py"))
WEIGHTS = {"medusa1": "heads/medusa_lm_head.safetensors", "draft": "model/model.safetensors"}
# One step's rounding of about 1e-7 in the gradient, through AdamW at lr 0.01
TOLERANCE = 2e-4


def launch(processes: int, rows: Path, *runs: tuple[str, ...]) -> None:
    """Start the script and wait; everything it started is ended when it takes too long."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    env = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else [])]
    command += [SCRIPT, str(rows), *(part for run in runs for part in run)]
    job = subprocess.Popen(
        command,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise
    assert job.returncode == 0, output


def weights(folder: Path, stage: str):
    return load_file(folder / WEIGHTS[stage])


def metrics(folder: Path) -> list[dict[str, float]]:
    left_out = ("time", "perf/tokens_per_s")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{name: v for name, v in line.items() if name not in left_out} for line in lines]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Five held-out rows: they cannot be shared out evenly."""
    return write_rows(tmp_path_factory.mktemp("rows") / "distill", calibration=5)


@pytest.fixture(scope="module")
def one(rows, tmp_path_factory) -> Path:
    """Both stages on one process: with plain torch, and the heads with DeepSpeed too."""
    folder = tmp_path_factory.mktemp("one")
    launch(
        1,
        rows,
        ("medusa1", str(folder / "medusa1"), "1", "torch", "all"),
        ("draft", str(folder / "draft"), "1", "torch", "all"),
        ("medusa1", str(folder / "deepspeed"), "2", "deepspeed", "all"),
    )
    return folder


def test_deepspeed_alone_is_plain_torch(one):
    found = weights(one / "deepspeed", "medusa1")
    assert largest_difference(found, weights(one / "medusa1", "medusa1")) < TOLERANCE


@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_two_processes_learn_what_one_does(one, rows, tmp_path, zero):
    runs = [(stage, str(tmp_path / stage), zero, "auto", "all") for stage in WEIGHTS]
    launch(2, rows, *runs, ("medusa1", str(tmp_path / "nan"), zero, "auto", "nan"))
    for stage in WEIGHTS:
        found, expected = weights(tmp_path / stage, stage), weights(one / stage, stage)
        assert largest_difference(found, expected) < TOLERANCE, stage
        here, there = metrics(tmp_path / stage), metrics(one / stage)
        assert [line.keys() for line in here] == [line.keys() for line in there]
        for two_line, one_line in zip(here, there, strict=True):
            assert two_line == pytest.approx(one_line, rel=1e-3, abs=1e-6)
    # One process alone had the fault; all of them stop, and say so before the step is made
    for rank in (0, 1):
        message = (tmp_path / "nan" / f"failed-{rank}").read_text()
        assert message.startswith("step 1: the loss is not finite; no weight was changed")


def test_a_signal_to_one_process_stops_both_and_they_resume(one, rows, tmp_path):
    folder = tmp_path / "medusa1"
    again = ("medusa1", str(folder), "3", "auto")
    launch(2, rows, (*again, "1"))
    assert [(folder / f"interrupted-{rank}").read_text() for rank in (0, 1)] == ["143", "143"]
    (saved,) = (folder / "checkpoints").iterdir()
    assert saved.name == "step-000001"
    launch(2, rows, (*again, "all"))
    expected = weights(one / "medusa1", "medusa1")
    assert largest_difference(weights(folder, "medusa1"), expected) < TOLERANCE
