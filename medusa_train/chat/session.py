"""The chat itself: questions, commands, answers, and Ctrl-C."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_train.chat.answer import Answer
from medusa_train.chat.conversation import Asked, Conversation
from medusa_train.chat.screen import Screen
from medusa_train.decode import Method, Part, Sampling, stream
from medusa_train.errors import DataError, MedusaError
from medusa_train.model.backbone import Backbone
from medusa_train.track.manifest import write_json

HELP = """\
/reset, /new   forget the conversation, keep the system prompt
/system TEXT   set the system prompt and begin anew; without TEXT there is none
/save FILE     write the conversation as JSON
/quit          leave, as Ctrl-D does
A line that ends with \\ goes on in the next. A space before / makes it a question.
Ctrl-C stops an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSettings:
    """How long answers may be, in tokens, and how they are drawn.

    Raises:
        ValueError: naming what is out of range.
    """

    max_new_tokens: int
    sampling: Sampling

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.sampling.seed < 2**31:
            raise ValueError(f"seed must be from 0 to 2**31 - 1, got {self.sampling.seed}")


class Chat:
    """One conversation after the other, until the person has had enough."""

    def __init__(
        self,
        backbone: Backbone,
        method: Method,
        screen: Screen,
        settings: AnswerSettings,
        *,
        system: str | None,
    ) -> None:
        """Begin a conversation.

        Raises:
            ModelError: if the model's chat template refuses it.
        """
        self._backbone, self._method, self._screen = backbone, method, screen
        self._settings = settings
        self._answered = 0
        self._begin(system)

    def run(self) -> None:
        """Go on until the input ends or /quit.

        Raises:
            MedusaError: what a person would be told and asked again, if there is none.
        """
        while (line := self._read()) is not None and line.rstrip() != "/quit":
            try:
                if line.startswith("/"):
                    self._obey(line)
                elif line.strip():
                    self._answer(line)
            except MedusaError as error:
                if not self._screen.interactive:
                    raise
                self._screen.note(str(error))

    def _read(self) -> str | None:
        """The next question or command, of several lines if they are joined; None at the end."""
        lines: list[str] = []
        while True:
            try:
                line = self._screen.read(more=bool(lines))
            except EOFError:
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not self._screen.interactive:
                    raise
                lines = []
                self._screen.note("\nCtrl-D or /quit leaves the chat")
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _obey(self, line: str) -> None:
        name, _, rest = line.rstrip().partition(" ")
        match name:
            case "/help":
                self._screen.note(HELP)
            case "/reset" | "/new":
                self._begin(self._system)
                self._screen.note("a new conversation begins")
            case "/system":
                self._begin(rest.strip() or None)
                kind = "that" if self._system else "no"
                self._screen.note(f"a new conversation begins, with {kind} system prompt")
            case "/save":
                self._save(rest.strip())
            case _:
                raise DataError(f"there is no command {name}: /help lists them")

    def _begin(self, system: str | None) -> None:
        self._conversation = Conversation(self._backbone, system)
        self._system = system

    def _save(self, name: str) -> None:
        if not name:
            raise DataError("/save needs the name of a file, as in /save chat.json")
        try:
            path = Path(name).expanduser()
            if path.exists():
                raise DataError(f"{path} exists: give one that is new, as in /save chat.json")
            if not path.parent.is_dir():
                raise DataError(f"{path} cannot be written: there is no folder {path.parent}")
            write_json(path, {"model": self._backbone.name, "messages": self._conversation.turns})
        except (OSError, ValueError, RuntimeError) as error:  # of the disk, a NUL, no such home
            # The name in an error of the disk is that of a passing file
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{name} cannot be written ({reason})") from None
        self._screen.note(f"saved in {path}")

    def _answer(self, question: str) -> None:
        asked = self._conversation.ask(question)
        answer = Answer(self._backbone.decode)
        guard = stopped_by_interrupt() if self._screen.interactive else nullcontext(lambda: False)
        with guard as stopped, self._screen.answer() as show:
            for part in self._parts(asked):
                show.add(answer.take(part), answer.numbers())
                if stopped():
                    break
            show.add(answer.rest(), answer.numbers())
        if answer.ids:
            self._answered += 1
            self._conversation.note(asked, answer.ids)
        self._screen.note(answer.numbers() + self._ending(asked, answer))

    def _parts(self, asked: Asked) -> Iterator[Part]:
        sampling = self._settings.sampling
        return stream(
            self._method,
            asked.ids,
            max_new_tokens=self._settings.max_new_tokens,
            end_ids=self._backbone.end_ids,
            # The same question again shall have another answer
            sampling=replace(sampling, seed=sampling.seed + self._answered),
        )

    def _ending(self, asked: Asked, answer: Answer) -> str:
        limit = self._backbone.max_positions
        match answer.finish_reason:
            case "stop":
                return ""
            case "length" if len(asked.ids) + len(answer.ids) >= limit:
                return f"; the context of {limit} tokens is full: /reset begins anew"
            case "length":
                return f"; cut at --max-new-tokens {self._settings.max_new_tokens}"
            case _:
                return "; stopped"


@contextmanager
def stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C stop what is done meanwhile, and nothing else.

    It is asked for between steps, so that none is left half done; a second Ctrl-C does not wait.
    """
    pressed = False

    def note(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
