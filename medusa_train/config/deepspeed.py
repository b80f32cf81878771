"""What DeepSpeed is told: our own settings, or a JSON file of the user's that agrees with the run.

A file keeps every key that is DeepSpeed's business alone. What the run itself decides may be absent
or `auto` there, or the same; all that differs is reported at once, and nothing is overridden.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from medusa_train.config.training import DeepSpeedConfig, OptimConfig
from medusa_train.errors import ConfigError

AUTO = "auto"

# Numbers in a tensor up to which ZeRO-3 keeps it whole: biases, never a block's or LM head's matrix
KEPT_WHOLE = 10_000
Section = dict[str, Any]

_KINDS = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    list: "list",
    dict: "section",
    type(None): "null",
}
# Keys that DeepSpeed still reads, with a warning, and what took their place
_OUTDATED = {
    "cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": '"pin_memory" in "offload_optimizer"',
    "stage3_gather_fp16_weights_on_model_save": '"stage3_gather_16bit_weights_on_model_save"',
}
_IN_FLOAT32 = "weights and optimiser are float32 here; optim.compute_dtype is that of the products"


def deepspeed_settings(
    config: DeepSpeedConfig, optim: OptimConfig, accumulation: int
) -> dict[str, Any]:
    """DeepSpeed's own configuration, nothing in it left to guess.

    Args:
        config: which ZeRO stage, or whose file.
        optim: of the stage.
        accumulation: micro-batches of one process in a step.

    Raises:
        ConfigError: if the file cannot be read, or does not agree with the run.
    """
    run = {
        "train_batch_size": optim.batch_size,
        "train_micro_batch_size_per_gpu": optim.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": optim.grad_clip,
    }
    if config.config is None:
        return {**run, **_own(config)}
    path = Path(config.config)
    file = _read(path)
    conflicts = list(_conflicts(file, run, optim))
    if conflicts:
        listed = "\n".join(f"  - {line}" for line in conflicts)
        raise ConfigError(
            f"{path} does not agree with the run, {len(conflicts)} key(s) to change:\n{listed}"
        )
    return _filled(file, run)


def _own(config: DeepSpeedConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "stage3_param_persistence_threshold": KEPT_WHOLE,
    }
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if config.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return _with_defaults({"zero_optimization": zero})


def _filled(file: dict[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the run's values in; what else is `auto` is left to DeepSpeed's defaults."""
    kept = {key: value for key, value in file.items() if key not in ("optimizer", "scheduler")}
    return _with_defaults({**_without_auto(kept), **run})


def _with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with what every run wants, where the file says nothing."""
    settings.setdefault("steps_per_print", 10**9)  # the loop logs
    if "offload_optimizer" in settings["zero_optimization"]:
        # DeepSpeed's own CPU optimiser would have to be compiled
        settings.setdefault("zero_force_ds_cpu_optimizer", False)
    return settings


def _conflicts(file: dict[str, Any], run: Mapping[str, Any], optim: OptimConfig) -> Iterator[str]:
    """A line for each key that says something else than the run does."""
    sources = {
        "train_batch_size": "optim.batch_size",
        "train_micro_batch_size_per_gpu": "optim.micro_batch_size",
        "gradient_accumulation_steps": "optim.batch_size / (optim.micro_batch_size x processes)",
        "gradient_clipping": "optim.grad_clip",
    }
    for key, expected in run.items():
        yield from _differs(file, key, expected, f"the run's is {sources[key]}")
    for section in ("fp16", "bf16", "bfloat16", "torch_autocast", "amp"):
        yield from _differs(file, f"{section}.enabled", False, _IN_FLOAT32)
    yield from _differs(file, "gradient_allreduce_op", "mean", "else the loss is scaled twice")
    if _at(file, "sequence_parallel_size", AUTO) != AUTO:
        yield "sequence_parallel_size: here every process has rows of its own: remove it"
    yield from _optimizer_conflicts(file, optim)
    for key, _ in _leaves(file.get("scheduler", AUTO), "scheduler"):
        yield f"{key}: the run makes the schedule, from optim.schedule: remove it"
    yield from _zero_conflicts(file)


def _optimizer_conflicts(file: dict[str, Any], optim: OptimConfig) -> Iterator[str]:
    known = {
        "optimizer.type": "AdamW",
        "optimizer.params.lr": optim.lr,
        "optimizer.params.betas": list(optim.betas),
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": optim.weight_decay,
    }
    for key, _ in _leaves(file.get("optimizer", AUTO), "optimizer"):
        if key in known:
            yield from _differs(file, key, known[key], "the run makes the optimiser, from optim")
        else:
            yield f"{key}: the run makes the optimiser, from optim: remove it"


def _zero_conflicts(file: dict[str, Any]) -> Iterator[str]:
    zero = file.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield f"zero_optimization: {_shown(zero)} in the file, expected a section with a stage"
        return
    for key, new in _OUTDATED.items():
        if key in zero:
            yield f"zero_optimization.{key}: outdated: write {new} instead"
    if _at(file, "zero_optimization.compute_grad_norm", True) is not True:
        yield "zero_optimization.compute_grad_norm: it guards against a bad gradient: remove it"
    stage = _at(file, "zero_optimization.stage", None)
    if type(stage) is not int or stage not in (1, 2, 3):
        yield (
            f"zero_optimization.stage: {_shown(stage)} in the file, expected 1, 2 or 3: stage 0 "
            "has no guard against a gradient that is not finite"
        )
    for part in ("offload_optimizer", "offload_param"):
        device = _at(file, f"zero_optimization.{part}.device", "none")
        if device not in ("cpu", "none"):
            yield (
                f"zero_optimization.{part}.device: {_shown(device)} in the file, expected "
                "'cpu': checkpoints are written from memory"
            )
    if _at(file, "zero_optimization.offload_optimizer", None) is not None:
        why = "the optimiser is torch's, DeepSpeed's would have to be compiled"
        yield from _differs(file, "zero_force_ds_cpu_optimizer", False, why)


def _differs(file: dict[str, Any], key: str, expected: Any, why: str) -> Iterator[str]:
    found = _at(file, key, AUTO)
    if not _same(found, expected):
        yield (
            f"{key}: {_shown(found)} in the file, {_shown(expected)} in the run ({why}): "
            f"write {json.dumps(expected)} or {json.dumps(AUTO)}"
        )


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, str) and found == AUTO:
        return True
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in (found, expected)
    )
    return found == expected and (numbers or type(found) is type(expected))


def _shown(value: Any) -> str:
    """As JSON has it, with its kind; text in quotes of its own, so that it is seen to be text."""
    if value is None:
        return "nothing"
    written = repr(value) if isinstance(value, str) else json.dumps(value)
    return f"{written} ({_KINDS[type(value)]})"


def _at(file: Any, key: str, default: Any) -> Any:
    """The value under a dotted key; what stands in the place of a section is given as it is."""
    value: Any = file
    for part in key.split("."):
        if not isinstance(value, dict):
            return value
        section = cast(Section, value)
        if part not in section:
            return default
        value = section[part]
    return value


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value that is not `auto`, with its dotted key."""
    if isinstance(value, dict):
        for name, inner in cast(Section, value).items():
            yield from _leaves(inner, f"{key}.{name}")
    elif value != AUTO:
        yield key, value


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        section = cast(Section, value)
        return {name: _without_auto(inner) for name, inner in section.items() if inner != AUTO}
    return copy.deepcopy(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise ConfigError(
            f"deepspeed.config={path} cannot be read ({error.strerror}): give the path of a "
            "DeepSpeed JSON file, or use deepspeed=zero1"
        ) from None
    except ValueError as error:
        raise ConfigError(f"deepspeed.config={path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"deepspeed.config={path} holds {_shown(found)}, expected a section")
    return cast(Section, found)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} stands twice")
        found[key] = value
    return found
