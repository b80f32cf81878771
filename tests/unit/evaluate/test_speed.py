"""Clocks: all methods in turn, each prompt by each, on a clock made by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from training_case import make_backbone

from medusa_train.data.prompt_set import Prompt
from medusa_train.data.prompts import EncodedPrompt
from medusa_train.decode import Plain, Sampling
from medusa_train.evaluate import speed as module
from medusa_train.evaluate.speed import measure, step_clock, step_seconds


class Clock:
    """Stands still until told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, device: torch.device) -> float:
        return self.now


@dataclass
class Timed:
    """A method whose steps take given seconds, and that notes them in a diary."""

    name: str
    clock: Clock
    seconds: Sequence[float]
    diary: list[str]
    longest_block: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    room: int = 0
    taken: int = 0

    def start(self, prompts: Sequence[Sequence[int]], *, room: int) -> list[int]:
        self.prompts, self.room = prompts, room
        return [0]

    def step(self, tokens: Sequence[int]) -> list[list[int]]:
        self.clock.now += self.seconds[self.taken % len(self.seconds)]
        self.diary.append(f"{self.name}{tokens[0]}")
        self.taken += 1
        return [[7, tokens[0] + 1]]  # the last one is fed next


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "clock", made)
    return made


def prompt(name: str, ids: list[int]) -> EncodedPrompt:
    return EncodedPrompt(prompt=Prompt(id=name, kind="list", text=name, group=name), ids=ids)


def test_step_latency_is_the_median_after_two_steps_of_warm_up(clock):
    diary: list[str] = []
    slow = Timed("a", clock, [100, 100, 1, 2, 3, 50, 2], diary)
    fast = Timed("b", clock, [0.5], diary, longest_block=4)

    assert step_seconds([slow, fast], [1, 2], repeats=5) == [2, 0.5]
    assert diary[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert slow.room == fast.room == 8 * 4
    assert slow.prompts == fast.prompts == [[1, 2]]


def test_a_clock_goes_on_from_where_it_stopped_and_gives_the_mean(clock):
    diary: list[str] = []
    timed = step_clock(Timed("a", clock, [1, 3, 5], diary), [1, 2], room=9)  # pyright: ignore

    assert [timed(2), timed(1)] == [2, 5]
    assert diary == ["a0", "a1", "a2"]


class Recorder:
    """Counts prompts."""

    done = 0

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self.done += amount


def test_every_method_answers_every_prompt_and_none_always_comes_first(monkeypatch):
    order = []
    real = module.generate

    def watch(method, *given, **named):
        order.append(method.label)
        return real(method, *given, **named)

    monkeypatch.setattr(module, "generate", watch)
    backbone = make_backbone()
    methods = {}
    for name in ("x", "y", "z"):
        methods[name] = Plain(backbone)
        methods[name].label = name  # pyright: ignore
    prompts = [prompt(f"p{i}", [i + 1, 5, 9]) for i in range(3)]
    meter = Recorder()

    measured = measure(methods, prompts, backbone, max_new_tokens=4, warmup=1, meter=meter)

    assert order == ["x", "y", "z", "x", "y", "z", "y", "z", "x", "z", "x", "y"]
    assert meter.done == 3
    for name in methods:
        assert [m.prompt_id for m in measured[name]] == ["p0", "p1", "p2"]
        assert {m.kind for m in measured[name]} == {"list"}
        answers = [m.generation.ids for m in measured[name]]
        assert answers == [m.generation.ids for m in measured["x"]]
        assert all(1 <= len(ids) <= 4 for ids in answers)


def test_only_a_named_method_draws_and_each_prompt_has_a_seed_of_its_own(monkeypatch):
    given = []
    real = module.generate

    def watch(method, *places, sampling, **named):
        given.append((method.label, sampling.temperature, sampling.seed))
        return real(method, *places, sampling=sampling, **named)

    monkeypatch.setattr(module, "generate", watch)
    backbone = make_backbone()
    methods = {name: Plain(backbone) for name in ("greedy", "drawn")}
    for name, method in methods.items():
        method.label = name  # pyright: ignore
    prompts = [prompt(f"p{i}", [1, 5, 9]) for i in range(3)]
    drawn = {"drawn": Sampling(temperature=0.7, seed=40)}
    settings = {"max_new_tokens": 8, "warmup": 1, "meter": Recorder(), "samplings": drawn}

    measured = measure(methods, prompts, backbone, **settings)  # pyright: ignore
    again = measure(methods, prompts, backbone, **settings)  # pyright: ignore

    assert [(t, seed) for name, t, seed in given[:8] if name == "drawn"] == [
        (0.7, 40),  # the warm-up
        (0.7, 40),
        (0.7, 41),
        (0.7, 42),
    ]
    assert {temperature for name, temperature, _ in given if name == "greedy"} == {0.0}
    answers = [tuple(m.generation.ids) for m in measured["drawn"]]
    assert len(set(answers)) == 3  # though the prompts are the same
    assert answers == [tuple(m.generation.ids) for m in again["drawn"]]
    assert len({tuple(m.generation.ids) for m in measured["greedy"]}) == 1
