"""One command at a time in a stage folder, by a lock that the kernel takes back from the dead."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from medusa_train.errors import ConfigError

LOCK = ".lock"

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other commands out of a folder, which is made, while this one works in it.

    The file only says who holds the lock and stays behind. The lock is on the open file, so it
    ends with the process, however that ends. A file system that knows no locks is warned of.

    Raises:
        ConfigError: if another command works there, naming its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(
                f"{folder} is in use by {holder}: wait until that command has ended, stop it, or "
                "give this run another run_name"
            ) from None
        except OSError as error:
            _warn(str(error.strerror))
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


@cache
def _warn(reason: str) -> None:
    """Once, not for every stage."""
    log.warning(
        "the file system cannot lock folders (%s): do not start this command twice at once", reason
    )
