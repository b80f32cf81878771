"""This process among the others of a launch: rank, reductions, waiting, and how to leave.

Launchers (`deepspeed`, `torchrun`) tell the rank through the environment. One process alone needs
no process group and starts none.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from medusa_train.errors import MedusaError

T = TypeVar("T")

# One rank may evaluate for hours while the others wait; a dead rank is the launcher's business
_PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class World:
    """Rank and number of processes; all methods are no-ops for one process."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, reports and tracks."""
        return self.rank == 0

    def start(self, device: torch.device) -> None:
        """Join the process group; several processes use DeepSpeed's, so that it shares one."""
        if self.size == 1 or dist.is_initialized():
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        skip_collectives_build()
        deepspeed_comm = importlib.import_module("deepspeed.comm")
        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed_comm.init_distributed(dist_backend=backend, timeout=_PATIENCE, verbose=False)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, on every process."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """What every process has, by rank, on every process; anything that can be pickled."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def first(self, action: Callable[[], T]) -> T:
        """What an action of the first process gives, on every process.

        Raises:
            MedusaError: what the first process refuses, all do; else they would be left waiting.
        """
        result, refusal = None, None
        if self.is_main:
            try:
                result = action()
            except MedusaError as error:
                refusal = error
        result, refusal = self.gather((result, refusal))[0]
        if refusal is not None:
            raise refusal
        return cast(T, result)

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1 and dist.is_initialized():
            dist.barrier()


def current_world() -> World:
    """As the launcher's environment says; alone without one."""
    return World(rank=int(os.environ.get("RANK", "0")), size=int(os.environ.get("WORLD_SIZE", "1")))


def skip_collectives_build() -> None:
    """Keep DeepSpeed from compiling its CPU collectives, which only its inference uses.

    It would take a minute and a C++ compiler at the first start. `import_module` is needed: a
    plain `import deepspeed.comm.torch as m` binds the torch package itself.
    """
    if os.environ.get("DS_ACCELERATOR", "cpu") == "cpu":
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # pyright: ignore


def leave(status: int) -> NoReturn:
    """End this process with `status`, without the interpreter's own tear-down when distributed.

    Worker threads of the gloo backend abort some clean exits ("terminate called without an
    active exception"); nothing is left to tear down once files are written and sinks closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_available() and dist.is_initialized():
        os._exit(status)
    sys.exit(status)
