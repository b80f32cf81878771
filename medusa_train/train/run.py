"""The stages `medusa1` and `draft`: build everything in reading order, train, save the result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.config.schema import Config
from medusa_train.config.training import OptimConfig
from medusa_train.data.hidden_states import choose_source
from medusa_train.data.rows import Row, read_split
from medusa_train.errors import TrainingError
from medusa_train.model.backbone import Backbone, choose_dtype
from medusa_train.model.draft import cut_draft, load_existing, save_draft
from medusa_train.model.heads import HeadsShape, MedusaHeads
from medusa_train.model.vocabulary import choose_token_map, coverage
from medusa_train.model.weights import save_heads
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage
from medusa_train.track.provenance import write_provenance
from medusa_train.track.sinks import open_sinks
from medusa_train.train.checkpoint import Checkpoints, TrainState, load_checkpoint
from medusa_train.train.engine import Engine, build_engine
from medusa_train.train.loop import Fit
from medusa_train.train.objectives import (
    DraftObjective,
    Medusa1Objective,
    Objective,
    Teacher,
)

HEADS_FOLDER = "heads"
DRAFT_FOLDER = "model"

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def train_medusa1(
    config: Config, stage: Stage, distill: Path, backbone: Backbone, world: World
) -> dict[str, Any]:
    """Train heads on the frozen backbone; they end up in `stage.folder / "heads"`.

    Args:
        config: the whole run.
        stage: opened and unfinished; an interrupted run goes on from its last checkpoint.
        distill: folder of the rows: `train` is learnt, `calibration` is held out.
        backbone: on its device.
        world: this process among the others; all of them call this.

    Returns:
        steps, tokens, seconds, parameters, bytes, coverage, and per head loss, top1 and top5 on
        the held-out rows; the same on every process.

    Raises:
        MedusaError: whatever a user can change; see the modules that are called.
    """
    rows, held_out = read_split(distill / "train"), read_split(distill / "calibration")
    token_map = _token_map(config.heads.vocab_size, rows, backbone)
    shape = HeadsShape(
        num_heads=config.heads.num_heads,
        num_layers=config.heads.num_layers,
        lm_head=config.heads.lm_head,
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        head_vocab_size=backbone.vocab_size if token_map is None else len(token_map),
    )
    lm_head: Tensor = backbone.lm_head.weight.detach()  # pyright: ignore
    heads = MedusaHeads(shape, token_map)
    heads.copy_lm_head(lm_head)
    heads.to(backbone.device)
    dtype = choose_dtype(config.medusa1.optim.compute_dtype, backbone.device)
    objective = Medusa1Objective(
        heads,
        choose_source(
            config.medusa1.hidden_states, [*rows, *held_out], backbone, num_heads=len(heads)
        ),
        shared_lm_head=lm_head if shape.lm_head == "shared" else None,
        head_weight=config.medusa1.head_weight,
        compute_dtype=dtype,
        teacher=make_teacher(backbone, heads, dtype) if config.medusa1.soft_targets else None,
    )
    state, engine = _train(
        config, config.medusa1.optim, stage, objective, rows, held_out, backbone, world
    )
    trained = engine.trained_state()
    folder = stage.folder / HEADS_FOLDER
    if world.is_main:
        whole = MedusaHeads(shape, token_map)
        _take(whole, trained, prefix="heads.")
        save_heads(folder, whole, base_model=backbone.name)
    world.wait()
    return _summary(state, trained, folder, rows, token_map)


def train_draft(
    config: Config, stage: Stage, distill: Path, backbone: Backbone, world: World
) -> dict[str, Any]:
    """Train a draft model cut from the target; it ends up in `stage.folder / "model"`.

    With `draft.model` set nothing is trained or written: that model is checked instead.
    Arguments, result and errors are those of `train_medusa1`, with one "head".
    """
    device, settings = backbone.device, config.draft
    if settings.model is not None:
        existing = load_existing(settings.model, backbone, config.model)
        parameters = sum(p.numel() for p in existing.decoder.parameters())
        nothing = {"steps": 0, "tokens": 0, "seconds": 0.0, "bytes": 0, "coverage": 1.0}
        unknown: dict[str, Any] = {"loss": [], "top1": [], "top5": []}
        return {"model": settings.model, "parameters": parameters, **nothing, **unknown}
    rows, held_out = read_split(distill / "train"), read_split(distill / "calibration")
    token_map = _token_map(settings.vocab_size, rows, backbone)
    objective = DraftObjective(
        cut_draft(backbone, settings.num_layers, token_map, device=device),
        compute_dtype=choose_dtype(settings.optim.compute_dtype, device),
        device=device,
    )
    state, engine = _train(
        config, settings.optim, stage, objective, rows, held_out, backbone, world
    )
    trained = engine.trained_state()
    folder = stage.folder / DRAFT_FOLDER
    if world.is_main:
        whole = cut_draft(backbone, settings.num_layers, token_map, device=torch.device("cpu"))
        _take(whole, trained, prefix="draft.")
        save_draft(folder, whole, tokenizer=backbone.tokenizer)
    world.wait()
    return _summary(state, trained, folder, rows, token_map)


def _train(
    config: Config,
    optim: OptimConfig,
    stage: Stage,
    objective: Objective,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    backbone: Backbone,
    world: World,
) -> tuple[TrainState, Engine]:
    """From the built objective to its trained weights, resuming where there is a checkpoint."""
    device = backbone.device
    frozen = _checksum(backbone.model)
    world.start(device)
    engine = build_engine(objective, optim, config.deepspeed, world=world, device=device)
    checkpoints = Checkpoints(
        folder=stage.folder / "checkpoints",
        world=world,
        engine_name=engine.name,
        fingerprint=stage.fingerprint,
        keep=optim.keep_checkpoints,
    )
    found = checkpoints.latest()
    if found is not None:
        load_checkpoint(engine, found[0])
    state = TrainState() if found is None else found[1]
    if world.is_main:
        write_provenance(stage.folder)
    sink = open_sinks(
        stage.folder,
        config.track,
        is_main=world.is_main,
        run_name=config.run_name,
        stage=stage.name,
        settings=stage.settings,
        start_step=state.step,
    )
    fit = Fit(
        label=stage.name,
        engine=engine,
        objective=objective,
        rows=rows,
        held_out=held_out,
        optim=optim,
        seed=config.seed,
        world=world,
        device=device,
        sink=sink,
        checkpoints=checkpoints,
        state=state,
    )
    try:
        state = fit.run()
    finally:
        sink.close()
    if _checksum(backbone.model) != frozen:
        raise TrainingError("the backbone changed during training, which must never happen")
    return state, engine


def make_teacher(backbone: Backbone, heads: MedusaHeads, dtype: torch.dtype) -> Teacher:
    """The backbone's own logits over the heads' vocabulary, with products in `dtype`."""
    rows: Tensor = backbone.lm_head.weight.detach()  # pyright: ignore
    rows = (rows if heads.token_map is None else rows[heads.token_map]).to(dtype)
    return lambda states: backbone.cap(states.to(dtype) @ rows.T)


def _token_map(size: int | None, rows: Sequence[Row], backbone: Backbone) -> Tensor | None:
    """The reduced vocabulary of the training answers, or None for the whole one."""
    if size is None:
        return None
    answers = (row.answer_ids for row in rows)
    return choose_token_map(answers, size=size, vocab_size=backbone.vocab_size)


def _take(module: nn.Module, trained: dict[str, Tensor], *, prefix: str) -> None:
    """Put trained weights into a freshly built module; none may be unknown to it."""
    named = {name.removeprefix(prefix): tensor for name, tensor in trained.items()}
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    if trainable != named.keys():
        odd = sorted(trainable ^ named.keys())[0]
        raise TrainingError(
            f"trained weights are not those of the result: {odd} is on one side only"
        )
    module.load_state_dict(named, strict=False)


def _checksum(model: nn.Module) -> int:
    """Changes with nearly any bit of any parameter; reads each once and copies none."""
    return sum(
        int(p.detach().view(_BITS[p.element_size()]).sum(dtype=torch.int64))
        for p in model.parameters()
    )


def _summary(
    state: TrainState,
    trained: dict[str, Tensor],
    folder: Path,
    rows: Sequence[Row],
    token_map: Tensor | None,
) -> dict[str, Any]:
    answers = (row.answer_ids for row in rows)
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "parameters": sum(tensor.numel() for tensor in trained.values()),
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "coverage": 1.0 if token_map is None else coverage(answers, token_map),
        **state.held_out,
    }
