"""Two processes learn what one does, under ZeRO 1, 2 and 3; and go on from each other."""

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
WEIGHTS = {
    "medusa1": ("heads/medusa_lm_head.safetensors",),
    "medusa2": ("heads/medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"),
    "draft": ("model/model.safetensors",),
}
# Of a weight, a twentieth of the learning rate: AdamW makes steps of about that size of whatever
# gradient there is, so where it is next to zero its rounding counts
TOLERANCE = 0.05 * 0.01
# Medusa-2 has two learning rates, a LoRA and its teacher in the same engine
FLOAT32 = {stage: (stage, ()) for stage in WEIGHTS}
BFLOAT16 = ("medusa2", ("medusa2.optim.compute_dtype=bfloat16", "medusa2.optim.lr=1e-4"))
RUNS = {**FLOAT32, "bfloat16": BFLOAT16}


def launch(processes: int, rows: Path, *runs: tuple[str, Path, tuple[str, ...], str]) -> None:
    """Start the script and wait; everything it started is ended when it takes too long."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    env = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else [])]
    job = subprocess.Popen(
        [*command, SCRIPT, str(rows), json.dumps(runs, default=str)],
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


def metrics(folder: Path) -> list[dict[str, float]]:
    """What both engines log: losses, hits, learning rates and the norm of all gradients."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    kept = ("step", "train/", "eval/")
    return [
        {
            name: value
            for name, value in line.items()
            if name.startswith(kept) and not name.startswith("train/grad_norm/")
        }
        for line in lines
    ]


def check_weights(here: Path, there: Path, stage: str, *, within: float) -> None:
    for file in WEIGHTS[stage]:
        assert largest_difference(load_file(here / file), load_file(there / file)) < within, file


def check_metrics(here: Path, there: Path, *, within: float) -> None:
    found, expected = metrics(here), metrics(there)
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    assert any("train/grad_norm" in line for line in found)
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, rel=0, abs=within)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Five held-out rows: they cannot be shared out evenly."""
    return write_rows(tmp_path_factory.mktemp("rows") / "distill", calibration=5)


@pytest.fixture(scope="module")
def one(rows, tmp_path_factory) -> Path:
    """All stages on one process with plain torch, and the heads with DeepSpeed too."""
    folder = tmp_path_factory.mktemp("one")
    runs = [(stage, folder / name, more, "all") for name, (stage, more) in RUNS.items()]
    launch(1, rows, *runs, ("medusa1", folder / "alone", ("deepspeed=zero2",), "all"))
    return folder


def test_deepspeed_alone_is_plain_torch(one):
    check_weights(one / "alone", one / "medusa1", "medusa1", within=TOLERANCE)
    check_metrics(one / "alone", one / "medusa1", within=1e-5)


@pytest.fixture(scope="module", params=["zero1", "zero2", "zero3"])
def two(request, rows, tmp_path_factory) -> Path:
    """All stages on two processes, and one of which the last process finds a fault."""
    folder, choice = tmp_path_factory.mktemp(request.param), f"deepspeed={request.param}"
    runs = [(s, folder / name, (choice, *more), "all") for name, (s, more) in RUNS.items()]
    launch(2, rows, *runs, ("medusa1", folder / "nan", (choice,), "nan"))
    return folder


def test_sharded_heads_begin_as_the_lm_head(one, two):
    at_first = [metrics(folder / "medusa1")[0] for folder in (two, one)]
    assert at_first[0]["step"] == 0
    assert at_first[0] == pytest.approx(at_first[1], rel=0, abs=1e-6)


def test_two_processes_learn_what_one_does(one, two):
    for name, (stage, _) in FLOAT32.items():
        check_metrics(two / name, one / name, within=1e-5)
        check_weights(two / name, one / name, stage, within=TOLERANCE)
    check_metrics(two / "bfloat16", one / "bfloat16", within=2e-3)


def test_a_fault_on_one_process_stops_all_before_the_step(two):
    for rank in (0, 1):
        message = (two / "nan" / f"failed-{rank}").read_text()
        assert message.startswith("step 1: the loss is not finite; no weight was changed")


def test_a_run_goes_on_under_another_engine_and_number_of_processes(one, rows, tmp_path):
    folder = tmp_path / "medusa2"
    for step, processes, choice in ((1, 2, "zero1"), (3, 1, "none")):
        launch(processes, rows, ("medusa2", folder, (f"deepspeed={choice}",), str(step)))
        assert (folder / f"interrupted-{processes - 1}").read_text() == "143"
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        assert newest.name == f"step-{step:06d}"
    launch(2, rows, ("medusa2", folder, ("deepspeed=zero3",), "all"))
    check_metrics(folder, one / "medusa2", within=1e-5)
    check_weights(folder, one / "medusa2", "medusa2", within=TOLERANCE)
