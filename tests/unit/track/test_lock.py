"""Who works in a folder, seen from another process and after a kill."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from medusa_train.errors import ConfigError
from medusa_train.track import lock
from medusa_train.track.lock import locked

HOLD = """
import sys
from pathlib import Path
from medusa_train.track.lock import locked

with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of a folder until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "stage")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_another_process_is_named_and_leaves_nothing_behind_when_it_is_killed(tmp_path, holder):
    folder = tmp_path / "stage"
    wanted = f"stage is in use by process {holder.pid} on {socket.gethostname()}: wait"
    with pytest.raises(ConfigError, match=wanted), locked(folder):
        pass

    holder.kill()
    holder.wait()

    with locked(folder):
        assert (folder / ".lock").read_text().split()[1] == str(os.getpid())


def test_it_ends_with_its_block_also_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path), locked(tmp_path / "other"), pytest.raises(ConfigError), locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_told_of_once(tmp_path, monkeypatch, caplog):
    def unknown(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    lock._warn.cache_clear()
    with locked(tmp_path / "a"), locked(tmp_path / "b"):
        pass

    assert caplog.text.count("the file system cannot lock folders (No locks available)") == 1
