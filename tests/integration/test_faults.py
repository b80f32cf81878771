"""Bad input, a full disk, Ctrl-C: a sentence, a status that is not 0, and the way on is free."""

import json
import signal
import time
from pathlib import Path

import pytest
from command_case import manifest, run_here, run_process, signal_when, start

from medusa_train.data.rows import read_split
from medusa_train.distill import run as distill_module
from medusa_train.model.tiny import tiny_llama

SMOKE = "+recipe=smoke"

slow = pytest.mark.slow


@slow
def test_bad_settings_are_told_within_seconds_and_without_torch(tmp_path):
    begun = time.monotonic()

    done = run_process(
        tmp_path, SMOKE, "haeds.num_heads=2", "seed=x", env={"PYTHONPROFILEIMPORTTIME": "1"}
    )

    assert time.monotonic() - begun < 20
    assert done.status == 2
    assert "haeds: unknown key, did you mean heads?" in done.err
    assert "seed: input should be a valid integer, got 'x'" in done.err
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.err.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"torch", "transformers", "deepspeed"}


def save_model(folder: Path, **changes) -> Path:
    """The tiny model as a folder, with some attributes of its tokenizer changed."""
    model, tokenizer = tiny_llama()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_missing_model_folder_is_named_and_the_right_one_then_works(tmp_path):
    missing = tmp_path / "models" / "none"
    few = ("stages=[distill]", "prompts.max_train=2", "prompts.max_calibration=1")

    done = run_here(tmp_path, SMOKE, *few, f"model.name={missing}")
    assert done.status == 1
    assert f"model.name={missing}: no such folder" in done.err

    done = run_here(tmp_path, SMOKE, *few, f"model.name={save_model(tmp_path / 'model')}")
    assert done.status == 0


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    model = save_model(tmp_path / "model", chat_template=None)

    done = run_here(tmp_path, SMOKE, f"model.name={model}")

    assert done.status == 1
    assert "the tokenizer has no chat template" in done.err


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "is empty"), ('{"text": "x"}\n', "line 1: expected"), ('{"prompt": "one"}\n', "split")],
)
def test_prompt_files_that_cannot_be_used(tmp_path, content, says):
    (tmp_path / "prompts.jsonl").write_text(content)

    done = run_here(tmp_path, SMOKE, "prompts.path=prompts.jsonl")

    assert done.status == 1
    assert says in done.err


def test_a_prompt_longer_than_the_context_is_named(tmp_path):
    lines = [json.dumps({"prompt": f"{n} " + "x" * (3000 if n == 7 else 3)}) for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    shares = ("prompts.calibration_share=0.2", "prompts.test_share=0.2", "prompts.max_train=null")

    done = run_here(tmp_path, SMOKE, "prompts.path=prompts.jsonl", *shares)

    assert done.status == 1
    assert "1 prompt(s) are too long" in done.err
    assert "a context of 2048" in done.err


def test_a_tree_deeper_than_the_heads_is_refused_at_once(tmp_path):
    done = run_here(tmp_path, SMOKE, "evaluate.tree=[[0],[0,0],[0,0,0],[0,0,0,0]]")

    assert done.status == 2
    assert "evaluate.tree is 4 deep, but heads.num_heads=3" in done.err
    assert not (tmp_path / "outputs" / "smoke" / "distill").exists()


@slow
def test_a_tree_without_a_parent_is_named(finished):
    (finished / "outputs" / "smoke" / "evaluate" / "manifest.json").unlink()

    done = run_here(finished, SMOKE, "stages=[evaluate]", "evaluate.tree=[[0],[1,0]]")

    assert done.status == 2
    assert "tree path [1, 0] lacks its parent [1]" in done.err


@slow
def test_a_draft_with_another_tokenizer_is_refused(finished):
    model, tokenizer = tiny_llama()
    tokenizer.add_tokens(["<a>"])
    model.save_pretrained(finished / "other")
    tokenizer.backend_tokenizer.add_special_tokens(["<b>"])
    tokenizer.save_pretrained(finished / "other")
    path = finished / "other" / "tokenizer.json"
    swapped = path.read_text().replace('"!":0', '"\\u0000":0').replace('"!": 0', '"\\u0000": 0')
    path.write_text(swapped)
    for stage in ("draft", "evaluate"):
        (finished / "outputs" / "smoke" / stage / "manifest.json").unlink()

    done = run_here(finished, SMOKE, f"draft.model={finished / 'other'}")

    assert done.status == 1
    assert "has another tokenizer than random:llama: id 0 is" in done.err


def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(tmp_path, monkeypatch):
    written = []

    def full_after_one(path, *given, **named):
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        real(path, *given, **named)

    real = distill_module.write_part
    few = ("stages=[distill]", "prompts.max_train=16", "distill.max_new_tokens=4")
    monkeypatch.setattr(distill_module, "write_part", full_after_one)
    done = run_here(tmp_path, SMOKE, *few)
    assert done.status == 1
    assert "cannot read or write: [Errno 28] No space left on device" in done.err

    monkeypatch.setattr(distill_module, "write_part", real)
    done = run_here(tmp_path, SMOKE, *few)

    assert done.status == 0
    assert "distill: 24 prompts, 8 answered before" in done.err
    assert len(read_split(tmp_path / "outputs" / "smoke" / "distill" / "train")) == 16


def interrupt_once(folder: Path, appears: str, *arguments: str) -> tuple[int, str]:
    """Start the command, send Ctrl-C when a file of that pattern appears; status, what it said."""
    process = start(folder, SMOKE, *arguments)
    status = signal_when(process, signal.SIGINT, lambda: bool(list(folder.glob(appears))))
    return status, (folder / "said.log").read_text()


@slow
def test_ctrl_c_while_answering_is_a_sentence_and_the_same_command_goes_on(tmp_path):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("Ctrl-C is ignored, as a shell has it for its background jobs")
    many = ("stages=[distill]", "prompts.max_train=800", "distill.batch_size=2")
    status, said = interrupt_once(tmp_path, "outputs/smoke/distill/train/*.parquet", *many)
    assert status == 130
    assert "stopped by Ctrl-C; the same command goes on" in said
    assert "Traceback" not in said
    kept = len(read_split(tmp_path / "outputs/smoke/distill/train"))
    assert 0 < kept < 800

    done = run_here(tmp_path, SMOKE, *many)

    assert done.status == 0
    assert f"{kept} answered before" in done.err
    assert len(read_split(tmp_path / "outputs/smoke/distill/train")) == 800


@slow
def test_the_same_command_twice_at_once_is_refused_and_a_kill_leaves_no_lock(finished):
    rows = f"paths.distill={finished / 'outputs' / 'smoke' / 'distill'}"
    same = (SMOKE, "run_name=twice", rows, "stages=[medusa1]", "medusa1.optim.epochs=60")
    first, seconds = start(finished, *same), []

    def tried_again() -> bool:
        if not list(finished.glob("outputs/twice/medusa1/checkpoints/step-*")):
            return False
        seconds.append(run_here(finished, *same))
        return True

    status = signal_when(first, signal.SIGKILL, tried_again)
    assert (status, seconds[0].status) == (-signal.SIGKILL, 2)
    assert f"outputs/twice/medusa1 is in use by process {first.pid} on " in seconds[0].err

    assert run_here(finished, *same).status == 0


@slow
def test_ctrl_c_while_training_keeps_a_checkpoint_and_the_same_command_goes_on(finished):
    run = finished / "outputs" / "smoke"
    (run / "medusa1").rename(finished / "before")
    longer = ("run_name=longer", f"paths.distill={run / 'distill'}", "stages=[medusa1]")
    longer += ("medusa1.optim.epochs=60", "medusa1.optim.save_every=50")
    appears = "outputs/longer/medusa1/checkpoints/step-000050"
    status, said = interrupt_once(finished, appears, *longer)
    assert status == 130
    assert "stopped by SIGINT after step" in said
    assert "Traceback" not in said
    steps = sorted((finished / "outputs/longer/medusa1/checkpoints").glob("step-*"))
    assert 50 <= int(steps[-1].name.removeprefix("step-")) < 240

    done = run_here(finished, SMOKE, *longer)

    assert done.status == 0
    assert manifest(finished / "outputs/longer/medusa1")["summary"]["steps"] == 240
