"""The stage `medusa2`: heads and backbone together."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.schema import Config
from medusa_train.data.hidden_states import choose_source
from medusa_train.errors import ConfigError
from medusa_train.model.backbone import Backbone
from medusa_train.model.device import choose_dtype, dtype_name
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.student import Student
from medusa_train.model.weights import load_heads, save_heads
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage, Trained
from medusa_train.track.places import ADAPTER_FOLDER, HEADS_FOLDER, MERGED_FOLDER
from medusa_train.train.checkpoint import TrainState
from medusa_train.train.engine import Engine
from medusa_train.train.joint import Medusa2Objective
from medusa_train.train.medusa1 import fresh_heads
from medusa_train.train.run import make_teacher, read_rows, train_objective


def train_medusa2(
    config: Config,
    stage: Stage,
    distill: Path,
    start: Trained | None,
    backbone: Backbone,
    world: World,
) -> dict[str, Any]:
    """Train heads and backbone together.

    They end up in `stage.folder`: `heads`, with a LoRA `adapter`, and with `medusa2.merge` the
    backbone that they belong to as `model`.

    Args:
        config: the whole run.
        stage: opened and unfinished; an interrupted run goes on from its last checkpoint.
        distill: folder of the rows: `train` is learnt, `calibration` is held out.
        start: the heads to go on with; None for fresh ones.
        backbone: on its device; a LoRA is put onto it, so it is of no other use afterwards.
        world: this process among the others; all of them call this.

    Returns:
        What `train_objective` says of it, and what has become of the backbone on the held-out rows:
        perplexity before and after, KL to the original and greedy agreement.

    Raises:
        MedusaError: whatever a user can change; see the modules that are called.
    """
    settings, device = config.medusa2, backbone.device
    rows, held_out = read_rows(distill, backbone)
    if start is None:
        heads = fresh_heads(config, rows, backbone)
    else:
        heads = load_heads(start.folder, dtype=torch.float32, device=device, backbone=backbone)
        _refuse_other_heads(config, heads, start.folder)
        heads.requires_grad_(True)
    dtype = choose_dtype(settings.optim.compute_dtype, device)
    # Before a LoRA is put onto the LM head
    teacher = make_teacher(backbone, None, dtype)
    heads_teacher = (
        make_teacher(backbone, heads.token_map, dtype) if settings.soft_targets else None
    )
    lora = settings.lora if settings.backbone == "lora" else None
    student = Student(backbone, lora, seed=config.seed)
    source = choose_source(
        settings.hidden_states,
        [*rows, *held_out],
        backbone.hidden_states if lora is None else partial(student.original_states, dtype=dtype),
        num_heads=len(heads),
        device=device,
        stage="medusa2",
    )
    objective = Medusa2Objective(
        student,
        heads,
        source,
        teacher,
        settings,
        compute_dtype=dtype,
        heads_teacher=heads_teacher,
    )
    results = {"heads": stage.folder / HEADS_FOLDER}
    if lora is not None:
        results["adapter"] = stage.folder / ADAPTER_FOLDER

    def save(engine: Engine, _: dict[str, Tensor]) -> None:
        with engine.gathered(objective):
            if world.is_main:
                merged = stage.folder / MERGED_FOLDER
                base = str(merged) if settings.merge else backbone.name
                save_heads(results["heads"], heads, base_model=base)
                if lora is not None:
                    student.save_adapter(results["adapter"])
                if settings.merge:
                    student.save_merged(merged, backbone.tokenizer)

    state, summary = train_objective(
        config,
        settings.optim,
        stage,
        objective,
        rows,
        held_out,
        distill=distill,
        backbone=backbone,
        world=world,
        save=save,
        results=results,
        token_map=heads.token_map,
    )
    return {
        **summary,
        "tokens_before": 0 if start is None else start.summary["tokens"],
        "seconds_before": 0 if start is None else start.summary["seconds"],
        "merged_dtype": dtype_name(student.dtype) if settings.merge else None,
        "backbone": _backbone_report(state),
    }


def merge_adapter(config: Config, stage: Stage, backbone: Backbone) -> dict[str, Any]:
    """Add the LoRA of a finished stage into the backbone, as `medusa2.merge` does after training.

    Args:
        config: the whole run.
        stage: finished, without a merged backbone.
        backbone: the original; of no other use afterwards.

    Returns:
        What changes in the summary of the stage.

    Raises:
        ModelError: if the LoRA or the heads cannot be read.
    """
    student = Student(backbone, config.medusa2.lora, seed=config.seed)
    student.load_adapter(stage.folder / ADAPTER_FOLDER)
    folder, merged = stage.folder / HEADS_FOLDER, stage.folder / MERGED_FOLDER
    heads = load_heads(folder, dtype=torch.float32, device=backbone.device, backbone=backbone)
    save_heads(folder, heads, base_model=str(merged))
    student.save_merged(merged, backbone.tokenizer)
    return {"merged_dtype": dtype_name(student.dtype)}


def _refuse_other_heads(config: Config, heads: MedusaHeads, folder: Path) -> None:
    shape, wanted = heads.shape, config.heads
    reduced = shape.head_vocab_size if shape.lm_head == "reduced" else None
    # A wish for more ids than there are gives all of them
    size = None if wanted.vocab_size is None else min(wanted.vocab_size, shape.vocab_size)
    for name, found, expected in (
        ("num_heads", shape.num_heads, wanted.num_heads),
        ("num_layers", shape.num_layers, wanted.num_layers),
        ("lm_head", shape.lm_head, wanted.lm_head),
        ("vocab_size", reduced, size),
    ):
        if found != expected:
            raise ConfigError(
                f"medusa2 starts from the heads in {folder}, which have {name}={found}, but "
                f"heads.{name}={expected}: set heads.{name}={found}, or medusa2.start=fresh"
            )


def _backbone_report(state: TrainState) -> dict[str, float]:
    """What has become of the backbone, on held-out answers of the original model."""
    before, after = state.first_held_out, state.held_out
    return {
        "perplexity_before": math.exp(before["loss"][0]),
        "perplexity": math.exp(after["loss"][0]),
        "kl": after["kl"][0],
        "agreement_before": before["agreement"][0],
        "agreement": after["agreement"][0],
    }
