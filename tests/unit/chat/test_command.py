import io
import subprocess
import sys

import pytest
from chat_case import SAID, save_run

from medusa_train.chat.__main__ import main, parser


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("saved"), wrong=[2])


@pytest.fixture
def typed(monkeypatch):
    """What stands in the pipe."""

    def type_(text: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    return type_


@pytest.mark.parametrize("method", ["medusa", "plain", "lookup"])
@pytest.mark.parametrize("drawn", [(), ("--temperature", "0.1", "--top-p", "0.9", "--top-k", "5")])
def test_it_answers_what_stands_in_the_pipe(method, drawn, run, typed, capsys):
    typed(b"Why?\n")

    assert main([str(run), "--method", method, "--system", "Be brief.", *drawn]) == 0
    assert capsys.readouterr().out == f"{SAID}\n"


def test_text_that_is_none_is_no_reason_to_stop(run, typed, capsys):
    typed(b"Why \xff\xf0?\n")

    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{SAID}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--top-p", "0"], 2, "top_p must be"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens must be at least 1"),
        (["--seed", "-1"], 2, "seed must be"),
        (["--tree", "no.json"], 2, "no.json cannot be read"),
        (["--device", "abacus"], 2, "model.device=abacus"),
        (["--model", "no/such/model"], 1, "model.name=no/such/model"),
    ],
)
def test_a_fault_is_a_sentence_and_a_status(arguments, status, told, run, typed, capsys):
    typed(b"")

    assert main([str(run), *arguments]) == status
    said = capsys.readouterr().err.splitlines()[-1]
    assert told in said


def test_a_folder_without_heads_is_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("no heads in ")


def test_a_folder_without_heads_is_told_before_anything_slow_is_imported(tmp_path):
    code = f"""
import sys
from medusa_train.chat.__main__ import main
assert main([{str(tmp_path)!r}]) == 1
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("no heads in ")
    assert {"torch", "transformers"} & set(done.stdout.split()) == set()


def test_ctrl_c_where_nothing_is_answered_ends_it(run, typed, monkeypatch, capsys):
    typed(b"")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa_train.model.backbone.load_backbone", interrupt)

    assert main([str(run)]) == 130
    assert capsys.readouterr().err.endswith("stopped by Ctrl-C\n")


def test_the_options_have_a_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--help"])
    assert "HEADS_DIR" in capsys.readouterr().out
