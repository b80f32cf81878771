import io
import re

import pytest
from rich.console import Console

from medusa_train.chat.answer import Piece
from medusa_train.chat.screen import Plain, Terminal

CYAN, UNDERLINED = "\x1b[1;36m", "\x1b[4m"


def terminal(width: int = 20, **settings) -> tuple[Terminal, io.StringIO]:
    settings = {"color_system": "standard", "force_terminal": True, "no_color": False, **settings}
    console = Console(file=io.StringIO(), width=width, height=10, **settings)
    return Terminal(console), console.file  # pyright: ignore


def show(screen: Terminal, *pieces: tuple[str, bool]) -> None:
    with screen.answer() as answer:
        for count, (text, guessed) in enumerate(pieces):
            answer.add([Piece(text=text, guessed=guessed)], f"{count} so far")


def drawn(written: str) -> list[str]:
    """Lines that a terminal ends up with: enough of one for what is used here."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\??[\d;]*[a-zA-Z]|[^\x1b]", written):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.endswith("A") and token != "A":
            row -= int(token[2:-1])
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines).rstrip("\n").split("\n")


def test_an_answer_stays_as_it_would_have_been_written_at_once():
    screen, file = terminal(width=20)
    said = "It rains since water\n\nrises and falls, again and again, for ever."
    show(screen, *((said[begin : begin + 3], False) for begin in range(0, len(said), 3)))

    assert drawn(file.getvalue()) == [
        "It rains since water",
        "",
        "rises and falls,",
        "again and again, for",
        "ever.",
    ]


def test_it_is_written_as_it_comes_above_the_numbers():
    screen, file = terminal(width=20)
    with screen.answer() as answer:
        seen = [drawn(file.getvalue())]
        for text in ("Water ri", "ses and falls ag", "ain."):
            answer.add([Piece(text=text, guessed=False)], f"{len(seen)} so far")
            seen.append(drawn(file.getvalue()))

    assert seen == [
        ["", "reading the convers…"],
        ["Water ri", "1 so far"],
        ["Water rises and", "falls ag", "2 so far"],
        ["Water rises and", "falls again.", "3 so far"],
    ]


def test_guessed_tokens_are_coloured_and_the_legend_shows_how():
    screen, file = terminal()
    show(screen, ("a", False), ("b", True), ("c", False))
    assert f"a{CYAN}b\x1b[0mc" in file.getvalue()

    screen, file = terminal(width=80)
    screen.legend("the heads")
    assert file.getvalue() == (
        f"{CYAN}tokens like these\x1b[0m were guessed by the heads and confirmed\n"
    )


def test_without_colour_they_are_underlined():
    screen, file = terminal(no_color=True)
    screen.legend("the heads")
    show(screen, ("a", False), ("b", True))

    assert f"a{UNDERLINED}b\x1b[0m" in file.getvalue()
    assert not re.search(r"\x1b\[[\d;]*3\dm", file.getvalue())


def test_a_model_cannot_steer_the_terminal():
    screen, file = terminal()
    show(screen, ("\x1b[31mred\x07\x9b2J\r\x7f", False))

    assert "\x1b[31m" not in file.getvalue()
    assert "␛[31mred␇\ufffd2J␡" in "".join(drawn(file.getvalue()))


def test_plain_text_has_answers_and_what_is_said_about_them_apart(capsys):
    screen = Plain(interactive=False)
    screen.note("loading")
    screen.legend("the heads")
    with screen.answer() as answer:
        answer.add(
            [Piece(text="a\x1b", guessed=False), Piece(text="b\n", guessed=True)], "1 so far"
        )
        assert capsys.readouterr() == ("a␛b\n", "loading\n")

    assert capsys.readouterr() == ("\n", "")


@pytest.mark.parametrize("interactive", [True, False])
def test_plain_lines_are_read_without_their_ends(interactive, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\r\nb\n\nc"))
    screen = Plain(interactive=interactive)

    assert [screen.read(more=more) for more in (False, True, False, False)] == ["a", "b", "", "c"]
    with pytest.raises(EOFError):
        screen.read(more=False)
    assert capsys.readouterr().err == ("> ... > > > " if interactive else "")
