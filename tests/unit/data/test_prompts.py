"""Prompts of a user's file and of the package, by split and as token ids."""

import json

import pytest
from training_case import make_backbone

from medusa_train.config.load import load
from medusa_train.config.schema import PromptsConfig
from medusa_train.data.prompts import encode_prompts, prompts_by_split, read_prompts
from medusa_train.errors import DataError


def write(path, *lines: str):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def line(text: str, **more: str) -> str:
    return json.dumps({"prompt": text, **more})


def config(**changes) -> PromptsConfig:
    values = {name: None for name in ("path", "system", "max_train", "max_calibration", "max_test")}
    return PromptsConfig(**{**values, "calibration_share": 0.25, "test_share": 0.25, **changes})


def test_shipped_prompts_come_in_three_splits_without_overlap():
    splits = prompts_by_split(load("model=tiny").prompts)
    ids = {name: {p.id for p in prompts} for name, prompts in splits.items()}
    groups = {name: {p.group for p in prompts} for name, prompts in splits.items()}

    assert sum(len(found) for found in ids.values()) >= 1000
    assert not ids["train"] & (ids["calibration"] | ids["test"])
    assert not groups["train"] & (groups["calibration"] | groups["test"])
    assert not groups["calibration"] & groups["test"]


def test_limits_take_the_first_of_a_split():
    whole = prompts_by_split(config())
    cut = prompts_by_split(config(max_train=5, max_test=1))

    assert cut["train"] == whole["train"][:5]
    assert cut["test"] == whole["test"][:1]
    assert cut["calibration"] == whole["calibration"]


def test_a_file_gives_its_prompts_once_each_in_an_order_of_its_own(tmp_path):
    hello = line("Hello", kind="greet")
    lines = [hello, "", line("  hello "), line("Bye"), hello]
    there = read_prompts(write(tmp_path / "a", *lines))
    back = read_prompts(write(tmp_path / "b", *reversed(lines)))

    assert sorted(p.text for p in there) == ["Bye", "Hello"]
    assert {(p.text, p.kind) for p in there} >= {("Hello", "greet"), ("Bye", "other")}
    assert [p.id for p in there] == [p.id for p in back]


def test_a_byte_order_mark_and_broken_characters_are_taken_as_they_can_be(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"prompt": "a \\ud800 b"}\n', encoding="utf-8-sig")

    [prompt] = read_prompts(path)

    assert prompt.text.encode() == "a \ufffd b".encode()


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "x"}', r'line 2: expected \{"prompt": "some text"\}'),
        ('"x"', "line 2: expected"),
        ('{"prompt": " "}', "line 2: expected"),
        ('{"prompt": 3}', "line 2: expected"),
        ('{"prompt": "x", "kind": 3}', "line 2: kind must be text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, bad, says):
    with pytest.raises(DataError, match=says):
        read_prompts(write(tmp_path / "a", line("fine"), bad))


def test_a_missing_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "none")
    for text in ("", "\n \n", "\ufeff"):
        (tmp_path / "a").write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="is empty"):
            read_prompts(tmp_path / "a")


def test_a_split_that_comes_out_empty_says_what_to_change(tmp_path):
    path = write(tmp_path / "a", line("only one"))

    with pytest.raises(DataError, match=r"none of the 1 prompts falls into the .* split"):
        prompts_by_split(config(path=str(path)))


def test_a_prompt_is_encoded_through_the_chat_template():
    backbone = make_backbone()
    prompts = prompts_by_split(config(max_train=2))["train"]

    encoded = encode_prompts(prompts, backbone, system="Be kind.", max_new_tokens=8)

    assert [e.prompt for e in encoded] == prompts
    text = backbone.tokenizer.decode(encoded[0].ids)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompts[0].text in text


def test_prompts_fill_the_context_to_the_last_token_and_no_further():
    prompts = prompts_by_split(config(max_train=3))["train"]
    encoded = encode_prompts(prompts, make_backbone(), system=None, max_new_tokens=1)
    longest = max(len(e.ids) for e in encoded)
    fits = make_backbone(max_position_embeddings=longest + 8)
    short = make_backbone(max_position_embeddings=longest + 7)

    assert len(encode_prompts(prompts, fits, system=None, max_new_tokens=8)) == 3
    with pytest.raises(DataError, match=rf"1 prompt\(s\) are too long: .* has {longest} tokens"):
        encode_prompts(prompts, short, system=None, max_new_tokens=8)
