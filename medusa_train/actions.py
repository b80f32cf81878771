"""What does the work of each stage: distil, train, measure, with one backbone for all of them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from medusa_train.config.schema import Config
from medusa_train.distill.run import distill
from medusa_train.errors import CheckpointError
from medusa_train.evaluate.run import evaluate
from medusa_train.layout import Layout
from medusa_train.model.backbone import Backbone, load_backbone
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage, read_manifest
from medusa_train.track.places import ADAPTER_FOLDER, DRAFT_FOLDER, HEADS_FOLDER, MERGED_FOLDER
from medusa_train.train.draft import train_draft
from medusa_train.train.medusa1 import train_medusa1
from medusa_train.train.medusa2 import merge_adapter, train_medusa2

log = logging.getLogger(__name__)


class Actions:
    """The functions that do the work of each stage, and what they share."""

    def __init__(self, config: Config, layout: Layout, world: World) -> None:
        self.config, self.layout, self.world = config, layout, world

    @cached_property
    def backbone(self) -> Backbone:
        """Loaded once, by the first stage that needs it."""
        log.info("loading %s", self.config.model.name)
        return load_backbone(self.config.model)

    @property
    def by_stage(self) -> Mapping[str, Callable[[Stage], dict[str, Any]]]:
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
