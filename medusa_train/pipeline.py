"""The stages of a run in order: which are finished, which resume, what does their work."""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from medusa_train.config.schema import Config
from medusa_train.data.batch import steps_per_epoch
from medusa_train.data.prompts import prompts_by_split
from medusa_train.distill.run import distill
from medusa_train.errors import CheckpointError
from medusa_train.evaluate.run import evaluate
from medusa_train.layout import Layout
from medusa_train.model.backbone import Backbone, choose_device, load_backbone
from medusa_train.parallel import World, current_world
from medusa_train.track.lock import locked
from medusa_train.track.manifest import Stage, read_manifest
from medusa_train.train.draft import DRAFT_FOLDER, train_draft
from medusa_train.train.engine import check_launch
from medusa_train.train.medusa1 import HEADS_FOLDER, train_medusa1
from medusa_train.train.medusa2 import (
    ADAPTER_FOLDER,
    MERGED_FOLDER,
    merge_adapter,
    train_medusa2,
)

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
    run.check_launch(device)
    run.layout.check_inputs()
    with ExitStack() as locks:
        todo = []
        for name in config.stages:
            stage = run.layout.stage(name)
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
        folder = run.layout.folder("evaluate")
        log.info("report: %s", folder / "report.md")
        log.info("results: %s", folder / "results.json")


class Run:
    """The functions that do the work of each stage, and what they share."""

    def __init__(self, config: Config, run_dir: Path, world: World) -> None:
        self.config, self.world = config, world
        self.layout = Layout(config, run_dir)

    @cached_property
    def backbone(self) -> Backbone:
        """Loaded once, by the first stage that needs it."""
        log.info("loading %s", self.config.model.name)
        return load_backbone(self.config.model)

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
            found = read_manifest(stage.folder)
            unmerged = self._wants_merging(stage)
            if found is None or found["status"] != "done" or unmerged:
                locks.enter_context(locked(stage.folder))
            return stage.open() and not unmerged

        return self.world.first(opened)

    @property
    def actions(self) -> Mapping[str, Callable[[Stage], dict[str, Any]]]:
        """What each stage does; gives what its manifest will say."""
        rows = self.layout.rows_for
        return {
            "distill": lambda stage: distill(self.config, stage, self.backbone, self.world),
            "medusa1": lambda stage: train_medusa1(
                self.config, stage, rows("medusa1"), self.backbone, self.world
            ),
            "medusa2": self._medusa2,
            "draft": lambda stage: train_draft(
                self.config, stage, rows("draft"), self.backbone, self.world
            ),
            "evaluate": self._evaluate,
        }

    def _medusa2(self, stage: Stage) -> dict[str, Any]:
        """Train, or only merge, with a backbone that no other stage gets to see afterwards."""
        found = read_manifest(stage.folder)
        if found is not None and found["status"] == "done":
            return self._merge(stage, found["summary"])
        start = None
        if self.config.medusa2.start == "medusa1":
            start = self.layout.trained("medusa1", HEADS_FOLDER, "medusa2")
        rows, backbone = self.layout.rows_for("medusa2"), self.backbone
        self.__dict__.pop("backbone")
        return train_medusa2(self.config, stage, rows, start, backbone, self.world)

    def _wants_merging(self, stage: Stage) -> bool:
        """Whether medusa2 has yet to leave the merged backbone that is asked for now."""
        wanted = stage.name == "medusa2" and self.config.medusa2.merge
        return wanted and not (stage.folder / MERGED_FOLDER).exists()

    def _merge(self, stage: Stage, summary: dict[str, Any]) -> dict[str, Any]:
        """Add the adapter of a finished medusa2 into the backbone; nothing is trained."""
        if not (stage.folder / ADAPTER_FOLDER).exists():
            raise CheckpointError(
                f"{stage.folder} has neither a {MERGED_FOLDER} nor an {ADAPTER_FOLDER} to make it "
                "from: put one back, or move or delete that folder to train again"
            )
        log.info("medusa2: trained already, without merging: its adapter is merged now")

        def merge() -> dict[str, Any]:
            backbone = self.backbone
            self.__dict__.pop("backbone")
            return merge_adapter(self.config, stage, backbone)

        return {**summary, **self.world.first(merge)}

    def _evaluate(self, stage: Stage) -> dict[str, Any]:
        """One process measures; the others wait, so that nothing disturbs the clocks."""
        layout = self.layout
        distilled = layout.rows_for("evaluate")
        joint = layout.has("medusa2")
        heads = layout.trained("medusa2" if joint else "medusa1", HEADS_FOLDER, "evaluate")
        draft = None
        if layout.has("draft"):
            draft = layout.trained("draft", DRAFT_FOLDER, "evaluate")
        else:
            log.warning("evaluate: no draft model in %s: none is compared", layout.folder("draft"))

        def measure() -> dict[str, Any]:
            backbone = self._merged() if joint else self.backbone
            return evaluate(
                self.config, stage, backbone, distilled=distilled, heads=heads, draft=draft
            )

        return self.world.first(measure)

    def _merged(self) -> Backbone:
        """The backbone that medusa2 has left."""
        self.__dict__.pop("backbone", None)
        folder = self.layout.folder("medusa2") / MERGED_FOLDER
        if not folder.exists():
            raise CheckpointError(
                f"evaluate measures the merged backbone of medusa2, and {folder.parent} has none: "
                "use stages=[medusa2,evaluate] with medusa2.merge=true, which merges its adapter"
            )
        log.info("loading %s", folder)
        return load_backbone(replace(self.config.model, name=str(folder), revision=None))
