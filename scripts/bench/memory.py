"""Peak memory of a piece of work, over what was there before it.

On CUDA the caching allocator keeps the figure. On the CPU torch's profiler records every
allocation and release that goes through torch's allocator, temporaries inside operators included
(a dispatch hook would miss those); their running sum is exact and the same in every run. It does
not see scratch memory that a maths library takes by itself, so it was checked against
`peak_resident_bytes`, which is what the operating system says: see docs/benchmarks.md.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MEGABYTE = 1e6


@dataclass(frozen=True, kw_only=True)
class Use:
    """Bytes of tensors beyond those that were there before."""

    peak: int  # the most that exist at once
    kept: int  # of what was made, at the end


def memory_use(make: Callable[[], object], device: torch.device) -> Use:
    """What it takes to make something, and what the thing itself takes then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        made = make()
        torch.cuda.synchronize(device)
        peak, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del made  # not before its bytes are counted
        return Use(peak=peak - before, kept=kept - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        made = make()
    changes = _changes(recorded)
    del made
    return Use(peak=_highest(changes), kept=sum(changes))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that exist at once during `work`, beyond those before it."""
    return memory_use(work, device).peak


def peak_resident_bytes(work: Callable[[], object]) -> int:
    """The same by the kernel's count of resident pages (Linux, and only on the CPU).

    Pages that an allocator keeps after a release are counted as there before, so this is good to
    some percent, and only for work that takes much more than such leftovers.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _changes(recorded: profile) -> list[int]:
    """Bytes of every allocation (above 0) and release (below 0), in order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return [int(event["args"]["Bytes"]) for event in events]


def _highest(changes: list[int]) -> int:
    now = highest = 0
    for change in changes:
        now += change
        highest = max(highest, now)
    return highest


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))
