"""The stages of a run in order: which are finished, which resume, who does their work."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from medusa_train.config.schema import Config
from medusa_train.data.batch import steps_per_epoch
from medusa_train.data.prompts import prompts_by_split
from medusa_train.layout import Layout
from medusa_train.model.device import choose_device
from medusa_train.model.source import resolve
from medusa_train.parallel import World, current_world
from medusa_train.track.lock import locked
from medusa_train.track.manifest import Stage, is_done
from medusa_train.track.places import MERGED_FOLDER
from medusa_train.track.sinks import check_login
from medusa_train.train.engine import check_launch

log = logging.getLogger(__name__)


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
    run.check_models()
    run.check_launch(device)
    run.layout.check_inputs()
    run.check_tracking()
    with ExitStack() as locks:
        todo = []
        for name in config.stages:
            stage = run.layout.stage(name)
            if run.open(stage, locks):
                log.info("%s: finished already, in %s", name, stage.folder)
            else:
                todo.append(stage)
        if todo:
            run.work(todo)
    if "evaluate" in config.stages:
        folder = run.layout.folder("evaluate")
        log.info("report: %s", folder / "report.md")
        log.info("results: %s", folder / "results.json")


class Run:
    """What a run may do, and what of it is done already."""

    def __init__(self, config: Config, run_dir: Path, world: World) -> None:
        self.config, self.world = config, world
        self.layout = Layout(config, run_dir)

    def check_models(self) -> None:
        """Refuse at once a folder, file or package that is not there, if it will be loaded.

        Raises:
            ModelError: naming the setting.
        """
        config, joint = self.config, self.layout.has("medusa2")
        todo = {name for name in config.stages if not is_done(self.layout.folder(name))}
        if todo - ({"evaluate"} if joint else set()):  # that measures the model of medusa2
            resolve(config.model.name)
        if config.draft.model is not None and "draft" in todo:
            resolve(config.draft.model, setting="draft.model")

    def check_tracking(self) -> None:
        """Refuse at once W&B without a login, if there is something left to track.

        Raises:
            ConfigError: on every process.
        """
        tracked = (self.layout.folder(name) for name in self.config.stages if name != "distill")
        if not all(map(is_done, tracked)):
            self.world.first(lambda: check_login(self.config.track))

    def check_launch(self, device: torch.device) -> None:
        """Refuse at once what training would refuse without looking at a model."""
        config, prompts = self.config, prompts_by_split(self.config.prompts)
        for name in ("medusa1", "medusa2", "draft"):
            if name in config.stages and not (name == "draft" and config.draft.model):
                optim = getattr(config, name).optim
                check_launch(optim, config.deepspeed, self.world, device)
                if "distill" in config.stages:  # a row of each prompt
                    steps_per_epoch(len(prompts["train"]), optim.batch_size)

    def open(self, stage: Stage, locks: ExitStack) -> bool:
        """Open a stage; whether nothing is left to do for it. It is locked unless it is finished.

        Raises:
            MedusaError: what it is refused for.
        """

        def opened() -> bool:
            unmerged = self._wants_merging(stage)
            if unmerged or not is_done(stage.folder):
                locks.enter_context(locked(stage.folder))
            return stage.open() and not unmerged

        return self.world.first(opened)

    def work(self, stages: Sequence[Stage]) -> None:
        """Do what is left to do, in order."""
        # transformers is slow to import: nothing of it is needed to refuse, or to find all done
        from medusa_train.actions import Actions

        actions = Actions(self.config, self.layout, self.world)
        for stage in stages:
            log.info("%s: begins, in %s", stage.name, stage.folder)
            summary = actions.by_stage[stage.name](stage)
            if self.world.is_main:
                stage.finish(summary)
            self.world.wait()
            log.info("%s: done", stage.name)

    def _wants_merging(self, stage: Stage) -> bool:
        """Whether medusa2 has yet to leave the merged backbone that is asked for now."""
        wanted = stage.name == "medusa2" and self.config.medusa2.merge
        return wanted and not (stage.folder / MERGED_FOLDER).exists()
