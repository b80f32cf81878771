"""A run whose stages do nothing but say that they were run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_train import actions
from medusa_train.config.load import load
from medusa_train.config.schema import Config

ALL = ["distill", "medusa1", "draft", "evaluate"]
BACKBONE = ("perplexity_before", "perplexity", "kl", "agreement_before", "agreement")
# What later stages ask of a manifest
SUMMARY = {
    "tokens": 8,
    "seconds": 1.5,
    "tokens_before": 0,
    "seconds_before": 0,
    "backbone": dict.fromkeys(BACKBONE, 1.0),
}


class Calls:
    """Which stages were run, with their arguments, and what each does when it is."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.given: dict[str, dict[str, Any]] = {}
        self.positional: dict[str, tuple[Any, ...]] = {}
        self.act: dict[str, Callable[[Path], None]] = {}

    def stage(self, name: str, place: int):
        """A stand-in that finds its `Stage` at a place of its arguments."""

        def stand_in(*given: Any, **named: Any) -> dict[str, Any]:
            self.names.append(name)
            self.given[name], self.positional[name] = named, given
            folder = given[place].folder
            (folder / "work").write_text(name)
            self.act.get(name, lambda _: None)(folder)
            return {"made": name, **SUMMARY}

        return stand_in


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put a stand-in in the place of each stage and of the model."""
    found = Calls()
    monkeypatch.setattr(actions, "distill", found.stage("distill", 1))
    monkeypatch.setattr(actions, "train_medusa1", found.stage("medusa1", 1))
    monkeypatch.setattr(actions, "train_medusa2", found.stage("medusa2", 1))
    monkeypatch.setattr(actions, "train_draft", found.stage("draft", 1))
    monkeypatch.setattr(actions, "evaluate", found.stage("evaluate", 1))
    monkeypatch.setattr(actions, "load_backbone", lambda model: f"backbone {model.name}")
    return found


def smoke(*overrides: str) -> Config:
    """The smoke recipe: distill, medusa1, draft, evaluate."""
    return load("+recipe=smoke", *overrides)
