"""Distillation: what is answered, how, and that a rerun makes only what is missing."""

import pytest
import torch
from training_case import ALONE, make_backbone

from medusa_train.config.load import load
from medusa_train.data.hidden_states import cached_source, online_source
from medusa_train.data.prompts import prompts_by_split
from medusa_train.data.rows import part_path, read_split
from medusa_train.distill import run as module
from medusa_train.distill.run import distill, plan_parts, row_numbers, summarise
from medusa_train.errors import DataError
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage

TRAIN, CALIBRATION, BATCH, TOKENS = 7, 3, 4, 6


def make_config(*overrides: str):
    return load(
        "+recipe=smoke",
        f"prompts.max_train={TRAIN}",
        f"prompts.max_calibration={CALIBRATION}",
        f"distill.batch_size={BATCH}",
        f"distill.max_new_tokens={TOKENS}",
        *overrides,
    )


@pytest.fixture(scope="module")
def backbone():
    return make_backbone()


@pytest.fixture(scope="module")
def config():
    return make_config()


def run(folder, config, backbone, world=ALONE):
    stage = Stage(name="distill", folder=folder, settings={})
    stage.open()
    return distill(config, stage, backbone, world)


@pytest.fixture(scope="module")
def made(tmp_path_factory, config, backbone):
    """A finished folder and its summary."""
    folder = tmp_path_factory.mktemp("distill")
    return folder, run(folder, config, backbone)


def answers(folder, split="train"):
    return {row.id: (row.ids, row.mask) for row in read_split(folder / split)}


def test_every_prompt_of_two_splits_is_answered_and_no_test_prompt(made, config):
    folder, _ = made
    prompts = prompts_by_split(config.prompts)

    for split in ("train", "calibration"):
        assert set(answers(folder, split)) == {p.id for p in prompts[split]}
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["calibration", "train"]


def test_rows_hold_the_exact_ids_of_prompt_and_answer(made, backbone):
    for row in read_split(made[0] / "train"):
        start = row.answer_start
        assert row.ids[:start] == backbone.encode_prompt(row.prompt, None)
        assert row.mask == [False] * start + [True] * (len(row.ids) - start)
        assert 1 <= len(row.answer_ids) <= TOKENS
        assert row.answer == backbone.decode(row.answer_ids)
        ended = row.answer_ids[-1] in backbone.end_ids
        assert row.finish_reason == ("stop" if ended else "length")


def test_prompts_of_like_length_are_answered_together(config, backbone, tmp_path):
    parts = plan_parts(config, tmp_path, backbone)
    lengths = [[len(e.ids) for e in part.prompts] for part in parts]

    assert [len(part) for part in lengths] == [BATCH, TRAIN - BATCH, CALIBRATION]
    assert max(lengths[0]) <= min(lengths[1])
    assert [part.greedy for part in parts] == [False, False, True]


def test_calibration_answers_are_greedy_and_training_answers_are_drawn(made, backbone):
    def greedy(row):
        ids = torch.tensor([row.ids])
        hidden = backbone.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool))
        best = backbone.best(hidden)[0, row.answer_start - 1 : -1]
        return best.tolist() == row.answer_ids

    assert all(greedy(row) for row in read_split(made[0] / "calibration"))
    assert not all(greedy(row) for row in read_split(made[0] / "train"))


def test_kept_hidden_states_are_those_of_a_forward(made, backbone):
    rows = read_split(made[0] / "train")

    kept = cached_source(torch.device("cpu"))(rows)
    fresh = online_source(backbone.hidden_states, backbone.device)(rows)

    for a, b in zip(kept, fresh, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_without_the_setting_no_hidden_states_are_kept(tmp_path, backbone):
    run(tmp_path, make_config("distill.hidden_states=false"), backbone)

    assert list(tmp_path.rglob("*.safetensors")) == []


def test_the_summary_counts_what_lies_on_disk(made):
    folder, summary = made
    rows = read_split(folder / "train")

    found = summary["train"]
    assert summarise(folder) == summary
    assert found["rows"] == TRAIN
    assert found["tokens"] == sum(sum(row.mask) for row in rows)
    assert found["prompt_tokens"] == sum(row.answer_start for row in rows)
    assert sum(found["finish_reasons"].values()) == TRAIN
    cut = found["finish_reasons"].get("length", 0)
    assert found["truncated_share"] == pytest.approx(cut / TRAIN, abs=1e-4)
    assert found["seconds"] > 0


def test_a_rerun_makes_only_the_missing_part_and_makes_it_the_same(
    tmp_path, config, backbone, made, monkeypatch
):
    run(tmp_path, config, backbone)
    part_path(tmp_path / "train", 0).unlink()
    answered = []

    def watch(*given, **named):
        answered.append(len(given[1]))
        return real(*given, **named)

    real = module.answer_batch
    monkeypatch.setattr(module, "answer_batch", watch)

    run(tmp_path, config, backbone)

    assert answered == [BATCH]
    assert answers(tmp_path) == answers(made[0])


def test_processes_share_the_parts_whichever_comes_late(tmp_path, config, backbone, made):
    """Had a late process shared out what it finds missing, parts would be left to nobody."""
    for rank in (0, 1):
        run(tmp_path, config, backbone, World(rank=rank, size=2))

    assert answers(tmp_path) == answers(made[0])


def test_a_full_disk_stops_with_what_was_answered_kept(tmp_path, config, backbone, monkeypatch):
    written = []

    def full_after_one(path, *given, **named):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        real(path, *given, **named)

    real = module.write_part
    monkeypatch.setattr(module, "write_part", full_after_one)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, config, backbone)

    assert len(read_split(tmp_path / "train")) == BATCH


def test_the_seed_decides_the_answers(tmp_path, backbone, made):
    run(tmp_path, make_config("seed=1"), backbone)

    assert answers(tmp_path) != answers(made[0])
    assert answers(tmp_path, "calibration") == answers(made[0], "calibration")


def test_random_numbers_belong_to_the_row_and_the_seed():
    both = row_numbers(["a", "b"], 5, seed=0)

    assert torch.equal(row_numbers(["b"], 5, seed=0)[0], both[1])
    assert torch.equal(row_numbers(["a"], 3, seed=0)[0], both[0, :3])
    assert not torch.equal(row_numbers(["a"], 5, seed=1)[0], both[0])
    assert not torch.equal(both[0], both[1])
    assert ((both >= 0) & (both < 1)).all()


def test_a_prompt_longer_than_the_context_is_refused_before_any_answer(tmp_path, config):
    short = make_backbone(max_position_embeddings=64)

    with pytest.raises(DataError, match=r"too long: .* a context of 64"):
        run(tmp_path, config, short)

    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
