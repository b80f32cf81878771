"""From YAML and overrides to a `Config`, and what faults sound like."""

import json
from dataclasses import asdict

import pytest
from omegaconf import OmegaConf

from medusa_train.config import load as module
from medusa_train.config.load import check, load, nearest, shipped_dir, shipped_recipes, valid_keys
from medusa_train.errors import ConfigError


def faults(*overrides: str) -> list[str]:
    """The lines of the message that such settings are refused with."""
    with pytest.raises(ConfigError) as refused:
        load("model=tiny", "heads=reduced", *overrides)
    return str(refused.value).splitlines()


def test_the_command_line_beats_the_recipe_and_the_recipe_beats_the_defaults():
    config = load("+recipe=smoke", "heads.num_heads=2")

    assert config.heads.num_heads == 2
    assert config.heads.vocab_size == 128
    assert config.heads.num_layers == 1


def test_every_fault_is_told_at_once_with_its_key_and_the_nearest_name():
    first, *lines = faults(
        "++haeds.num_heads=2",
        "++medusa1.optim.epoch=1",
        "++heads.num_head=2",
        "medusa1.optim.lr=fast",
        "draft.num_layers=0",
        "stages=[distil]",
    )

    assert first == "6 setting(s) to change:"
    assert sorted(lines) == [
        "  - draft: num_layers must be at least 1, got 0",
        "  - haeds: unknown key, did you mean heads?",
        "  - heads.num_head: unknown key, did you mean heads.num_heads?",
        "  - medusa1.optim.epoch: unknown key, did you mean medusa1.optim.epochs?",
        "  - medusa1.optim.lr: input should be a valid number, got 'fast'",
        "  - stages.0: input should be 'distill', 'medusa1', 'medusa2', 'draft' or 'evaluate', "
        "got 'distil'",
    ]


def test_several_faults_of_one_section_are_all_told():
    lines = faults("heads.num_heads=0", "heads.vocab_size=1")

    assert "num_heads must be 1 to 16, got 0; vocab_size must be at least 2, got 1" in lines[1]


def test_a_recipe_that_became_a_plain_value_is_caught():
    """Without a group of that name `+recipe=x` is a value, and the run would use defaults."""
    composed = OmegaConf.create({**json.loads(json.dumps(asdict(load("model=tiny"))))})
    composed.recipe = "smok"

    with pytest.raises(ConfigError, match=r"recipe: no recipe 'smok', known: .*smoke"):
        check(composed)


def test_a_missing_value_names_what_to_type():
    with pytest.raises(ConfigError, match=r"give it on the command line as model\.name=\.\.\."):
        load()


def test_a_broken_interpolation_names_its_key():
    with pytest.raises(ConfigError, match="nothing_there"):
        load("model=tiny", "run_name=${nothing_there}")


def test_an_interpolation_that_holds_is_resolved():
    assert load("model=tiny", "run_name=heads-${heads.num_heads}").run_name == "heads-4"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("heads.num_haeds", "heads.num_heads"),
        ("medusa1.optim.lrate", "medusa1.optim.lr"),
        ("optim.batch_size", "draft.optim.batch_size"),
        ("zero_stage", "deepspeed.zero_stage"),
        ("xyzzy", None),
    ],
)
def test_nearest(key, expected):
    assert nearest(key) == expected


def test_valid_keys_hold_sections_and_leaves():
    keys = set(valid_keys())

    assert {"heads", "heads.num_heads", "medusa1.optim", "medusa1.optim.lr"} <= keys
    assert len(keys) == len(list(valid_keys()))


def test_shipped_yaml_is_found_in_a_checkout_and_in_a_wheel(tmp_path, monkeypatch):
    assert (shipped_dir("recipes") / "smoke.yaml").is_file()

    package = tmp_path / "medusa_train"
    (package / "_recipes").mkdir(parents=True)
    monkeypatch.setattr(module, "_PACKAGE", package)

    assert shipped_dir("recipes") == package / "_recipes"
    assert shipped_dir("configs") == tmp_path / "configs"


def test_shipped_recipes_come_with_their_line():
    recipes = shipped_recipes()

    assert list(recipes) == sorted(recipes)
    assert "tiny random model" in recipes["smoke"]
