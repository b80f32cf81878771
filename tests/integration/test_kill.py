"""A run that is killed again and again ends with the very same heads as an unbroken one."""

import signal
from pathlib import Path

import pytest
import torch
from command_case import ended, losses, manifest, signal_when, start
from safetensors.torch import load_file

from medusa_train.data.rows import read_split

pytestmark = pytest.mark.slow

SMOKE = "+recipe=smoke"

# Moments: as soon as the first file of such a name lies there. The last are files half written.
MOMENTS = (
    "distill/train/part-00001.hidden.safetensors",
    "distill/train/part-00002.parquet",
    "medusa1/checkpoints/step-000002",
    "medusa1/checkpoints/step-000004.part",
    "draft/checkpoints/step-000006",
    "draft/model.part",
)


def kill_at(folder: Path, moment: str) -> int:
    """Start the command and kill it as soon as the moment has come; its status."""
    awaited = folder / "outputs" / "smoke" / moment
    whole = awaited.with_name(awaited.name.removesuffix(".part"))  # a look may come too late
    process = start(folder, SMOKE)
    return signal_when(process, signal.SIGKILL, lambda: awaited.exists() or whole.exists())


def test_killed_at_every_stage_and_run_again_gives_the_same_heads(tmp_path, smoke_run):
    statuses = [kill_at(tmp_path, moment) for moment in MOMENTS]
    assert statuses == [-signal.SIGKILL] * len(MOMENTS)

    assert ended(start(tmp_path, SMOKE)) == 0

    unbroken, broken = (folder / "outputs" / "smoke" for folder in (smoke_run[0], tmp_path))
    check_same_rows(unbroken, broken)
    for file in ("medusa1/heads/medusa_lm_head.safetensors", "draft/model/model.safetensors"):
        check_same_weights(unbroken / file, broken / file)
    for stage in ("medusa1", "draft"):
        assert losses(unbroken / stage) == losses(broken / stage)
        summaries = [manifest(run / stage)["summary"] for run in (unbroken, broken)]
        for summary in summaries:
            assert summary.pop("seconds") > 0
        assert summaries[0] == summaries[1]
    assert not list((broken / "medusa1").rglob("*.part"))


def check_same_rows(unbroken: Path, broken: Path) -> None:
    for split in ("train", "calibration"):
        rows = [read_split(run / "distill" / split) for run in (unbroken, broken)]
        assert [(r.id, r.ids, r.mask) for r in rows[0]] == [(r.id, r.ids, r.mask) for r in rows[1]]


def check_same_weights(unbroken: Path, broken: Path) -> None:
    """Bit for bit."""
    expected, found = load_file(unbroken), load_file(broken)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
