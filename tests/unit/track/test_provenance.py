import json
import subprocess
import sys

import torch

from medusa_train.track import provenance as module
from medusa_train.track.provenance import PROVENANCE, provenance, write_provenance


def test_the_file_holds_command_versions_and_machine(tmp_path, monkeypatch):
    started = ["/somewhere/bin/python", "/else/run.py", "+recipe=x", "a=[1, 2]"]
    monkeypatch.setattr(sys, "orig_argv", started)
    write_provenance(tmp_path)
    found = json.loads((tmp_path / PROVENANCE).read_text())
    assert found["command"] == "python run.py +recipe=x 'a=[1, 2]'"
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0.1


def test_a_module_stays_a_module(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", "-m", "medusa_train", "lr=1"])
    assert provenance()["command"] == "python3 -m medusa_train lr=1"


def test_the_commit_is_that_of_the_checkout(monkeypatch):
    answers = {"rev-parse": "abc123", "status": " M file"}
    monkeypatch.setattr(module, "_run_git", lambda root, name, *_: answers[name])
    monkeypatch.setattr(module.Path, "exists", lambda self: True)
    assert module._git() == {"git_sha": "abc123", "git_changed": True}


def test_without_a_checkout_or_git_it_is_null(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    found = provenance()
    assert found["git_sha"] is None
    assert found["git_changed"] is None
