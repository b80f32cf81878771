"""Two CPU processes do what one does, under each launcher and each choice of DeepSpeed.

No compiler is there to help.
"""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from command_case import losses, manifest, run_command, run_here
from safetensors.torch import load_file

from medusa_train.data.rows import read_split

pytestmark = pytest.mark.slow

SMOKE = "+recipe=smoke"
BIN = Path(sys.executable).parent
STAGES = ("distill", "medusa1", "draft", "evaluate")


def free_port() -> int:
    """Below the range that outgoing connections take theirs from."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port")


def by_deepspeed(*arguments: str) -> list[str]:
    command = [str(BIN / "deepspeed"), "-q", "--num_gpus", "2", "--master_port", str(free_port())]
    return [*command, "--module", "medusa_train", *arguments]


def by_torchrun(*arguments: str) -> list[str]:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]
    return [*command, "-m", "medusa_train", *arguments]


LAUNCHERS = {"deepspeed": by_deepspeed, "torchrun": by_torchrun}


@pytest.fixture
def no_compiler(tmp_path) -> dict[str, str]:
    """An environment whose compilers fail and note that they were asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcc", "g++", "cc", "c++", "clang", "clang++", "ninja", "nvcc"):
        fake = tools / name
        fake.write_text(f"#!/bin/sh\necho {name} >> {tools}/asked\nexit 1\n")
        fake.chmod(0o755)
    (tmp_path / "extensions").mkdir()
    return {
        "PATH": f"{tools}:{BIN}:{os.environ['PATH']}",
        "CC": str(tools / "gcc"),
        "CXX": str(tools / "g++"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_run_all_stages_like_one(launcher, tmp_path, smoke_run, no_compiler):
    done = run_command(LAUNCHERS[launcher](SMOKE), tmp_path, no_compiler)

    assert done.status == 0
    assert "Traceback" not in done.err
    one, two = (folder / "outputs" / "smoke" for folder in (smoke_run[0], tmp_path))
    assert {manifest(two / stage)["status"] for stage in STAGES} == {"done"}
    assert (two / "evaluate" / "report.md").is_file()
    assert {p.name for p in (two / ".hydra").iterdir()} == {"rank0", "rank1"}
    check_rows(one, two)
    for stage in ("medusa1", "draft"):
        check_losses(one / stage, two / stage)
    check_heads(one, two)
    check_no_compiler(tmp_path)


# Of a file of one's own: nothing that the run says is repeated but where it is the same
CUSTOM = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 1000},
}


@pytest.mark.parametrize(
    "choice", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "custom"]
)
def test_heads_are_the_same_under_every_deepspeed_config(choice, tmp_path, smoke_run, no_compiler):
    one, two = (folder / "outputs" / "smoke" for folder in (smoke_run[0], tmp_path))
    settings = [f"deepspeed={choice}", "stages=[medusa1]", f"paths.distill={one / 'distill'}"]
    if choice == "custom":
        (tmp_path / "mine.json").write_text(json.dumps(CUSTOM))
        settings.append("deepspeed.config=mine.json")

    done = run_command(by_torchrun(SMOKE, *settings), tmp_path, no_compiler)

    assert done.status == 0
    assert "8 rows a step = 4 a micro-batch x 1 micro-batches x 2 processes" in done.err
    check_losses(one / "medusa1", two / "medusa1")
    check_heads(one, two)
    check_no_compiler(tmp_path)


def test_what_two_processes_have_saved_one_goes_on_with(tmp_path, finished, smoke_run):
    """As a run whose last checkpoint but one was the last thing that two processes wrote."""
    folder = finished / "outputs" / "smoke" / "medusa1"
    shutil.rmtree(folder)
    settings = (SMOKE, "stages=[medusa1]", "deepspeed=zero3")
    assert run_command(by_torchrun(*settings), finished).status == 0
    checkpoints = sorted((folder / "checkpoints").iterdir())
    state = json.loads((checkpoints[-2] / "state.json").read_text())
    assert (state["step"], state["processes"], state["engine"]) == (6, 2, "deepspeed zero3")
    shutil.rmtree(checkpoints[-1])
    shutil.rmtree(folder / "heads")
    (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"done"', '"running"')
    )

    assert run_here(finished, SMOKE, "stages=[medusa1]").status == 0

    assert manifest(folder)["status"] == "done"
    check_heads(smoke_run[0] / "outputs" / "smoke", finished / "outputs" / "smoke")


def test_a_deepspeed_file_that_disagrees_is_refused_before_any_model_is_loaded(tmp_path):
    (tmp_path / "mine.json").write_text('{"train_batch_size": 32, "fp16": {"enabled": true}}')

    done = run_here(tmp_path, SMOKE, "deepspeed=custom", "deepspeed.config=mine.json")

    assert done.status == 2
    assert "mine.json does not agree with the run, 3 key(s) to change" in done.err
    assert "loading" not in done.err


def check_no_compiler(folder: Path) -> None:
    """Nothing was built, and no compiler asked to."""
    assert list((folder / "extensions").iterdir()) == []
    assert not (folder / "tools" / "asked").exists()


def check_rows(one: Path, two: Path) -> None:
    """The very same rows, whoever made them."""
    for split in ("train", "calibration"):
        rows = [read_split(run / "distill" / split) for run in (one, two)]
        assert [(r.id, r.ids) for r in rows[0]] == [(r.id, r.ids) for r in rows[1]]


def check_losses(one: Path, two: Path) -> None:
    """Each logged loss, to a few float32 roundings."""
    alone, shared = losses(one), losses(two)
    assert [step for step, _ in alone] == [step for step, _ in shared] == [2, 4, 6, 8]
    for (_, expected), (_, found) in zip(alone, shared, strict=True):
        assert found == pytest.approx(expected, rel=0, abs=1e-5)


def check_heads(one: Path, two: Path) -> None:
    """Weights of the trained heads."""
    heads = [load_file(r / "medusa1" / "heads" / "medusa_lm_head.safetensors") for r in (one, two)]
    assert heads[0].keys() == heads[1].keys()
    for name, tensor in heads[0].items():
        torch.testing.assert_close(heads[1][name], tensor, rtol=0, atol=1e-4)


def test_the_script_starts_the_launcher_with_its_arguments(tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "train_deepspeed.sh"
    fake = tmp_path / "deepspeed"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUS": "3", "PORT": "1234"}

    done = run_command([str(script), SMOKE, "run_name=two words"], tmp_path, env)

    assert done.status == 0
    assert done.out.splitlines() == [
        *("--num_gpus", "3", "--master_port", "1234", "--module", "medusa_train"),
        *(SMOKE, "run_name=two words"),
    ]
    assert run_command([str(script)], tmp_path, env).status == 2
