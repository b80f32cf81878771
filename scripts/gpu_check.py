"""What `gpu_check.sh` starts: every check of a GPU in turn, and one JSON file of what came out.

What the file holds is in scripts/results/README.md, the checks themselves are in bench/gpu.py.
"""

import argparse
import importlib.metadata
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import CHECKS, ROOT, TOLERANCE, Check, Place

BUDGET = 560  # seconds for all checks
NOT_NEEDED = {"datasets", "deepspeed", "gguf", "wandb"}  # by what runs here


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks; 0: all passed, 1: some did not, 2: none could be run."""
    parser = argparse.ArgumentParser(description="Check what only a GPU can show.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "scripts" / "results")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with next to no work")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # CPUs have little to do here
    if fault := obstacle(dry_run=options.dry_run):
        print(fault, file=sys.stderr)
        return 2
    record = heading(dry_run=options.dry_run)
    slug = re.sub(r"[^a-z0-9]+", "-", record["card"].lower()).strip("-")
    path = options.folder / f"gpu-{slug}-{record['created'][:10]}.json"
    with tempfile.TemporaryDirectory() as work:
        device = "cpu" if options.dry_run else "cuda"
        deadline = time.monotonic() + BUDGET
        place = Place(device=device, work=Path(work), deadline=deadline)
        for name, check in CHECKS.items():
            outcome = record["checks"][name] = attempt(check, place)
            record["passed"] = all(
                c["outcome"] in ("passed", "skipped") for c in record["checks"].values()
            )
            write(path, record)  # after each, so that a kill loses only one
            print(f"{name}: {outcome['outcome']}, {outcome['seconds']} s", flush=True)
    print(f"results: {path}")
    return 0 if record["passed"] else 1


def obstacle(*, dry_run: bool) -> str | None:
    """Why nothing can be checked here, and what to do about it."""
    if lacking := missing():
        quoted = " ".join(f'"{requirement}"' for requirement in lacking)
        return f"missing: {', '.join(lacking)}\ntry: {sys.executable} -m pip install {quoted}"
    import torch

    if not dry_run and not torch.cuda.is_available():
        return "torch sees no CUDA device; --dry-run goes through all checks on a CPU"
    return None


def missing() -> list[str]:
    """Requirements of pyproject.toml that are not installed and needed here; pytest too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "pytest>=8"]
    named = {re.split(r"[<>=;\s]", requirement)[0]: requirement for requirement in wanted}
    return [named[name] for name in named if name not in NOT_NEEDED and not is_installed(name)]


def is_installed(distribution: str) -> bool:
    """Whether there is any version of it."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def heading(*, dry_run: bool) -> dict[str, Any]:
    """All that the file says besides the checks."""
    import torch

    from medusa_train.track.provenance import provenance

    found = provenance()
    del found["command"]
    card, memory = "dry run", None
    if not dry_run:
        properties = torch.cuda.get_device_properties(0)
        card, memory = properties.name, round(properties.total_memory / 2**30, 1)
    return {
        "schema": "medusa_train.gpu_check",
        "version": 1,
        "card": card,
        "card_memory_gib": memory,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "loss_tolerance": TOLERANCE,
        **found,
        "passed": False,
        "checks": {},
    }


def attempt(check: Check, place: Place) -> dict[str, Any]:
    """Run one check, whatever may happen in it."""
    numbers: dict[str, Any] = {}
    begin, outcome, reason = time.monotonic(), "passed", None
    if begin > place.deadline:
        return {"outcome": "not run", "seconds": 0.0, "reason": f"{BUDGET} s were over"}
    try:
        reason = check(place, numbers)
        outcome = "passed" if reason is None else "skipped"
    except Exception as error:
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - begin, 1)
    note = {} if reason is None else {"reason": without_paths(reason, place)}
    return {"outcome": outcome, "seconds": seconds, **note, "numbers": numbers}


def without_paths(text: str, place: Place) -> str:
    """What others may read: folders of this machine are nobody's business."""
    for folder, name in ((place.work, "WORK"), (ROOT, "ROOT"), (Path(sys.prefix), "PYTHON")):
        text = text.replace(str(folder), name)
    return text


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write the file as a whole; a folder that is missing is made."""
    from medusa_train.track.manifest import write_json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(record))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # also where the package is not installed
    sys.exit(main())
