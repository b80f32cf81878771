"""A tiny backbone, rows made by hand and the parts of a training run, for tests of training."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from medusa_train.config.load import load
from medusa_train.config.schema import Config
from medusa_train.config.training import OptimConfig
from medusa_train.data.hidden_states import online_source
from medusa_train.data.rows import Row, part_path, write_part
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads, untrained_heads
from medusa_train.model.tiny import tiny_llama
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage
from medusa_train.track.sinks import NullSink, Sink
from medusa_train.train.checkpoint import Checkpoints, TrainState, load_checkpoint
from medusa_train.train.engine import TorchEngine
from medusa_train.train.loop import Fit
from medusa_train.train.medusa1 import Medusa1Objective

ALONE = World(rank=0, size=1)
CPU = torch.device("cpu")
OVERRIDES = (
    "model=tiny",
    "track=disabled",
    "run_name=test",
    "heads.num_heads=3",
    "draft.num_layers=1",
    "medusa2.lora.rank=4",
    *(
        f"{stage}.optim.{setting}"
        for stage in ("medusa1", "medusa2", "draft")
        for setting in (
            "batch_size=4",
            "micro_batch_size=2",
            "lr=0.01",
            "log_every=1",
            "eval_every=2",
            "save_every=2",
            "compute_dtype=float32",
        )
    ),
)


def make_rows(count: int, *, seed: int = 0) -> list[Row]:
    """Rows of unequal lengths whose answers begin at different places."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(10, 30, (1,), generator=generator))
        prompt = int(torch.randint(2, 8, (1,), generator=generator))
        ids = torch.randint(0, 259, (length,), generator=generator).tolist()
        mask = [t >= prompt for t in range(length)]
        rows.append(
            Row(
                id=f"row{i}",
                kind="",
                prompt="",
                answer="",
                ids=ids,
                mask=mask,
                finish_reason="stop",
            )
        )
    return rows


def write_rows(folder: Path, *, train: int = 8, calibration: int = 3) -> Path:
    """A `distill` folder without stored hidden states."""
    write_part(part_path(folder / "train", 0), make_rows(train), None)
    write_part(part_path(folder / "calibration", 0), make_rows(calibration, seed=1), None)
    return folder


def make_backbone(**settings: object) -> Backbone:
    """Two layers, hidden size 16, 320 rows in the LM head."""
    model, tokenizer = tiny_llama(**{"hidden_size": 16, **settings})  # pyright: ignore
    return Backbone(model, tokenizer, name="tiny")


def make_config(*overrides: str) -> Config:
    """Two epochs of two steps on eight rows, in float32."""
    return load(*OVERRIDES, *overrides)


def make_stage(folder: Path, name: str = "medusa1") -> Stage:
    """An opened stage."""
    stage = Stage(name=name, folder=folder / name, settings={"made": "for a test"})
    stage.open()
    return stage


def make_heads(
    backbone: Backbone,
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    lm_head: str = "own",
    token_map: torch.Tensor | None = None,
) -> MedusaHeads:
    """Untrained heads that equal the LM head."""
    return untrained_heads(
        backbone.lm_head.weight,  # pyright: ignore
        num_heads=num_heads,
        num_layers=num_layers,
        lm_head=lm_head,  # pyright: ignore
        token_map=token_map,
    )


@dataclass
class MemorySink(NullSink):
    """Keeps (step, metrics)."""

    lines: list[tuple[int, dict[str, float]]]

    def log(self, metrics, step):
        self.lines.append((step, dict(metrics)))


def make_fit(
    folder: Path, *, rows: list[Row] | None = None, sink: Sink | None = None, **optim: object
) -> Fit:
    """Three heads on one process with plain torch, resumed from `folder` if it holds anything."""
    backbone = make_backbone()
    settings: OptimConfig = replace(make_config().medusa1.optim, **optim)  # pyright: ignore
    objective = Medusa1Objective(
        make_heads(backbone),
        online_source(backbone.hidden_states, CPU),
        shared_lm_head=None,
        head_weight=0.8,
        compute_dtype=torch.float32,
    )
    engine = TorchEngine(objective, settings)
    checkpoints = Checkpoints(
        folder=folder, world=ALONE, engine_name=engine.name, settings={}, keep=2
    )
    found = checkpoints.latest()
    if found:
        load_checkpoint(engine, found[0])
    return Fit(
        label="test",
        engine=engine,
        objective=objective,
        rows=rows or make_rows(8),
        held_out=make_rows(3, seed=1),
        optim=settings,
        seed=0,
        world=ALONE,
        device=CPU,
        sink=sink or NullSink(),
        checkpoints=checkpoints,
        state=found[1] if found else TrainState(),
    )


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Over all tensors of two equal sets of names."""
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)
