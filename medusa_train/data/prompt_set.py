"""The prompts that ship with the package, built from the hand-written material beside this file.

Every choice (which phrasings a topic gets, the numbers of a word problem, the order of the set,
the split) is a function of SHA-256 hashes of the material itself. The set is therefore the same on
every machine, and adding material leaves the other prompts and their splits as they are.
"""

import functools
import hashlib
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KINDS = ("explain", "write", "summarise", "extract", "rewrite", "list", "code", "arithmetic")
SPLITS = ("train", "calibration", "test")

_MATERIAL = Path(__file__).parent / "prompt_material"
_TOPIC_KINDS = ("explain", "write", "rewrite", "list", "code")
_OPERATORS = {"+": operator.add, "*": operator.mul}
_HASH_STEPS = 16**13  # 52 bits: exact in a float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One user turn.

    Attributes:
        id: The kind and a hash of the folded text; stable when other prompts are added.
        kind: One of `KINDS`, or "other" for a user's own prompts.
        text: What the user says.
        group: Key of the material the prompt was made from. Groups are never divided by a split.
    """

    id: str
    kind: str
    text: str
    group: str


def prompt_id(kind: str, text: str) -> str:
    """Name a prompt by its kind and its text, ignoring case and the amount of white space."""
    folded = " ".join(text.casefold().split())
    return f"{kind}-{_digest(folded)[:10]}"


def split_of(group: str, *, calibration: float, test: float) -> str:
    """Assign a group to one of `SPLITS`, by hash.

    Args:
        group: The unit that must stay together, such as `Prompt.group`.
        calibration: Expected share of groups in the calibration split.
        test: Expected share of groups in the test split.
    """
    if calibration < 0 or test < 0 or calibration + test > 1:
        raise ValueError(f"Not valid shares: calibration={calibration}, test={test}")
    position = _unit(f"split/{group}")
    if position < test:
        return "test"
    return "calibration" if position < test + calibration else "train"


@functools.cache
def shipped_prompts() -> tuple[Prompt, ...]:
    """All shipped prompts, in a fixed pseudo-random order that mixes the kinds."""
    prompts = [
        *_passage_prompts(),
        *_arithmetic_prompts(),
        *(prompt for kind in _TOPIC_KINDS for prompt in _topic_prompts(kind)),
    ]
    return tuple(sorted(prompts, key=lambda prompt: _digest(f"order/{prompt.id}")))


def _topic_prompts(kind: str) -> Iterator[Prompt]:
    """Combine each topic of a kind with a few of the phrasings ("frames") of its family."""
    for family in _load(kind):
        for topic in family["topics"]:
            group = f"{kind}/{family['family']}/{_slug(topic)}"
            for frame in _pick(group, family["frames"], family["each"]):
                slots = {
                    slot: _pick(f"{group}/{frame}", options, 1)[0]
                    for slot, options in family.get("slots", {}).items()
                }
                yield _prompt(kind, group, frame, topic=topic, **slots)


def _passage_prompts() -> Iterator[Prompt]:
    """Ask for summaries of and facts from each passage; a passage is one group for both kinds."""
    summarise, extract = _load("summarise"), _load("extract")
    for passage in _load("passages"):
        group = f"passage/{passage['id']}"
        values = {"noun": passage["noun"], "text": passage["text"]}
        for frame in _pick(group, summarise["frames"], summarise["each"]):
            yield _prompt("summarise", group, frame, **values)
        frames = _pick(group, extract["frames"], len(passage["extract"]))
        for frame, ask in zip(frames, passage["extract"], strict=True):
            yield _prompt("extract", group, frame, ask=ask, **values)


def _arithmetic_prompts() -> Iterator[Prompt]:
    """Fill each story shape several times; a shape with its numbers is a group."""
    material = _load("arithmetic")
    for shape in material["shapes"]:
        for variant in range(material["each"]):
            key = f"arithmetic/{shape['id']}/{variant}"
            numbers = _numbers(key, shape["numbers"])
            name, other = _pick(key, material["names"], 2)
            thing = _pick(key, shape.get("thing", [""]), 1)[0]
            filled = "-".join(str(number) for number in numbers.values())
            group = f"arithmetic/{shape['id']}/{filled}"
            yield _prompt(
                "arithmetic", group, shape["text"], name=name, other=other, thing=thing, **numbers
            )


def _numbers(key: str, rules: Mapping[str, str | Sequence[int]]) -> dict[str, int]:
    """Draw the numbers of a word problem.

    Args:
        key: Seed of the draw.
        rules: For each number, either its range `[low, high]` or `[low, high, step]` (both ends
            included), or a sum or product of two earlier numbers such as `"a*b"`.
    """
    numbers: dict[str, int] = {}
    for name, rule in rules.items():
        if isinstance(rule, str):
            left, sign, right = re.split(r"([+*])", rule)
            numbers[name] = _OPERATORS[sign](numbers[left], numbers[right])
        else:
            low, high, *step = rule
            choices = range(low, high + 1, *step)
            numbers[name] = choices[int(_unit(f"{key}/{name}") * len(choices))]
    return numbers


def _prompt(kind: str, group: str, frame: str, **values: str | int) -> Prompt:
    """Fill a frame and wrap it up as a prompt."""
    text = frame.format(**values)
    return Prompt(id=prompt_id(kind, text), kind=kind, text=text, group=group)


def _pick(key: str, choices: Sequence[str], count: int) -> list[str]:
    """Choose `count` different entries by hash; an added choice only ever displaces others."""
    return sorted(choices, key=lambda choice: _digest(f"{key}|{choice}"))[:count]


def _slug(text: str) -> str:
    """Shorten a text to a few readable words and a hash."""
    words = re.findall(r"[a-z0-9]+", text.lower())[:6]
    return "-".join([*words, _digest(text)[:6]])


def _unit(text: str) -> float:
    """Hash a text to a number in [0, 1)."""
    return int(_digest(text)[:13], 16) / _HASH_STEPS


def _digest(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _load(name: str) -> Any:
    """Read one file of the material."""
    return yaml.safe_load((_MATERIAL / f"{name}.yaml").read_text(encoding="utf-8"))
