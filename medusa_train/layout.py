"""What makes each stage of a run: where it lies, its settings, and what it builds on."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from medusa_train.config.schema import Config
from medusa_train.config.training import OptimConfig
from medusa_train.data.prompts import prompts_by_split
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.evaluate.results_schema import BackboneChange
from medusa_train.track.manifest import (
    Stage,
    Trained,
    fingerprint,
    finished,
    made_in,
    refuse_incomplete,
    refuse_other_settings,
)

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "distill": (),
    "medusa1": ("distill",),
    "medusa2": ("distill", "medusa1"),
    "draft": ("distill",),
    "evaluate": ("distill", "medusa1", "medusa2", "draft"),
}

# What later stages read of a training's summary
_COST = ("tokens", "seconds")
_NUMBERS = {
    "medusa1": _COST,
    "medusa2": (
        *_COST,
        *(f"{name}_before" for name in _COST),
        *(f"backbone.{field.name}" for field in fields(BackboneChange)),
    ),
    "draft": _COST,
}

# What decides only how often something is shown or saved, or how many rows lie in memory at once,
# does not make another run
_CADENCE = (
    "log_every",
    "save_every",
    "save_minutes",
    "keep_checkpoints",
    "micro_batch_size",
)
_AFTERWARDS = ("merge",)  # can be done later too
_PLACE = ("device", "device_map", "compile")


class Layout:
    """The stages of a run, those of earlier runs in the same folders among them."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir

    def folder(self, stage: str) -> Path:
        """Where a stage lies: under `paths` if given there, else in the run's own folder."""
        given = getattr(self._config.paths, stage, None)
        return Path(given) if given is not None else self._run_dir / stage

    def stage(self, name: str) -> Stage:
        """A stage with all that makes it what it is."""
        return Stage(name=name, folder=self.folder(name), settings=self._settings(name))

    def has(self, stage: str) -> bool:
        """Whether a stage is part of this run, or was of an earlier one in the same folder."""
        return stage in self._config.stages or made_in(self.folder(stage)) is not None

    def rows_for(self, stage: str) -> Path:
        """The folder of the distilled rows that `stage` learns from.

        Raises:
            CheckpointError: if they are not finished.
        """
        folder = self.folder("distill")
        finished(folder, stage="distill", needed_by=stage)
        return folder

    def trained(self, stage: str, subfolder: str, needed_by: str) -> Trained:
        """What a finished training stage left for a later one.

        Raises:
            CheckpointError: if it is not finished, or its manifest lacks a number.
        """
        folder = self.folder(stage)
        summary = finished(folder, stage=stage, needed_by=needed_by)["summary"]
        refuse_incomplete(folder, summary, _NUMBERS[stage])
        return Trained(stage=stage, folder=folder / subfolder, summary=summary)

    def check_inputs(self) -> None:
        """Refuse what earlier runs left for this one, if it is not what this one would make.

        Raises:
            CheckpointError: for finished stages of other settings, or under `paths` of another
                model.
            ConfigError: if what is to be measured needs a draft model and there is none.
        """
        stages = self._config.stages
        needed = {need for name in stages for need in self._needs(name)}
        for name in sorted(needed - set(stages)):
            manifest, given = made_in(self.folder(name)), getattr(self._config.paths, name)
            if manifest is None:
                if given is not None:
                    raise CheckpointError(
                        f"paths.{name}={given} holds no finished stage: correct the path, or use "
                        "null for the run's own folder"
                    )
                continue
            if manifest["stage"] != name:
                raise CheckpointError(
                    f"{self.folder(name)} holds a {manifest['stage']} stage, expected {name}"
                )
            made, now = manifest["settings"], self._settings(name)
            if given is not None:
                made, now = {"model": made.get("model")}, {"model": now["model"]}
            refuse_other_settings(self.folder(name), made, now)
        wanted = "evaluate" in stages and "draft_adaptive" in self._config.evaluate.also
        if wanted and not self.has("draft"):
            raise ConfigError(
                f"evaluate.also has draft_adaptive, but {self.folder('draft')} holds no draft "
                "model: add draft to stages, give its folder as paths.draft, or leave "
                "draft_adaptive out"
            )

    def _settings(self, name: str) -> dict[str, Any]:
        config = self._config
        model = _without(asdict(config.model), _PLACE)
        shared = {"model": model, "seed": config.seed}
        match name:
            case "distill":
                settings = {"prompts": self._prompts, "distill": asdict(config.distill)}
                return {**shared, **settings}
            case "medusa1":
                settings = {"heads": asdict(config.heads), "medusa1": _training(config.medusa1)}
                return {**shared, **settings, "builds_on": self._builds_on(name)}
            case "medusa2":
                medusa2 = _without(_training(config.medusa2), _AFTERWARDS)
                settings = {"heads": asdict(config.heads), "medusa2": medusa2}
                return {**shared, **settings, "builds_on": self._builds_on(name)}
            case "draft":
                settings = {"draft": _training(config.draft)}
                return {**shared, **settings, "builds_on": self._builds_on(name)}
            case _:
                return {
                    **shared,
                    "prompts": self._prompts,
                    "decode": asdict(config.decode),
                    "evaluate": asdict(config.evaluate),
                    "builds_on": self._builds_on(name),
                }

    @cached_property
    def _prompts(self) -> dict[str, Any]:
        """Settings of the prompts, with what changes with any of them, whatever the file's name."""
        splits = prompts_by_split(self._config.prompts)
        texts = {name: [p.text for p in prompts] for name, prompts in splits.items()}
        return {**asdict(self._config.prompts), "digest": fingerprint(texts)}

    def _needs(self, stage: str) -> tuple[str, ...]:
        """The stages that one builds on, as this run is set."""
        fresh = stage == "medusa2" and self._config.medusa2.start == "fresh"
        return tuple(need for need in _NEEDS[stage] if not (fresh and need == "medusa1"))

    def _builds_on(self, stage: str) -> dict[str, str | None]:
        """Fingerprints of the stages before: as they are on disk, or as this run will make them."""
        found: dict[str, str | None] = {}
        for name in self._needs(stage):
            if name in self._config.stages:
                found[name] = self.stage(name).fingerprint
            else:
                manifest = made_in(self.folder(name))
                found[name] = manifest["fingerprint"] if manifest else None
        return found


def _training(section: Any) -> dict[str, Any]:
    """A training section without what does not make another run."""
    optim: OptimConfig = section.optim
    return {**asdict(section), "optim": _without(asdict(optim), _CADENCE)}


def _without(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}
