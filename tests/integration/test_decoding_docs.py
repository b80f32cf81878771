"""The Python of docs/decoding.md runs, one block after the other, with T5 made on the spot."""

import re
from pathlib import Path

import pytest
from seq2seq_case import make_t5

from medusa_train.model.tiny import byte_tokenizer

TEXT = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text()
BLOCKS = re.findall(r"^```python\n((?s:.*?))^```$", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def names():
    """What the blocks leave behind."""
    space = {"print": lambda *_: None}
    for block in BLOCKS:
        exec(compile(block, "docs/decoding.md", "exec"), space)
    return space


def test_there_are_three_blocks_and_all_run(names):
    assert len(BLOCKS) == 3
    assert len(names["drawn"].ids) >= 5


def test_a_t5_answers(names, tmp_path):
    make_t5().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(names["answer"](str(tmp_path), str(tmp_path), "how does rain form")) > 0


def test_the_text_tells_the_defaults(names):
    import inspect

    from medusa_train.decode import DraftModel, Lookup, Typical

    assert f"gamma={inspect.signature(Lookup).parameters['gamma'].default}" in TEXT
    assert "`longest_ngram=3`" in TEXT
    assert inspect.signature(Lookup).parameters["longest_ngram"].default == 3
    assert inspect.signature(DraftModel).parameters["adaptive"].default is False
    assert (Typical().epsilon, Typical().delta) == (0.09, 0.3)
    assert "epsilon 0.09, delta 0.3" in TEXT
