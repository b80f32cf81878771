"""Checkpoints of a stage: whole or absent, read back before they count; the last few and the best.

`<stage>/checkpoints/step-000050/` holds the engine's files and `state.json`, written last, which
lists every other file with its size and CRC-32. A folder ending in `.part` was left by a run that
was stopped while saving, and is removed. What a checkpoint must fit is the stage's settings; how
many processes wrote it, and by which engine, is only noted.
"""

import json
import logging
import math
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medusa_train.errors import CheckpointError
from medusa_train.parallel import World
from medusa_train.track.manifest import refuse_other_settings, write_json
from medusa_train.train.engine import Engine

log = logging.getLogger(__name__)

STATE = "state.json"
_NAME = re.compile(r"step-\d{6,}(\.part)?")


@dataclass(kw_only=True)
class TrainState:
    """How far a run is, beyond what the engine holds."""

    step: int = 0  # finished updates
    tokens: int = 0  # tokens of the model's own that were trained on, repeats counted
    seconds: float = 0.0  # spent in steps, over all runs of the stage
    empty_batches: int = 0  # micro-batches without any target
    best_step: int = 0  # whose checkpoint is never dropped; 0 is before any update
    best_score: float = -math.inf  # of the held-out rows, there
    losses: list[float] = field(default_factory=list)  # of the last log, [L]
    # Of the last evaluation: loss [L], top1 and top5 [K], and single figures as [1]
    held_out: dict[str, list[float]] = field(default_factory=dict)
    first_held_out: dict[str, list[float]] = field(default_factory=dict)  # before any update


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one stage and what they must have been made by."""

    folder: Path
    world: World
    engine_name: str
    settings: Mapping[str, Any]  # of the stage
    keep: int

    def save(self, engine: Engine, state: TrainState, *, best: bool = False) -> None:
        """Write, read back, put in place, and drop the oldest; every process calls it.

        Args:
            engine: with what is trained.
            state: where it is.
            best: whether to keep it until a better one comes.

        Raises:
            CheckpointError: if it cannot be written, or what was read back is not what it should
                be; earlier checkpoints are as they were.
        """
        if best:
            state.best_step = state.step
        final = self._path(state.step)
        part = final.with_name(final.name + ".part")
        try:
            self._write(part, engine, state)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint {final} cannot be written ({error}): make room on the disk; the "
                "same command goes on from the checkpoint before"
            ) from error
        finally:
            if self.world.is_main:
                shutil.rmtree(part, ignore_errors=True)
        self.world.wait()

    def _write(self, part: Path, engine: Engine, state: TrainState) -> None:
        if self.world.is_main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.world.wait()
        engine.save(part)
        if self.world.is_main:
            files = {str(p.relative_to(part)): _seal(p) for p in _files(part)}
            score = state.best_score if math.isfinite(state.best_score) else None
            stored = {**asdict(state), "best_score": score}
            write_json(part / STATE, {**self._made_by(), **stored, "files": files})
            _check_numbers(part)
            final = self._path(state.step)
            shutil.rmtree(final, ignore_errors=True)
            part.replace(final)
            self._prune(state.best_step)

    def latest(self) -> tuple[Path, TrainState] | None:
        """The newest checkpoint, checked, or None where there is none; every process calls it.

        Raises:
            CheckpointError: if it is damaged or incomplete, belongs to other settings, or lies
                beside something that is no checkpoint.
        """
        if self.world.is_main:
            for stale in self.folder.glob("*.part"):
                shutil.rmtree(stale)
        self.world.wait()
        self._refuse_strangers()
        found = self._finished()
        return (found[-1], self._read(found[-1])) if found else None

    def best(self, state: TrainState) -> tuple[Path, TrainState] | None:
        """The best checkpoint of a finished run, checked; None where the last is the best.

        Also None where nothing was better than before any update. Every process calls it.

        Raises:
            CheckpointError: if it is missing, damaged, or belongs to other settings.
        """
        if state.best_step in (0, state.step):
            return None
        folder = self._path(state.best_step)
        if not folder.exists():
            log.warning("%s, the best, was deleted: the last weights are the result", folder)
            return None
        return folder, self._read(folder)

    def _read(self, folder: Path) -> TrainState:
        stored = _read_state(folder)
        refuse_other_settings(folder, stored["settings"], self.settings)
        if self.world.is_main:
            _check_files(folder, stored["files"])
            _check_numbers(folder)
        self.world.wait()
        state = {name: stored[name] for name in TrainState.__dataclass_fields__}
        if state["best_score"] is None:
            state["best_score"] = -math.inf
        return TrainState(**state)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _finished(self) -> list[Path]:
        return sorted(
            (p for p in self.folder.glob("step-*") if p.suffix != ".part"),
            key=lambda path: (len(path.name), path.name),
        )

    def _refuse_strangers(self) -> None:
        """A checkpoint copied to the wrong level must not look like none at all."""
        entries = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        for entry in entries:
            if not entry.name.startswith(".") and not _NAME.fullmatch(entry.name):
                raise CheckpointError(
                    f"{entry} is no checkpoint: expected folders such as step-000010 with a "
                    f"{STATE} inside; put it back into one, or delete it"
                )

    def _prune(self, best_step: int) -> None:
        for old in self._finished()[: -self.keep]:
            if old != self._path(best_step):
                shutil.rmtree(old)

    def _made_by(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "engine": self.engine_name,
            "processes": self.world.size,
        }


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
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so {folder} is no whole checkpoint: copy all of it, or delete it"
        )
    try:
        stored = json.loads(path.read_text())
        missing = {"settings", "files", *TrainState.__dataclass_fields__} - stored.keys()
        if missing:
            raise ValueError(f"{sorted(missing)[0]} is missing")
        if not isinstance(stored["files"], dict) or not isinstance(stored["held_out"], dict):
            raise ValueError("files and held_out must be sections")
        step = folder.name.removeprefix("step-")
        if type(stored["step"]) is not int or f"{stored['step']:06d}" != step:
            raise ValueError(f"step is {stored['step']!r}, expected that of the folder's name")
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


def _check_numbers(folder: Path) -> None:
    """Every tensor on disk holds something, and only numbers; else it never is a checkpoint."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:  # pyright: ignore
            for name in stored.keys():  # noqa: SIM118
                tensor = stored.get_tensor(name)
                fault = "has size 0" if tensor.numel() == 0 else "is not finite"
                if tensor.numel() == 0 or not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(f"{path}: {name} {fault}; delete {folder}")
