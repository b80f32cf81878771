"""Stage folders: what made them, whether they are finished, and files that appear whole or not.

A stage folder holds `manifest.json` with the settings and inputs that made it. The same command
run again skips a finished stage and resumes an unfinished one; other settings are refused with
the difference named, never mixed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.errors import CheckpointError
from medusa_train.track.lock import LOCK

MANIFEST = "manifest.json"

# What a manifest holds
_KEYS = {"stage": str, "status": str, "fingerprint": str, "settings": dict, "summary": dict}
_KINDS = {str: "text", dict: "section"}

# What a stage writes before it has done anything that is worth keeping
_RECORDS = (MANIFEST, LOCK, "provenance.json", "metrics.jsonl", "wandb", "wandb_id.txt")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a run: where it works and what made it."""

    name: str
    folder: Path
    settings: Mapping[str, Any]

    def open(self) -> bool:
        """Create or reopen the folder; True when the stage is already finished.

        Raises:
            CheckpointError: if the folder was made by other settings (each is named), or its
                manifest cannot be read.
        """
        found = read_manifest(self.folder)
        if found is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("running", {})
            return False
        if found["status"] != "done" and not _holds_work(self.folder):
            self._write("running", {})  # a start that failed leaves nothing to mix up
            return False
        refuse_other_settings(self.folder, found["settings"], self.settings)
        return found["status"] == "done"

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the stage as finished, with what later stages and people want to know of it."""
        self._write("done", summary)

    @property
    def fingerprint(self) -> str:
        """Hash of the settings: the stages that build on this one carry it in theirs."""
        return fingerprint(_plain(self.settings))

    def _write(self, status: str, summary: Mapping[str, Any]) -> None:
        write_json(
            self.folder / MANIFEST,
            {
                "stage": self.name,
                "status": status,
                "fingerprint": self.fingerprint,
                "settings": _plain(self.settings),
                "summary": _plain(summary),
            },
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training stage left: a folder, and the summary in its manifest."""

    stage: str
    folder: Path
    summary: Mapping[str, Any]


def refuse_incomplete(folder: Path, summary: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Refuse the summary of a stage that lacks a number which a later one builds on.

    Args:
        folder: of the stage.
        summary: in its manifest.
        needed: dotted keys.

    Raises:
        CheckpointError: naming the first one.
    """
    for key in needed:
        value: Any = summary
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"{folder / MANIFEST}: summary.{key} is {json.dumps(value)}, expected a number: "
                f"put it back as it was, or move or delete {folder} to make the stage anew"
            )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a stage folder, or None where there is none."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        for key, kind in _KEYS.items():
            if not isinstance(found, dict) or not isinstance(found.get(key), kind):
                raise ValueError(f"{key} is missing or no {_KINDS[kind]}")
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): put it back as it was, or move or delete {folder} "
            "to make the stage anew"
        ) from None
    return found


def is_done(folder: Path) -> bool:
    """Whether the stage in a folder is finished."""
    found = read_manifest(folder)
    return found is not None and found["status"] == "done"


def made_in(folder: Path) -> dict[str, Any] | None:
    """As `read_manifest`, but None also where a start failed before it did anything."""
    found = read_manifest(folder)
    nothing = found is not None and found["status"] != "done" and not _holds_work(folder)
    return None if nothing else found


def _holds_work(folder: Path) -> bool:
    """Whether anything but records lies in the folder of a stage."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return any(path.parts[0] not in _RECORDS for path in files)


def refuse_other_settings(folder: Path, made: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a folder that was made by other settings than those that are asked for.

    Raises:
        CheckpointError: naming every difference.
    """
    differences = _differences(_plain(made), _plain(now))
    if differences:
        lines = "\n".join(f"  - {line}" for line in differences)
        raise CheckpointError(
            f"{folder} was made with other settings:\n{lines}\n"
            "Move or delete that folder to make it anew, give this run another run_name, or go "
            "back to how it was."
        )


def finished(folder: Path, *, stage: str, needed_by: str) -> dict[str, Any]:
    """The manifest of a finished stage that another one builds on.

    Raises:
        CheckpointError: if it is missing, unfinished, or a folder of another stage.
    """
    found = read_manifest(folder)
    if found is None or found["status"] != "done":
        state = "has not been run" if found is None else "is not finished"
        raise CheckpointError(
            f"{needed_by} needs the stage {stage}, which {state} in {folder}. "
            f"Run it first (stages=[{stage},{needed_by}]) or point paths.{stage} at a finished one."
        )
    if found["stage"] != stage:
        raise CheckpointError(f"{folder} holds a {found['stage']} stage, expected {stage}")
    return found


def fingerprint(value: Any) -> str:
    """Sixteen hex digits that change with any part of a JSON-like value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, also when the machine stops half way."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (no NaN), indented, written whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def replace_folder(part: Path, final: Path) -> None:
    """Move a finished folder into its place; an older one there is removed."""
    if final.exists():
        shutil.rmtree(final)
    part.replace(final)


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON gives them back, so that both sides compare equal."""
    return json.loads(json.dumps(value))


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted(old.keys() | new.keys())
            for line in _differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
        ]
    if old == new:
        return []
    section, _, stage = key.partition(".")
    if section == "builds_on" and stage:
        return [_other_stage(stage, was=old, now=new)]
    return [f"{key}: {json.dumps(old)} there, {json.dumps(new)} now"]


def _other_stage(stage: str, *, was: Any, now: Any) -> str:
    """Of a stage that this one builds on: the fingerprint then and now, in words."""
    if was is None:
        return f"{stage} was no part of the run then; now what it leaves would be used here"
    if now is None:
        return f"{stage} was part of the run then, and used here; now it is not"
    return f"{stage} was made with other settings then than it is now"
