"""Checkpoints of a stage: whole or absent, read back before they count, the last few kept.

`<stage>/checkpoints/step-000050/` holds the engine's files and `state.json`, written last, which
lists every other file with its size and CRC-32. A folder ending in `.part` was left by a run that
was stopped while saving, and is removed.
"""

import json
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from medusa_train.errors import CheckpointError
from medusa_train.parallel import World
from medusa_train.track.manifest import write_json
from medusa_train.train.engine import Engine

STATE = "state.json"


@dataclass(kw_only=True)
class TrainState:
    """How far a run is, beyond what the engine holds."""

    step: int = 0  # finished updates
    tokens: int = 0  # tokens of the model's own that were trained on, repeats counted
    seconds: float = 0.0  # spent in steps, over all runs of the stage
    losses: list[float] = field(default_factory=list)  # of the last log, [K]
    held_out: dict[str, list[float]] = field(default_factory=dict)  # last top1, top5, loss, [K]


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one stage and what they must have been made by."""

    folder: Path
    world: World
    engine_name: str
    fingerprint: str
    keep: int

    def save(self, engine: Engine, state: TrainState) -> None:
        """Write, read back, put in place, and drop the oldest; every process calls it.

        Raises:
            CheckpointError: if what was read back is not what it should be.
        """
        final = self.folder / f"step-{state.step:06d}"
        part = final.with_name(final.name + ".part")
        if self.world.is_main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.world.wait()
        engine.save(part)
        self.world.wait()
        if self.world.is_main:
            files = {str(p.relative_to(part)): _seal(p) for p in _files(part)}
            write_json(part / STATE, {**self._made_by(), **asdict(state), "files": files})
            _check_finite(part)
            shutil.rmtree(final, ignore_errors=True)
            part.replace(final)
            self._prune()
        self.world.wait()

    def latest(self) -> tuple[Path, TrainState] | None:
        """The newest checkpoint, checked, or None where there is none; every process calls it.

        Raises:
            CheckpointError: if it is damaged, or belongs to another launch or other settings.
        """
        if self.world.is_main:
            for stale in self.folder.glob("*.part"):
                shutil.rmtree(stale)
        self.world.wait()
        found = self._finished()
        if not found:
            return None
        newest = found[-1]
        stored = _read_state(newest)
        self._check_made_by(newest, stored)
        if self.world.is_main:
            _check_files(newest, stored["files"])
            _check_finite(newest)
        self.world.wait()
        names = TrainState.__dataclass_fields__
        return newest, TrainState(**{name: stored[name] for name in names})

    def _finished(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("step-*") if p.suffix != ".part")

    def _prune(self) -> None:
        for old in self._finished()[: -self.keep]:
            shutil.rmtree(old)

    def _made_by(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "engine": self.engine_name,
            "processes": self.world.size,
        }

    def _check_made_by(self, folder: Path, stored: dict[str, Any]) -> None:
        for name, expected in self._made_by().items():
            if stored[name] != expected:
                raise CheckpointError(
                    f"{folder} was made with {name}={stored[name]}, this run has {name}="
                    f"{expected}: go back to {stored[name]}, or delete {self.folder} to start over"
                )


def load_checkpoint(engine: Engine, folder: Path) -> None:
    """Let the engine take up a checkpoint.

    Raises:
        CheckpointError: whatever the engine's own files are refused for.
    """
    try:
        engine.load(folder)
    except CheckpointError:
        raise
    except Exception as error:  # each engine's readers raise their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder} cannot be read ({reason}); delete it") from error


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != STATE)


def _seal(path: Path) -> list[int]:
    """Size in bytes and CRC-32 of a file as it is on disk."""
    crc = size = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    try:
        stored = json.loads(path.read_text())
        expected = {"fingerprint", "engine", "processes", "files", *TrainState.__dataclass_fields__}
        missing = expected - stored.keys()
        if missing:
            raise ValueError(f"{sorted(missing)[0]} is missing")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete {folder}") from None
    return stored


def _check_files(folder: Path, expected: dict[str, list[int]]) -> None:
    for name, seal in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; delete {folder}")
        found = _seal(path)
        if found != seal:
            raise CheckpointError(
                f"{path} is damaged: found {found[0]} bytes with CRC {found[1]:08x}, expected "
                f"{seal[0]} bytes with CRC {seal[1]:08x}; delete {folder}"
            )


def _check_finite(folder: Path) -> None:
    """Weights stored as safetensors must be numbers; damaged ones never become a checkpoint."""
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{path}: {name} is not finite; delete {folder}")
