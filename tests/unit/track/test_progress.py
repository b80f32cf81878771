import logging

import pytest

from medusa_train.track import progress as module
from medusa_train.track.progress import progress


def test_one_line_at_the_end_when_it_was_short(caplog):
    with caplog.at_level(logging.INFO), progress("train", 3, terminal=False) as meter:
        for i in range(3):
            meter.advance(note=f"loss {i}")
    (record,) = caplog.records
    assert record.message.startswith("train 3/3, 0 s, 0 s left")
    assert record.message.endswith("loss 2")


def test_lines_now_and_then_when_it_is_long(caplog, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO), progress("x", 5, done=3, terminal=False) as meter:
        meter.advance()
        meter.advance()
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "x 4/5",
        "x 5/5",
        "x 5/5",
    ]


def test_nothing_is_said_of_nothing(caplog):
    with caplog.at_level(logging.INFO), progress("x", 0, terminal=False):
        pass
    assert not caplog.records


def test_the_other_processes_are_silent(caplog, capsys):
    with caplog.at_level(logging.INFO), progress("x", 2, is_main=False, terminal=True) as meter:
        meter.advance(2, note="n")
    assert not caplog.records
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(capsys):
    with progress("measure", 4, terminal=True, done=1) as meter:
        meter.advance(3, note="almost")
        meter.advance(0)
    shown = capsys.readouterr().err
    assert "measure" in shown
    assert "4/4" in shown
    assert "almost" in shown


def test_a_failure_passes_through_without_a_last_line(caplog):
    def work():
        with progress("x", 2, terminal=False) as meter:
            meter.advance()
            raise OSError("gone")

    with caplog.at_level(logging.INFO), pytest.raises(OSError, match="gone"):
        work()
    assert not caplog.records
