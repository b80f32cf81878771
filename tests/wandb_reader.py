"""Reads what W&B leaves of an offline run: one log of framed protobuf records.

The frames are LevelDB's: blocks of 32 KiB, in each some fragments behind a header of seven bytes
(checksum, length, kind), and zeros where no further header fits.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER, PREAMBLE = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """One start of a run; a resumed run leaves another one with the same id."""

    id: str = ""
    name: str = ""
    group: str = ""
    project: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step
    artifacts: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # kind, files
    exit_code: int | None = None


def read_offline_runs(folder: Path) -> list[OfflineRun]:
    """All starts below a stage folder, the oldest first."""
    logs = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [read_log(path) for path in sorted(logs, key=lambda path: path.stat().st_mtime_ns)]


def read_log(path: Path) -> OfflineRun:
    """Everything of one log that tests ask for."""
    run = OfflineRun()
    for content in messages(path.read_bytes()):
        _take(run, Record.FromString(content))
    return run


def messages(log: bytes) -> Iterator[bytes]:
    """The records of a log; a torn one at its end is left out."""
    if log[:4] != b":W&B":
        raise ValueError(f"not a W&B log: it begins with {log[:4]!r}")
    place, parts = PREAMBLE, b""
    while place + HEADER <= len(log):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", log[place : place + HEADER])
        content = log[place + HEADER : place + HEADER + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(content) < length:
            return
        place += HEADER + length
        parts = content if kind in (FULL, FIRST) else parts + content
        if kind in (FULL, LAST):
            yield parts


def _take(run: OfflineRun, record: Record) -> None:
    match record.WhichOneof("record_type"):
        case "run":
            told = record.run
            run.id, run.name, run.group = told.run_id, told.display_name, told.run_group
            run.project, run.job_type, run.tags = told.project, told.job_type, list(told.tags)
            run.config.update(_values(told.config.update))
        case "config":
            run.config.update(_values(record.config.update))
        case "history":
            line = _values(record.history.item)
            run.history.setdefault(line["_step"], {}).update(line)
        case "artifact":
            told = record.artifact
            files = sorted(entry.path for entry in told.manifest.contents)
            run.artifacts[told.name] = (told.type, files)
        case "exit":
            run.exit_code = record.exit.exit_code


def _values(items: Any) -> dict[str, Any]:
    """Names, nested ones with dots, and values."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
