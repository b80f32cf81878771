"""The real command: through a pseudo-terminal as a person has it, and in a pipe."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_case import CHAT, SAID, piped_chat, save_run
from command_case import TIMEOUT, environment

pytestmark = pytest.mark.slow

CYAN, UNDERLINED = "\x1b[1;36m", "\x1b[4m"
CTRL_C, CTRL_D = "\x03", "\x04"


class Person:
    """Types into a chat and reads along."""

    def __init__(self, process: subprocess.Popen, terminal: int) -> None:
        self.process, self._terminal = process, terminal
        self.seen = ""
        self.reads = 0

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until something is seen; forgets all up to there and gives it."""
        deadline = time.monotonic() + TIMEOUT
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if select.select([self._terminal], [], [], 1)[0]:
                self.seen += os.read(self._terminal, 4096).decode(errors="replace")
                self.reads += 1
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def status(self) -> int:
        """Of the chat, once it has ended."""
        deadline = time.monotonic() + TIMEOUT
        with contextlib.suppress(OSError):  # the terminal ends with the chat
            while self.process.poll() is None:
                assert time.monotonic() < deadline, self.seen
                if select.select([self._terminal], [], [], 0.1)[0]:
                    self.seen += os.read(self._terminal, 4096).decode(errors="replace")
        return self.process.wait(TIMEOUT)


@contextlib.contextmanager
def person_at(folder: Path, *arguments: str, **env: str) -> Iterator[Person]:
    """A chat in a terminal of 80 columns."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def take_the_terminal() -> None:
        """So that Ctrl-C goes to the chat, also where these tests run in the background."""
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        [*CHAT, *arguments],
        cwd=folder,
        env=environment({"TERM": "xterm-256color", "NO_COLOR": "", **env}),
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=take_the_terminal,
    )
    os.close(its)
    try:
        yield Person(process, mine)
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def test_a_person_chats(tmp_path):
    """With a model that never ends an answer, and heads of which the last is wrong."""
    run = save_run(tmp_path, ends=False, wrong=[2])
    with person_at(tmp_path, str(run), "--max-new-tokens", "20000") as person:
        begun = person.wait_for("> ")
        assert f"{CYAN}tokens like these" in begun
        assert "3 heads from" in re.sub(r"\s+", " ", begun)

        person.type("Why?\r")
        person.wait_for("1 token in")
        before = person.reads
        said = person.wait_for(r"2\d\d tokens in .* tokens/s, 3\.00 tokens per step")
        assert person.reads - before > 1
        counts = [int(count) for count in re.findall(r"(\d+) tokens in", said)]
        assert counts[:5] == [4, 7, 10, 13, 16]
        assert f"T{CYAN}h" in said
        person.type(CTRL_C)
        person.wait_for("; stopped")
        person.wait_for("> ")

        person.type("/save chat.json\r")
        person.wait_for("saved in chat.json")
        saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
        assert [turn["role"] for turn in saved] == ["user", "assistant"]
        answer = saved[1]["content"]
        assert (SAID * len(answer)).startswith(answer.rstrip("\ufffd"))

        person.type("/reset\r")
        person.wait_for("a new conversation begins")
        person.wait_for("> ")
        person.type(CTRL_C)
        person.wait_for("Ctrl-D or /quit")
        person.wait_for("> ")  # before it, the terminal keeps a Ctrl-D to itself
        person.type(CTRL_D)
        assert person.status() == 0
    assert "Traceback" not in person.seen


def test_what_is_typed_during_an_answer_is_kept_and_a_ctrl_d_too(tmp_path):
    run = save_run(tmp_path, ends=False)
    with person_at(tmp_path, str(run), "--max-new-tokens", "1500") as person:
        person.wait_for("> ")
        person.type("Why?\r")
        person.wait_for("1 token in")
        person.type("/new\r" + CTRL_D)
        assert person.status() == 0

    answer, cut, after = person.seen.partition("; cut at")
    assert cut
    assert "/new" not in answer
    assert "> /new" in after
    assert "a new conversation begins" in after


def test_without_colours_guessed_tokens_are_underlined(tmp_path):
    run = save_run(tmp_path)
    with person_at(tmp_path, str(run), NO_COLOR="1") as person:
        begun = person.wait_for("> ")
        person.type("Why?\r")
        said = person.wait_for("tokens per step\x1b.*\r\n> ")
        person.type("/quit\r")
        assert person.status() == 0

    assert f"{UNDERLINED}tokens like these" in begun
    assert f"T{UNDERLINED}h\x1b[0m" in said
    assert not re.search(r"\x1b\[[\d;]*3\dm", begun + said)


def test_in_a_pipe_each_line_is_a_question_and_answers_are_plain(tmp_path):
    run = save_run(tmp_path)
    done = piped_chat(tmp_path, "Why?\n\n/reset\nSo?", str(run / "medusa1"))

    assert done.returncode == 0
    assert done.stdout == f"{SAID}\n{SAID}\n"
    assert done.stderr.count("tokens per step") == 2
    assert "\x1b" not in done.stdout + done.stderr


def test_a_pipe_that_nobody_reads_ends_it_without_a_word(tmp_path):
    process = subprocess.Popen(
        [*CHAT, str(save_run(tmp_path))],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate("Why?\n", timeout=TIMEOUT)

    assert process.returncode == 1
    assert "Error" not in said
