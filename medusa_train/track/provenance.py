"""Where a result comes from: the command, the code, the versions and the machine."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from medusa_train.track.manifest import write_json

PROVENANCE = "provenance.json"

_PACKAGES = (
    "medusa-train",
    "torch",
    "transformers",
    "deepspeed",
    "safetensors",
    "tokenizers",
    "hydra-core",
    "wandb",
)


def write_provenance(folder: Path) -> None:
    """Write `provenance.json` into a folder, which exists."""
    write_json(folder / PROVENANCE, provenance())


def provenance() -> dict[str, Any]:
    """All of it as JSON-like values; what cannot be found out is null."""
    return {
        "command": command(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **_git(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "hardware": hardware(),
    }


def command() -> str:
    """The command line as it was typed, without the folder of the interpreter or script."""
    program, *rest = sys.orig_argv
    return shlex.join([Path(program).name, *(Path(rest[0]).name for _ in rest[:1]), *rest[1:]])


def hardware() -> dict[str, Any]:
    """The machine in words: what a measured speed holds for."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Commit of the checkout that this package runs from; nulls for an installed one."""
    root = Path(__file__).resolve().parents[2]
    sha = _run_git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changes = _run_git(root, "status", "--porcelain", "--untracked-files=no") if sha else None
    return {"git_sha": sha, "git_changed": None if changes is None else bool(changes)}


def _run_git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
