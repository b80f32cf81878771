"""Every command in README.md is run: here, in CI, or by the test of the launchers."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from chat_case import SAID, piped_chat, save_run
from command_case import manifest, run_command
from integration.test_launch import LAUNCHERS

from medusa_train.model.tiny import tiny_llama

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STAGES = ("distill", "medusa1", "draft", "evaluate")

# Appended to the README's command for a model of one's own: less work, nothing else
LESS_WORK = [
    "track=disabled",
    "prompts.calibration_share=0.2",
    "prompts.test_share=0.2",
    "distill.max_new_tokens=16",
    "distill.batch_size=8",
    "draft.num_layers=1",
    *(
        f"{stage}.optim.{setting}"
        for stage in ("medusa1", "draft")
        for setting in ("batch_size=8", "micro_batch_size=4", "epochs=1")
    ),
    "evaluate.num_prompts=2",
    "evaluate.max_new_tokens=16",
    "evaluate.gammas=[2]",
    "evaluate.tree_sizes=[1,4]",
    "evaluate.latency_repeats=5",
    "evaluate.bootstrap_samples=100",
]


def blocks(language: str | None = None) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks, of one language or of all."""
    found = re.findall(r"^```(.*)\n((?s:.*?))^```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return [(name, text) for name, text in found if language in (None, name)]


def commands() -> list[str]:
    """Each command of the bash blocks, without comments and surplus space."""
    lines = "".join(text for _, text in blocks("bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [shlex.join(line) for line in words if line]


def only_block(language: str) -> str:
    """The text of the one block in a language."""
    [(_, text)] = blocks(language)
    return text


def is_run_by_ci(command: str, _: Path) -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    words = shlex.split(command)
    assert words in [shlex.split(line, comments=True)[: len(words)] for line in lines]


def is_run_by_the_launch_test(command: str, _: Path) -> None:
    """With the same arguments, but quietly and on a free port."""
    launcher, *expected = shlex.split(command)
    program, *given = LAUNCHERS[launcher]("+recipe=smoke")
    if "--master_port" in given:
        port = given.index("--master_port")
        del given[port : port + 2]
    assert Path(program).name == launcher
    assert [word for word in given if word != "-q"] == expected


def runs_on_a_model_of_ones_own(command: str, cwd: Path) -> None:
    for part in tiny_llama():
        part.save_pretrained(cwd / "path" / "to" / "model")
    prompts = [{"prompt": f"What comes after {number}?"} for number in range(40)]
    (cwd / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in prompts))

    run_python(command, cwd, *LESS_WORK)

    run = cwd / "outputs" / "my_model"
    assert {manifest(run / stage)["status"] for stage in STAGES} == {"done"}
    assert (run / "evaluate" / "report.md").is_file()


def runs_the_recipe_shown_above(command: str, cwd: Path) -> None:
    recipe = only_block("yaml")
    (cwd / "my_configs" / "recipe").mkdir(parents=True)
    (cwd / "my_configs" / "recipe" / "mine.yaml").write_text(recipe)

    run_python(command, cwd, "stages=[distill]")

    run = cwd / "outputs" / "mine"
    [composed] = run.rglob(".hydra/**/config.yaml")
    assert manifest(run / "distill")["status"] == "done"
    settings = yaml.safe_load(composed.read_text())
    assert settings["heads"]["num_heads"] == yaml.safe_load(recipe)["heads"]["num_heads"]


def answers_what_stands_in_the_pipe(command: str, cwd: Path) -> None:
    run = save_run(cwd)
    (cwd / "outputs").mkdir()
    run.rename(cwd / "outputs" / "quickstart")

    program, _, module, *arguments = shlex.split(command)
    assert [program, module] == ["python", "medusa_train.chat"]
    done = piped_chat(cwd, "Why?\n", *arguments)

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{SAID}\n"


def runs_with_the_backbone_in_training(command: str, cwd: Path) -> None:
    run_python(command, cwd)

    run = cwd / "outputs" / "joint"
    change = manifest(run / "medusa2")["summary"]["backbone"]
    assert change.keys() >= {"perplexity", "kl", "agreement"}
    assert "What became of the backbone" in (run / "evaluate" / "report.md").read_text()


def run_python(command: str, cwd: Path, *more: str) -> None:
    """Run a command that begins with `python`, by this Python."""
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = run_command([sys.executable, *arguments, *more], cwd)
    assert done.status == 0
    assert "Traceback" not in done.err


# Each command as it stands in README.md, and how it is known to work
EXECUTED: dict[str, Callable[[str, Path], None]] = {
    "make quickstart": is_run_by_ci,
    "make test": is_run_by_ci,
    "python -m medusa_train "
    "model.name=path/to/model prompts.path=prompts.jsonl run_name=my_model": (
        runs_on_a_model_of_ones_own
    ),
    "python -m medusa_train --config-dir my_configs +recipe=mine": runs_the_recipe_shown_above,
    "python -m medusa_train +recipe=smoke 'stages=[distill,medusa1,medusa2,evaluate]' "
    "run_name=joint": runs_with_the_backbone_in_training,
    "python -m medusa_train.chat outputs/quickstart": answers_what_stands_in_the_pipe,
    "deepspeed --num_gpus 2 --module medusa_train +recipe=smoke": is_run_by_the_launch_test,
    "torchrun --standalone --nproc_per_node 2 -m medusa_train +recipe=smoke": (
        is_run_by_the_launch_test
    ),
}


def test_each_command_is_known():
    """A command that is new or changed belongs into `EXECUTED`."""
    assert sorted(commands()) == sorted(EXECUTED)


def test_no_command_hides_in_another_kind_of_block():
    assert {language for language, _ in blocks()} == {"bash", "python", "yaml"}


@pytest.mark.parametrize("command", EXECUTED)
def test_command_works(command, tmp_path):
    EXECUTED[command](command, tmp_path)


def test_python_example_works_on_the_smoke_run(finished):
    done = run_command([sys.executable, "-c", only_block("python")], finished)

    assert done.status == 0
    assert "Traceback" not in done.err
    accepted = re.search(r"\[[\d, ]+\]$", done.out.strip())
    assert accepted, "no list of accepted tokens in what the example prints"
