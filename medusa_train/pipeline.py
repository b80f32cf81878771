"""The stages of a run in order: which are finished, which resume, what each builds on."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from medusa_train.config.schema import Config
from medusa_train.config.training import OptimConfig
from medusa_train.data.prompts import prompts_by_split
from medusa_train.distill.run import distill
from medusa_train.errors import CheckpointError, MedusaError
from medusa_train.evaluate.run import evaluate
from medusa_train.model.backbone import Backbone, choose_device, load_backbone
from medusa_train.parallel import World, current_world
from medusa_train.track.lock import locked
from medusa_train.track.manifest import (
    Stage,
    Trained,
    fingerprint,
    finished,
    made_in,
    read_manifest,
    refuse_other_settings,
)
from medusa_train.train.draft import DRAFT_FOLDER, train_draft
from medusa_train.train.engine import check_launch
from medusa_train.train.medusa1 import HEADS_FOLDER, train_medusa1
from medusa_train.train.medusa2 import MERGED_FOLDER, train_medusa2

log = logging.getLogger(__name__)

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "distill": (),
    "medusa1": ("distill",),
    "medusa2": ("distill", "medusa1"),
    "draft": ("distill",),
    "evaluate": ("distill", "medusa1", "medusa2", "draft"),
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
_PLACE = ("device", "device_map", "compile")


def run_stages(config: Config, run_dir: Path) -> None:
    """Run the stages of `config` that are not finished.

    All stage folders are opened before anything is loaded, so that a folder made by other
    settings, or in use by another command, is refused at once.

    Raises:
        MedusaError: whatever a user can do something about.
    """
    world = current_world()
    run = Run(config, run_dir, world)
    device = choose_device(config.model.device)
    # Else DeepSpeed, which transformers imports when it saves a model, guesses and says so
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if world.size > 1:
        world.start(device)
    run.check_launch()
    run.check_inputs()
    with ExitStack() as locks:
        todo = []
        for name in config.stages:
            stage = run.stage(name)
            if run.open(stage, locks):
                log.info("%s: finished already, in %s", name, stage.folder)
            else:
                todo.append(stage)
        for stage in todo:
            log.info("%s: begins, in %s", stage.name, stage.folder)
            summary = run.actions[stage.name](stage)
            if world.is_main:
                stage.finish(summary)
            world.wait()
            log.info("%s: done", stage.name)
    if "evaluate" in config.stages:
        log.info("report: %s", run.folder("evaluate") / "report.md")
        log.info("results: %s", run.folder("evaluate") / "results.json")


class Run:
    """A run's folders, the settings that make each stage, and the functions that do the work."""

    def __init__(self, config: Config, run_dir: Path, world: World) -> None:
        self.config, self.run_dir, self.world = config, run_dir, world

    @cached_property
    def backbone(self) -> Backbone:
        """Loaded once, by the first stage that needs it."""
        log.info("loading %s", self.config.model.name)
        return load_backbone(self.config.model)

    def folder(self, stage: str) -> Path:
        """Where a stage lies: under `paths` if given there, else in the run's own folder."""
        given = getattr(self.config.paths, stage, None)
        return Path(given) if given is not None else self.run_dir / stage

    def stage(self, name: str) -> Stage:
        """A stage with all that makes it what it is."""
        return Stage(name=name, folder=self.folder(name), settings=self._settings(name))

    def check_launch(self) -> None:
        """Refuse at once what training would refuse for the number of processes."""
        for name in ("medusa1", "medusa2", "draft"):
            if name in self.config.stages:
                optim = getattr(self.config, name).optim
                check_launch(optim, self.config.deepspeed, self.world)

    def check_inputs(self) -> None:
        """Refuse finished stages of other settings, or under `paths` of another model."""
        needed = {need for name in self.config.stages for need in self._needs(name)}
        for name in sorted(needed - set(self.config.stages)):
            manifest, given = made_in(self.folder(name)), getattr(self.config.paths, name)
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

    def open(self, stage: Stage, locks: ExitStack) -> bool:
        """Open a stage on the first process, locked unless it is finished; all hear what it found.

        Raises:
            MedusaError: on every process, what the first one refuses it for.
        """
        done, refusal = False, None
        if self.world.is_main:
            try:
                found = read_manifest(stage.folder)
                if found is None or found["status"] != "done":
                    locks.enter_context(locked(stage.folder))
                done = stage.open()
            except MedusaError as error:
                refusal = error
        done, refusal = self.world.gather((done, refusal))[0]
        if refusal is not None:
            raise refusal
        return done

    @property
    def actions(self) -> Mapping[str, Callable[[Stage], dict[str, Any]]]:
        """What each stage does; gives what its manifest will say."""
        return {
            "distill": lambda stage: distill(self.config, stage, self.backbone, self.world),
            "medusa1": lambda stage: train_medusa1(
                self.config, stage, self._rows_for("medusa1"), self.backbone, self.world
            ),
            "medusa2": self._medusa2,
            "draft": lambda stage: train_draft(
                self.config, stage, self._rows_for("draft"), self.backbone, self.world
            ),
            "evaluate": self._evaluate,
        }

    def _rows_for(self, stage: str) -> Path:
        """The folder of the distilled rows that `stage` learns from."""
        folder = self.folder("distill")
        finished(folder, stage="distill", needed_by=stage)
        return folder

    def _evaluate(self, stage: Stage) -> dict[str, Any]:
        """One process measures; the others wait, so that nothing disturbs the clocks."""
        distilled = self._rows_for("evaluate")
        joint = self._has("medusa2")
        heads = self._trained("medusa2" if joint else "medusa1", HEADS_FOLDER, "evaluate")
        draft = None
        if self._has("draft"):
            draft = self._trained("draft", DRAFT_FOLDER, "evaluate")
        else:
            log.warning("evaluate: no draft model in %s: none is compared", self.folder("draft"))
        if not self.world.is_main:
            return {}
        backbone = self._merged() if joint else self.backbone
        return evaluate(self.config, stage, backbone, distilled=distilled, heads=heads, draft=draft)

    def _medusa2(self, stage: Stage) -> dict[str, Any]:
        """Train with a backbone that no other stage gets to see afterwards."""
        start = None
        if self.config.medusa2.start == "medusa1":
            start = self._trained("medusa1", HEADS_FOLDER, "medusa2")
        rows, backbone = self._rows_for("medusa2"), self.backbone
        self.__dict__.pop("backbone")
        return train_medusa2(self.config, stage, rows, start, backbone, self.world)

    def _merged(self) -> Backbone:
        """The backbone that medusa2 has left."""
        self.__dict__.pop("backbone", None)
        folder = self.folder("medusa2") / MERGED_FOLDER
        if not folder.exists():
            raise CheckpointError(
                f"evaluate measures the merged backbone of medusa2, and {folder.parent} has none: "
                "run medusa2 with medusa2.merge=true"
            )
        log.info("loading %s", folder)
        return load_backbone(replace(self.config.model, name=str(folder), revision=None))

    def _has(self, stage: str) -> bool:
        """Whether a stage is part of this run, or was of an earlier one in the same folder."""
        return stage in self.config.stages or made_in(self.folder(stage)) is not None

    def _trained(self, stage: str, subfolder: str, needed_by: str) -> Trained:
        """What a finished training stage left for a later one."""
        folder = self.folder(stage)
        manifest = finished(folder, stage=stage, needed_by=needed_by)
        return Trained(stage=stage, folder=folder / subfolder, summary=manifest["summary"])

    def _settings(self, name: str) -> dict[str, Any]:
        config = self.config
        model = _without(asdict(config.model), _PLACE)
        shared = {"model": model, "seed": config.seed}
        match name:
            case "distill":
                return {
                    **shared,
                    "prompts": {**asdict(config.prompts), "digest": self._prompts_digest},
                    "distill": asdict(config.distill),
                }
            case "medusa1":
                settings = {"heads": asdict(config.heads), "medusa1": _training(config.medusa1)}
                return {**shared, **settings, "builds_on": self._builds_on(name)}
            case "medusa2":
                settings = {"heads": asdict(config.heads), "medusa2": _training(config.medusa2)}
                return {**shared, **settings, "builds_on": self._builds_on(name)}
            case "draft":
                settings = {"draft": _training(config.draft)}
                return {**shared, **settings, "builds_on": self._builds_on(name)}
            case _:
                return {
                    **shared,
                    "prompts": {**asdict(config.prompts), "digest": self._prompts_digest},
                    "evaluate": asdict(config.evaluate),
                    "builds_on": self._builds_on(name),
                }

    @cached_property
    def _prompts_digest(self) -> str:
        """Changes with any prompt or split, whatever the file is called."""
        splits = prompts_by_split(self.config.prompts)
        return fingerprint({name: [p.text for p in prompts] for name, prompts in splits.items()})

    def _needs(self, stage: str) -> tuple[str, ...]:
        """The stages that one builds on, as this run is set."""
        fresh = stage == "medusa2" and self.config.medusa2.start == "fresh"
        return tuple(need for need in _NEEDS[stage] if not (fresh and need == "medusa1"))

    def _builds_on(self, stage: str) -> dict[str, str | None]:
        """Fingerprints of the stages before: as they are on disk, or as this run will make them."""
        found: dict[str, str | None] = {}
        for name in self._needs(stage):
            manifest = None if name in self.config.stages else made_in(self.folder(name))
            if name in self.config.stages:
                found[name] = self.stage(name).fingerprint
            else:
                found[name] = manifest["fingerprint"] if manifest else None
        return found


def _training(section: Any) -> dict[str, Any]:
    """A training section without what does not make another run."""
    optim: OptimConfig = section.optim
    return {**asdict(section), "optim": _without(asdict(optim), _CADENCE)}


def _without(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}
