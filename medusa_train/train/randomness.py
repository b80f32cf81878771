"""Random numbers that follow from the place in a run, so that resuming needs no stored state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from medusa_train.track.manifest import fingerprint


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Leave torch's random state, on the CPU and on `device`, as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def seed_from(place: list[int], device: torch.device) -> None:
    """Seed torch on the CPU and on `device` from numbers that say where in the run this is."""
    seed = int(fingerprint(place)[:15], 16)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
