"""What every training stage does: build the engine, resume, run the loop, say what came of it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.config.schema import Config
from medusa_train.config.training import OptimConfig
from medusa_train.data.rows import Row, read_split
from medusa_train.errors import TrainingError
from medusa_train.model.backbone import Backbone
from medusa_train.model.vocabulary import choose_token_map, coverage
from medusa_train.parallel import World
from medusa_train.track.manifest import Stage
from medusa_train.track.provenance import write_provenance
from medusa_train.track.sinks import open_sinks
from medusa_train.train.checkpoint import Checkpoints, TrainState, load_checkpoint
from medusa_train.train.engine import Engine, build_engine
from medusa_train.train.loop import Fit
from medusa_train.train.objective import Gather, Objective, Teacher

# Writes what a training came to, from the engine and the whole trained weights; every process calls
# it, the first one writes
Save = Callable[[Engine, dict[str, Tensor]], None]

log = logging.getLogger(__name__)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read_rows(distill: Path, backbone: Backbone) -> tuple[list[Row], list[Row]]:
    """The rows to learn and those that are held out.

    Raises:
        DataError: if there are none that `backbone` can read, or one is malformed.
    """
    limits = {"vocab_size": backbone.vocab_size, "context": backbone.max_positions}
    return read_split(distill / "train", **limits), read_split(distill / "calibration", **limits)


def train_objective(
    config: Config,
    optim: OptimConfig,
    stage: Stage,
    objective: Objective,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    *,
    distill: Path,
    backbone: Backbone,
    world: World,
    save: Save,
    results: Mapping[str, Path],
    token_map: Tensor | None,
) -> tuple[TrainState, dict[str, Any]]:
    """From the built objective to its saved result, resuming where there is a checkpoint.

    Args:
        config: the whole run.
        optim: of the stage.
        stage: opened and unfinished.
        objective: on its device.
        rows: to learn.
        held_out: to measure.
        distill: the folder that both were read from.
        backbone: whose parameters without a gradient must not change; on the device of everything.
        world: this process among the others.
        save: writes the result, while metrics can still be sent.
        results: each folder of it that others can build on, by what it holds; the first one is that
            of the trained weights.
        token_map: the reduced vocabulary, [V]; None for the whole one.

    Returns:
        The last state, and what a manifest says of a training: steps, tokens, seconds, parameters,
        bytes, coverage of the answers by the vocabulary, and the last held-out figures.

    Raises:
        TrainingError: if a frozen weight is not bit for bit what it was before.
    """
    device = backbone.device
    before = _checksum(backbone.model, lambda module: nullcontext())
    world.start(device)
    engine = build_engine(objective, optim, config.deepspeed, world=world, device=device)
    checkpoints = Checkpoints(
        folder=stage.folder / "checkpoints",
        world=world,
        engine_name=engine.name,
        settings=stage.settings,
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
        state = _best(checkpoints, engine, fit.run())
        if _checksum(backbone.model, engine.gathered) != before:
            raise TrainingError("the backbone changed during training, which must never happen")
        trained = engine.trained_state()
        save(engine, trained)
        world.wait()
        for name, folder in results.items():
            sink.artifact(name, "model", folder)
        sink.artifact("rows", "dataset", distill, "*/part-*.parquet")
    finally:
        sink.close()
    parameters = sum(tensor.numel() for tensor in trained.values())
    folder = next(iter(results.values()))
    answers = (row.answer_ids for row in rows)
    return state, {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "parameters": parameters,
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "coverage": 1.0 if token_map is None else coverage(answers, token_map),
        **state.held_out,
    }


def _best(checkpoints: Checkpoints, engine: Engine, state: TrainState) -> TrainState:
    """Put the best weights into the engine; the state with what was measured of them."""
    found = checkpoints.best(state)
    if found is None:
        return state
    folder, best = found
    load_checkpoint(engine, folder)
    log.info(
        "step %d was the best on the held-out rows (%.4f): its weights are the result",
        best.step,
        state.best_score,
    )
    return replace(state, held_out=best.held_out)


def make_teacher(backbone: Backbone, token_map: Tensor | None, dtype: torch.dtype) -> Teacher:
    """The backbone's own logits over a vocabulary, with products in `dtype`.

    Args:
        backbone: its LM head is read as it is now.
        token_map: backbone ids of a reduced vocabulary, [V]; None for the whole one.
        dtype: of the products and of the logits.
    """
    rows: Tensor = backbone.lm_head.weight.detach()  # pyright: ignore
    rows = (rows if token_map is None else rows[token_map]).to(dtype)
    return lambda states: backbone.cap(states.to(dtype) @ rows.T)


def choose_vocabulary(size: int | None, rows: Sequence[Row], backbone: Backbone) -> Tensor | None:
    """The reduced vocabulary of the training answers, or None for the whole one."""
    if size is None:
        return None
    answers = (row.answer_ids for row in rows)
    return choose_token_map(answers, size=size, vocab_size=backbone.vocab_size)


def take(module: nn.Module, trained: dict[str, Tensor], *, prefix: str) -> None:
    """Put trained weights into a freshly built module; none may be unknown to it."""
    named = {name.removeprefix(prefix): tensor for name, tensor in trained.items()}
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    if trainable != named.keys():
        odd = sorted(trainable ^ named.keys())[0]
        raise TrainingError(
            f"trained weights are not those of the result: {odd} is on one side only"
        )
    module.load_state_dict(named, strict=False)


def _checksum(model: nn.Module, gather: Gather) -> int:
    """Changes with nearly any bit of any frozen parameter, and with the order of its rows."""
    total = 0
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if not p.requires_grad]
        if not own:
            continue
        with gather(nn.ParameterList(own)):
            for p in own:
                bits = p.detach().view(_BITS[p.element_size()])
                rows = bits.reshape(len(bits) if bits.dim() else 1, -1).sum(1, dtype=torch.int64)
                places = torch.arange(1, len(rows) + 1, device=rows.device)
                total += int((rows * places).sum())
    return total
