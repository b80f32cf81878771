import json
import math
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from training_case import MemorySink, make_config
from wandb_reader import messages, read_offline_runs

from medusa_train.errors import ConfigError
from medusa_train.track.sinks import (
    METRICS,
    WANDB_ID,
    FanOut,
    JsonlSink,
    NullSink,
    WandbSink,
    check_login,
    open_sinks,
)

TRACK = replace(make_config().track, mode="offline", project="p", tags=("a", "b"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / METRICS)
    sink.log({"train/loss": 2.5}, step=3)
    (line,) = lines(tmp_path / METRICS)
    assert line.pop("time") > 1e9
    assert line == {"step": 3, "train/loss": 2.5}


def test_values_that_are_not_finite_become_null_and_are_named(tmp_path):
    sink = JsonlSink(tmp_path / METRICS)
    sink.log({"a": math.nan, "b": 1, "c": math.inf}, step=0)
    sink.close()
    (line,) = lines(tmp_path / METRICS)
    assert line["a"] is line["c"] is None
    assert line["b"] == 1
    assert line["nonfinite"] == ["a", "c"]


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 0}\n{"step": 2}\n{"step": 3}\n{"ste')
    sink = JsonlSink(path, start_step=2)
    sink.log({}, step=3)
    sink.close()
    assert [line["step"] for line in lines(path)] == [0, 2, 3]
    JsonlSink(path).close()
    assert path.read_text() == ""


def test_fan_out_closes_all_and_then_tells_of_the_first_fault():
    class Bad(NullSink):
        def close(self):
            raise OSError("full")

    class Good(MemorySink):
        def close(self):
            self.lines.append((-1, {}))

    good = Good([])
    sink = FanOut([Bad(), good])
    sink.log({"x": 1.0}, 4)
    with pytest.raises(OSError, match="full"):
        sink.close()
    assert good.lines == [(4, {"x": 1.0}), (-1, {})]


def test_only_the_first_process_writes(tmp_path):
    sink = open_sinks(tmp_path, TRACK, is_main=False, run_name="r", stage="s", settings={})
    sink.log({"x": 1.0}, 0)
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_disabled_does_not_even_import_wandb(tmp_path):
    code = """
import sys
from pathlib import Path
from medusa_train.config.schema import TrackConfig
from medusa_train.track.sinks import open_sinks
track = TrackConfig(mode="disabled", project="p", entity=None, group=None, tags=())
sink = open_sinks(Path(sys.argv[1]), track, is_main=True, run_name="r", stage="s", settings={})
sink.log({"x": 1.0}, 0)
sink.close()
assert "wandb" not in sys.modules
"""
    path = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=path)
    assert [p.name for p in tmp_path.iterdir()] == [METRICS]


class FakeRun:
    def __init__(self):
        self.logged, self.finished = [], 0

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self, exit_code):
        assert exit_code == 0
        self.finished += 1


@pytest.fixture
def fake(monkeypatch):
    """W&B that remembers what it was asked for."""
    import wandb

    run, asked = FakeRun(), []
    monkeypatch.setattr(wandb, "init", lambda **kwargs: (asked.append(kwargs), run)[1])
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    return run, asked


def start(folder, track=TRACK):
    return WandbSink(folder, track, run_name="r", stage="medusa1", settings={"lr": 1})


def test_what_wandb_is_told(tmp_path, fake):
    run, asked = fake
    sink = start(tmp_path)
    sink.log({"a": math.nan, "b": 2}, step=5)
    sink.close()
    sink.close()
    told = asked[0]
    assert told["group"] == "r"
    assert told["job_type"] == "medusa1"
    assert told["config"] == {"lr": 1}
    assert told["tags"] == ["a", "b"]
    assert told["dir"] == str(tmp_path)
    (logged,) = run.logged
    assert logged[0] == 5
    assert logged[1]["b"] == 2.0
    assert run.finished == 1


def test_the_run_is_taken_up_again(tmp_path, fake):
    _, asked = fake
    online = replace(TRACK, mode="online", group="g")
    start(tmp_path, online)
    start(tmp_path, online)
    assert asked[0]["id"] == asked[1]["id"] == (tmp_path / WANDB_ID).read_text().strip()
    assert asked[0]["resume"] == "allow"
    assert asked[0]["group"] == "g"


def test_a_refusal_of_wandb_says_what_to_do(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"no API key .*track=offline"):
        start(tmp_path)


def test_without_a_login_nothing_is_begun(monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "login", refuse)
    with pytest.raises(ConfigError, match=r"track\.mode=online: no API key .*track=offline"):
        check_login(replace(TRACK, mode="online"))
    for mode in ("offline", "disabled"):
        check_login(replace(TRACK, mode=mode))


@pytest.mark.slow
def test_two_offline_runs_in_one_process_leave_their_files(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    for stage in ("one", "two"):
        folder = tmp_path / stage
        folder.mkdir()
        sink = open_sinks(
            folder, TRACK, is_main=True, run_name="r", stage=stage, settings={"lr": 0.5}
        )
        for step in range(3):
            sink.log({"train/loss": math.nan if step == 1 else step, "train/lr": 0.5}, step)
        sink.close()
        (run,) = read_offline_runs(folder)
        assert run.config["lr"] == 0.5
        assert [run.history[step]["train/lr"] for step in range(3)] == [0.5] * 3
        assert math.isnan(run.history[1]["train/loss"])
        assert run.history[2]["train/loss"] == 2
        assert len(lines(folder / METRICS)) == 3


def test_files_are_kept_with_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    picture, text = tmp_path / "plot.png", tmp_path / "report.md"
    Figure(figsize=(1, 1)).savefig(picture)
    text.write_text("a report")
    sink = open_sinks(tmp_path, TRACK, is_main=True, run_name="r", stage="evaluate", settings={})
    sink.attach([picture, text])
    sink.close()

    assert list(tmp_path.rglob("media/images/plot*.png"))
    (run,) = read_offline_runs(tmp_path)
    assert run.artifacts == {"r-evaluate-report": ("report", ["plot.png", "report.md"])}


def test_an_artifact_holds_the_files_of_a_folder_that_match(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    for place in ("rows/train/part-0.parquet", "rows/train/part-0.hidden", "rows/manifest.json"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(place)
    sink = open_sinks(
        tmp_path, TRACK, is_main=True, run_name="two words", stage="medusa1", settings={}
    )
    sink.artifact("rows", "dataset", tmp_path / "rows", "*/part-*.parquet")
    sink.artifact("all", "model", tmp_path / "rows" / "train")
    sink.close()

    (run,) = read_offline_runs(tmp_path)
    assert run.artifacts == {
        "two-words-medusa1-rows": ("dataset", ["train/part-0.parquet"]),
        "two-words-medusa1-all": ("model", ["part-0.hidden", "part-0.parquet"]),
    }


def test_an_artifact_stays_on_disk_where_wandb_is_disabled(tmp_path):
    track = replace(TRACK, mode="disabled")
    sink = open_sinks(tmp_path, track, is_main=True, run_name="r", stage="s", settings={})
    sink.artifact("heads", "model", tmp_path)
    sink.close()
    assert [p.name for p in tmp_path.iterdir()] == [METRICS]


@pytest.mark.parametrize("size", [10, 40_000, 100_000])
def test_the_reader_joins_the_fragments_of_a_record(size):
    """A record that is longer than a block, and one that ends where no header fits any more."""
    fragments, left = [], size
    log = b":W&B" + bytes(3)
    while left:
        room = 32768 - len(log) % 32768
        if room < 8:
            log += bytes(room)
            continue
        length = min(left, room - 7)
        left -= length
        first, last = not fragments, left == 0
        kind = 1 if first and last else 2 if first else 4 if last else 3
        fragments.append(length)
        log += struct.pack("<IHB", 0, length, kind) + b"x" * length
    assert [len(record) for record in messages(log)] == [size]
    assert list(messages(log[:-1])) == []
