"""The frame of the GPU check: what it refuses, what it goes on after, and what it writes."""

import json
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def checks(monkeypatch):
    """Checks to take the place of the real ones."""
    import gpu_check

    found = {}
    monkeypatch.setattr(gpu_check, "CHECKS", found)
    return found


def run(folder, *options):
    """Exit status and the record of a dry run."""
    import gpu_check

    status = gpu_check.main([str(folder), "--dry-run", *options])
    (path,) = folder.iterdir()
    return status, json.loads(path.read_text()), path


def measures(place, numbers):
    numbers["ratio"] = 1.5


def fails(place, numbers):
    numbers["measured before"] = 2
    raise RuntimeError(f"no {place.work}/x")


def test_a_failing_check_stops_no_other_and_shows_in_the_exit_status(checks, tmp_path, capsys):
    checks |= {"bad": fails, "left out": lambda place, numbers: "no such package", "good": measures}

    status, record, path = run(tmp_path / "new")

    assert status == 1
    assert record["passed"] is False
    outcomes = {name: check["outcome"] for name, check in record["checks"].items()}
    assert outcomes == {"bad": "failed", "left out": "skipped", "good": "passed"}
    assert record["checks"]["bad"]["numbers"] == {"measured before": 2}
    assert record["checks"]["bad"]["reason"] == "RuntimeError: no WORK/x"
    assert record["checks"]["good"]["numbers"] == {"ratio": 1.5}
    assert all(check["seconds"] >= 0 for check in record["checks"].values())
    assert f"results: {path}" in capsys.readouterr().out


def test_the_file_says_where_it_comes_from(checks, tmp_path):
    checks["good"] = measures

    status, record, path = run(tmp_path)

    assert status == 0
    assert record["passed"] is True
    assert path.name == f"gpu-dry-run-{record['created'][:10]}.json"
    assert record["versions"]["torch"] == torch.__version__
    assert record["hardware"]["cores"] >= 1
    assert str(tmp_path) not in path.read_text()


def test_what_there_is_no_time_for_is_not_run(checks, tmp_path, monkeypatch):
    import gpu_check

    monkeypatch.setattr(gpu_check, "BUDGET", -1)
    checks["good"] = measures

    status, record, _ = run(tmp_path)

    assert status == 1
    assert record["checks"]["good"] == {
        "outcome": "not run",
        "seconds": 0.0,
        "reason": "-1 s were over",
    }


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch, capsys):
    import gpu_check

    monkeypatch.setattr(gpu_check, "is_installed", lambda name: name not in ("peft", "hydra-core"))

    assert gpu_check.main(["--dry-run"]) == 2

    said = capsys.readouterr().err
    assert "missing: peft>=0.19, hydra-core>=1.3.2,<1.4\n" in said
    assert '-m pip install "peft>=0.19" "hydra-core>=1.3.2,<1.4"' in said


def test_only_what_the_checks_import_is_needed(monkeypatch):
    import gpu_check

    monkeypatch.setattr(gpu_check, "is_installed", lambda name: False)
    named = {requirement.split(">=")[0] for requirement in gpu_check.missing()}
    assert {"torch", "transformers", "pydantic", "safetensors", "pytest"} <= named
    assert not named & gpu_check.NOT_NEEDED
    assert gpu_check.is_installed("torch") is False
    monkeypatch.undo()
    assert gpu_check.is_installed("torch")
    assert not gpu_check.is_installed("no-such-package-anywhere")


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch, capsys):
    import gpu_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "no CUDA device; --dry-run" in capsys.readouterr().err


def write_losses(folder, **losses):
    folder.mkdir(parents=True)
    lines = [{"step": 2, "time": 1.0, **{f"train/{k}": v for k, v in losses.items()}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_losses_of_two_runs_are_compared_one_by_one(tmp_path):
    from bench.gpu import CheckError, largest_difference

    write_losses(tmp_path / "a", loss=5.0, **{"head0/loss": 3.0, "lr": 1.0})
    write_losses(tmp_path / "b", loss=5.5, **{"head0/loss": 3.25, "lr": 9.0})
    write_losses(tmp_path / "c", loss=5.0)
    write_losses(tmp_path / "d", lr=1.0)
    assert largest_difference(tmp_path / "a", tmp_path / "b") == 0.5
    for other in ("c", "d"):
        with pytest.raises(CheckError, match="expected"):
            largest_difference(tmp_path / other, tmp_path / "a")
    with pytest.raises(CheckError, match="expected"):
        largest_difference(tmp_path / "d", tmp_path / "d")


def make_place(folder, seconds=60.0):
    import time

    from bench.gpu import Place

    return Place(device="cpu", work=folder, deadline=time.monotonic() + seconds)


def test_an_engine_whose_losses_differ_fails_with_the_difference(tmp_path, monkeypatch):
    from bench.gpu import TOLERANCE, TRAINED, CheckError, Place, engine

    place, off = make_place(tmp_path), {"none": 0.5 * TOLERANCE, "zero1": 2 * TOLERANCE}
    monkeypatch.setattr(Place, "python", lambda *arguments: None)
    for stage in TRAINED:
        write_losses(tmp_path / "outputs" / "reference" / stage, loss=1.0)
        for choice, by in off.items():
            by = by if stage == "draft" else 0.0
            write_losses(tmp_path / "outputs" / choice / stage, loss=1.0 + by)
    assert engine(place, {}, choice="none") is None
    numbers = {}
    with pytest.raises(CheckError, match="differ from those of the CPU"):
        engine(place, numbers, choice="zero1")
    assert numbers["medusa1_largest_difference"] == 0
    assert numbers["draft_largest_difference"] == pytest.approx(2 * TOLERANCE)


def test_deepspeed_is_left_out_where_it_is_not_installed(tmp_path, monkeypatch):
    from bench.gpu import CHECKS

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for choice in ("zero1", "zero2", "zero3"):
        assert CHECKS[choice](make_place(tmp_path), {}) == "deepspeed is not installed"


def test_a_process_that_fails_says_why(tmp_path):
    from bench.gpu import CheckError

    place = make_place(tmp_path)
    place.python("-c", "import os; assert os.environ['GPU_TESTS_ON'] == 'cpu'")
    with pytest.raises(CheckError, match=r"exit status 3: .*too bad"):
        place.python("-c", "import sys; print('too bad'); sys.exit(3)")


def test_a_process_that_hangs_is_stopped(tmp_path):
    from bench.gpu import CheckError

    with pytest.raises(CheckError, match="stopped after 1 s"):
        make_place(tmp_path, seconds=0.1).python("-c", "import time; time.sleep(60)")
