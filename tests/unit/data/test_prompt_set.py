"""Tests of the shipped prompts: their size, form, identity and splits."""

import re
from collections import Counter, defaultdict

import pytest

from medusa_train.data.prompt_set import KINDS, SPLITS, prompt_id, shipped_prompts, split_of

PROMPTS = shipped_prompts()
SHARES = {"calibration": 0.08, "test": 0.08}


def of_kind(kind):
    return [prompt for prompt in PROMPTS if prompt.kind == kind]


def fold(text):
    return " ".join(text.casefold().split())


def test_there_are_enough_prompts_of_each_kind():
    counts = Counter(prompt.kind for prompt in PROMPTS)
    assert len(PROMPTS) >= 1000
    assert set(counts) == set(KINDS)
    assert all(200 <= count <= 300 for count in counts.values()), counts


def test_no_prompt_occurs_twice():
    texts = Counter(fold(prompt.text) for prompt in PROMPTS)
    assert [text for text, count in texts.items() if count > 1] == []
    assert len({prompt.id for prompt in PROMPTS}) == len(PROMPTS)


def test_ids_are_made_from_kind_and_text():
    for prompt in PROMPTS:
        assert re.fullmatch(rf"{prompt.kind}-[0-9a-f]{{10}}", prompt.id)
        assert prompt.id == prompt_id(prompt.kind, prompt.text)


@pytest.mark.parametrize(
    ("id_", "text"),
    [
        ("explain-fdc7744502", "How does a washing machine work?"),
        ("list-118f12e683", "Give me three winter sports."),
        (
            "code-dff7e0c2a2",
            "Write a Python function that sorts a list of names by their length.",
        ),
    ],
)
def test_pinned_ids(id_, text):
    assert {prompt.id: prompt.text for prompt in PROMPTS}[id_] == text


def test_id_ignores_case_and_white_space():
    assert prompt_id("other", "Name a  River.\n") == prompt_id("other", "name a river.")
    assert prompt_id("other", "Name a river.") != prompt_id("list", "Name a river.")


def test_order_is_fixed_and_mixes_the_kinds():
    rebuilt = shipped_prompts.__wrapped__()
    assert rebuilt == PROMPTS
    assert {prompt.kind for prompt in PROMPTS[:100]} == set(KINDS)


def test_groups_are_small():
    sizes = Counter(prompt.group for prompt in PROMPTS)
    assert max(sizes.values()) <= 8


def test_prompts_from_one_passage_share_a_group():
    groups = defaultdict(set)
    for prompt in of_kind("summarise") + of_kind("extract"):
        groups[max(prompt.text.splitlines(), key=len)].add(prompt.group)
    assert all(len(group) == 1 for group in groups.values())


def test_each_split_has_every_kind():
    counts = Counter((split_of(prompt.group, **SHARES), prompt.kind) for prompt in PROMPTS)
    assert all(counts[split, kind] >= 8 for split in SPLITS for kind in KINDS), counts


def test_split_shares_are_about_right():
    groups = [f"group {number}" for number in range(5000)]
    counts = Counter(split_of(group, calibration=0.1, test=0.2) for group in groups)
    assert counts["calibration"] / len(groups) == pytest.approx(0.1, abs=0.02)
    assert counts["test"] / len(groups) == pytest.approx(0.2, abs=0.02)


def test_split_is_pinned():
    splits = [split_of(f"group {n}", calibration=0.3, test=0.3) for n in range(6)]
    assert splits == ["calibration", "test", "test", "calibration", "train", "train"]


def test_split_extremes():
    groups = {prompt.group for prompt in PROMPTS}
    assert {split_of(group, calibration=0, test=0) for group in groups} == {"train"}
    assert {split_of(group, calibration=0, test=1) for group in groups} == {"test"}
    assert {split_of(group, calibration=1, test=0) for group in groups} == {"calibration"}


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.1, -0.1), (0.6, 0.6)])
def test_split_refuses_impossible_shares(shares):
    calibration, test = shares
    with pytest.raises(ValueError, match="shares"):
        split_of("group", calibration=calibration, test=test)


@pytest.mark.parametrize("kind", KINDS)
def test_form(kind):
    for text in (prompt.text for prompt in of_kind(kind)):
        lines = text.splitlines()
        assert text == text.strip()
        assert not re.search(r"\{\w*\}", text), "a slot was not filled"
        assert not re.search(r"\S {2,}\S", text), "double space"
        assert not re.search(r"\n{3,}| \n", text), "untidy line breaks"
        assert text.lstrip("'")[0].isupper()
        assert re.search(r"[.?!:]'?$", lines[0])
        assert kind == "code" or re.search(r"[.?!]'?$", lines[-1])
        assert 3 <= len(text.split()) <= 130


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("code", "arithmetic")])
def test_articles_fit_the_next_word(kind):
    wrong = re.compile(r"\b(?:a (?=[aeio])|an (?=[bcdfgjklmnpqrtvwxyz]))\w*", re.IGNORECASE)
    found = {match[0] for prompt in of_kind(kind) for match in wrong.finditer(prompt.text)}
    assert found <= {"a one", "a European", "A and"}  # "A and": in "slot A and press"


def test_arithmetic_prompts_have_numbers():
    for prompt in of_kind("arithmetic"):
        numbers = [int(number) for number in re.findall(r"\d+", prompt.text)]
        assert len(numbers) >= 2, prompt.text
        assert min(numbers) > 0, prompt.text
