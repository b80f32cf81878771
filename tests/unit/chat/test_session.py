import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
from chat_case import SAID, knowing_heads, make_speaker

from medusa_train.chat.answer import Piece
from medusa_train.chat.session import AnswerSettings, Chat, stopped_by_interrupt
from medusa_train.decode import Lookup, Medusa, Plain, Sampling
from medusa_train.errors import DataError, ModelError
from medusa_train.ops.tree import chain_tree


class FakeScreen:
    """Types lines one after the other and keeps what it is shown; a line may be a Ctrl-C."""

    def __init__(self, *lines: str | type[KeyboardInterrupt], interactive: bool = True) -> None:
        self.interactive = interactive
        self._lines = list(lines)
        self.asked_for_more: list[bool] = []
        self.notes: list[str] = []
        self.answers: list[list[Piece]] = []
        self.numbers: list[str] = []
        self.on_add: Callable[[], object] = lambda: None

    def read(self, *, more: bool) -> str:
        self.asked_for_more.append(more)
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if not isinstance(line, str):
            raise line
        return line

    def note(self, text: str) -> None:
        self.notes.append(text)

    def legend(self, guesser: str) -> None:
        raise AssertionError("the command shows it")

    @contextlib.contextmanager
    def answer(self) -> Iterator["FakeScreen"]:
        self.answers.append([])
        yield self

    def add(self, pieces: Sequence[Piece], numbers: str) -> None:
        self.answers[-1] += pieces
        self.numbers.append(numbers)
        self.on_add()

    @property
    def texts(self) -> list[str]:
        """Of the answers."""
        return ["".join(piece.text for piece in answer) for answer in self.answers]


def chat(screen: FakeScreen, backbone=None, method=None, system=None, **settings) -> Chat:
    backbone = backbone or make_speaker()
    settings = {"max_new_tokens": 100, "sampling": Sampling(), **settings}
    return Chat(
        backbone, method or Plain(backbone), screen, AnswerSettings(**settings), system=system
    )


def medusa(backbone, *, wrong=()) -> Medusa:
    heads = knowing_heads(backbone.lm_head.weight.detach(), wrong=wrong)
    return Medusa(backbone, heads, chain_tree(3))


@pytest.fixture
def noted(monkeypatch):
    """Arguments of each call of `stream`."""
    calls = []
    from medusa_train.chat import session

    def stream(method, prompt, **more):
        calls.append({"prompt": prompt, **more})
        return original(method, prompt, **more)

    original = session.stream
    monkeypatch.setattr(session, "stream", stream)
    return calls


def test_answers_are_shown_with_who_guessed_what_and_the_numbers():
    backbone = make_speaker()
    screen = FakeScreen("Why?")
    chat(screen, backbone, medusa(backbone, wrong=[1])).run()

    # a first token, then steps of one accepted guess and the model's own: the second is wrong
    [answer] = screen.answers
    assert screen.texts == [SAID]
    assert [piece.text for piece in answer if piece.guessed] == list("h uési?")
    assert screen.notes[-1].endswith(" tokens/s, 2.00 tokens per step")
    assert screen.numbers[0].startswith("1 token in ")


@pytest.mark.parametrize("make", [Plain, Lookup, medusa])
def test_every_method_says_the_same(make):
    backbone = make_speaker()
    screen = FakeScreen("Why?", "So?")
    chat(screen, backbone, make(backbone)).run()

    assert screen.texts == [SAID, SAID]


def test_a_question_sees_the_turns_before_it_until_a_reset(noted):
    backbone = make_speaker()
    screen = FakeScreen(
        "Why?", "So?", "/reset", "And?", "/system Be brief.", "Oh?", "/reset", "Eh?"
    )
    chat(screen, backbone).run()

    prompts = [backbone.tokenizer.decode(call["prompt"]) for call in noted]
    assert prompts[1].startswith(f"{prompts[0]}{SAID}<|im_end|>\n<|im_start|>user\nSo?")
    assert [call["prompt"] for call in (noted[0], *noted[2:])] == [
        backbone.encode_prompt("Why?", None),
        backbone.encode_prompt("And?", None),
        backbone.encode_prompt("Oh?", "Be brief."),
        backbone.encode_prompt("Eh?", "Be brief."),
    ]


def test_the_system_prompt_can_be_taken_out(noted):
    backbone = make_speaker()
    screen = FakeScreen("Why?", "/system", "Why?")
    chat(screen, backbone, system="Be brief.").run()

    assert noted[0]["prompt"] == backbone.encode_prompt("Why?", "Be brief.")
    assert noted[1]["prompt"] == backbone.encode_prompt("Why?", None)


def test_each_answer_is_drawn_with_numbers_of_its_own(noted):
    chat(FakeScreen("Why?", "Why?"), sampling=Sampling(temperature=1.0, seed=7)).run()

    assert [call["sampling"].seed for call in noted] == [7, 8]
    assert {call["sampling"].temperature for call in noted} == {1.0}


def test_what_was_said_is_saved_for_other_programs(tmp_path):
    path = tmp_path / "chat.json"
    screen = FakeScreen("Why?", f"/save {path}", f"/save {path}")
    chat(screen, system="Be brief.").run()

    assert json.loads(path.read_text()) == {
        "model": "speaker",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": SAID},
        ],
    }
    assert screen.notes[-2:] == [
        f"saved in {path}",
        f"{path} exists: give one that is new, as in /save chat.json",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/sav x", "there is no command /sav: /help lists them"),
        ("/save", "/save needs the name of a file"),
        ("/save no/such/folder/a.json", "cannot be written: there is no folder no/such/folder"),
        ("/save ~nobody-of-that-name/chat.json", "cannot be written"),
        ("/save " + "x" * 300, "File name too long"),
        ("/save chat\0.json", "cannot be written"),
        ("x" * 3000, "context of 2048 leaves no room for an answer"),
    ],
)
def test_a_fault_is_told_and_the_chat_goes_on_or_ends_where_nobody_is(line, told):
    screen = FakeScreen(line, "Why?")
    chat(screen).run()
    assert told in screen.notes[0]
    assert screen.texts == [SAID]

    with pytest.raises(DataError, match=told):
        chat(FakeScreen(line, "Why?", interactive=False)).run()


def test_a_refused_system_prompt_leaves_the_conversation_as_it_is(noted):
    backbone = make_speaker()
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    backbone.tokenizer.chat_template = refusal + backbone.tokenizer.chat_template
    screen = FakeScreen("Why?", "/system Be brief.", "So?", "/reset", "Why?")
    chat(screen, backbone).run()

    assert screen.texts == [SAID] * 3
    assert noted[2]["prompt"] == noted[0]["prompt"]
    with pytest.raises(ModelError):
        chat(FakeScreen(), backbone, system="Be brief.")


def test_help_names_every_command_and_quit_leaves():
    screen = FakeScreen("/help", "/quit", "Why?")
    chat(screen).run()

    for command in ("/reset", "/new", "/system", "/save", "/quit"):
        assert command in screen.notes[0]
    assert screen.answers == []


def test_lines_are_joined_and_empty_ones_are_no_question(noted):
    backbone = make_speaker()
    screen = FakeScreen("a\\", "b", "", " ", " /reset", "c\\")
    chat(screen, backbone).run()

    questions = ["a\nb", " /reset", "c"]
    assert [backbone.tokenizer.decode(call["prompt"]).rsplit("user\n")[-1] for call in noted] == [
        f"{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions
    ]
    assert screen.asked_for_more == [False, True, False, False, False, False, True, False]


@pytest.fixture
def heeded():
    """Ctrl-C as Python takes it, also where these tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_a_question_drops_it_and_says_how_to_leave(noted):
    backbone = make_speaker()
    screen = FakeScreen("a\\", KeyboardInterrupt, "b")
    chat(screen, backbone).run()

    assert [call["prompt"] for call in noted] == [backbone.encode_prompt("b", None)]
    assert "Ctrl-D" in screen.notes[0]
    with pytest.raises(KeyboardInterrupt):
        chat(FakeScreen(KeyboardInterrupt, interactive=False)).run()


def test_ctrl_c_stops_an_answer_and_keeps_what_is_there(noted, heeded):
    backbone = make_speaker(ends=False)
    screen = FakeScreen("Why?", "So?")
    screen.on_add = lambda: len(screen.numbers) == 5 and os.kill(os.getpid(), signal.SIGINT)
    chat(screen, backbone, max_new_tokens=30).run()

    assert screen.texts[0] == SAID[:5]
    assert screen.notes[0].endswith("; stopped")
    assert SAID[:5] + "<|im_end|>" in backbone.tokenizer.decode(noted[1]["prompt"])
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_where_nobody_is_ctrl_c_ends_it_all(heeded):
    screen = FakeScreen("Why?", interactive=False)
    screen.on_add = lambda: os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        chat(screen).run()


def test_the_first_ctrl_c_asks_and_the_second_does_not_wait():
    reached = []
    with stopped_by_interrupt() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(stopped())
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("too far")

    assert reached == [True]


def test_an_answer_that_is_cut_says_by_what():
    screen = FakeScreen("Why?")
    chat(screen, make_speaker(ends=False), max_new_tokens=7).run()
    assert screen.notes[-1].endswith("; cut at --max-new-tokens 7")

    screen = FakeScreen("Why?")
    chat(screen, make_speaker(ends=False, context=100)).run()
    assert screen.notes[-1].endswith("; the context of 100 tokens is full: /reset begins anew")

    screen = FakeScreen("Why?")
    chat(screen).run()
    assert screen.notes[-1].endswith("tokens per step")


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"sampling": Sampling(seed=-1)}, "seed")],
)
def test_settings_out_of_range_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        AnswerSettings(**{"max_new_tokens": 1, "sampling": Sampling(), **settings})
