"""The W&B sweep: each trial it can draw is a valid command with a folder of its own."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from medusa_train.__main__ import tidy
from medusa_train.config.load import load
from medusa_train.train.medusa1 import Medusa1Objective

SWEEP = yaml.safe_load((Path(__file__).parents[2] / "scripts" / "sweep.yaml").read_text())


def values(parameter: dict[str, Any]) -> list[Any]:
    """All that a trial can draw, or both ends of it."""
    return parameter.get("values") or [parameter["min"], parameter["max"]]


def trial(place: int) -> list[str]:
    """The command that W&B makes with the first or the last value of each parameter."""
    drawn = {name: {"value": values(p)[place]} for name, p in SWEEP["parameters"].items()}
    made = create_sweep_command_args({"args": drawn})
    macros = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"]}
    macros["${args_no_hyphens}"] = made["args_no_hyphens"]
    words = create_sweep_command(list(SWEEP["command"]))
    return [part for word in words for part in macros.get(word, [word])]


@pytest.mark.parametrize("place", [0, -1])
def test_a_trial_is_a_valid_run_of_one_stage(place, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "ab12")
    program, arguments = trial(place)[:4], trial(place)[4:]
    config = load(*tidy(arguments))

    assert program == ["/usr/bin/env", "python", "-m", "medusa_train"]
    assert config.run_name == "sweep-ab12"
    assert config.stages == ("medusa1",)
    assert config.track.mode == "online"
    for name, parameter in SWEEP["parameters"].items():
        found: Any = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == values(parameter)[place], name


def test_what_is_maximised_is_what_a_run_logs():
    assert SWEEP["metric"] == {
        "name": f"eval/{Medusa1Objective.score_name}",
        "goal": "maximize",
    }
