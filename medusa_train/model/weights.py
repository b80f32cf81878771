"""Heads on disk, in the layout of the official Medusa releases.

A folder with `config.json` and `medusa_lm_head.safetensors` (float32). Tensors are named as there:
`{k}.{l}.linear.weight` and `.bias` for block l of head k, `{k}.{L}.weight` for its LM head (L
blocks come before it; a shared LM head is not stored), and `token_map` for a reduced vocabulary.
Servers take any further key of the config with "num" and "heads" or "layers" in it for the
number of heads, so what this package adds lies in a nested object.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_train.errors import ModelError
from medusa_train.model.heads import HeadsShape, MedusaHeads
from medusa_train.model.language_model import LanguageModel
from medusa_train.track.manifest import replace_folder, write_json
from medusa_train.track.places import HEADS_CONFIG as CONFIG
from medusa_train.track.places import HEADS_WEIGHTS as WEIGHTS

TOKEN_MAP = "token_map"
VERSION = 1


def save_heads(folder: Path, heads: MedusaHeads, *, base_model: str) -> None:
    """Write heads as float32; the folder appears whole, after it was read back.

    Args:
        folder: replaced if it exists.
        heads: whole weights, on any device.
        base_model: name of the backbone, for people and servers.

    Raises:
        ModelError: if a weight is not finite, or what is read back differs.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = _tensors(heads)
    save_file(tensors, part / WEIGHTS)
    write_json(part / CONFIG, _config(heads.shape, base_model))
    stored = _read_tensors(part)
    _check_tensors(part, stored, heads.shape)
    for name, tensor in tensors.items():
        if not torch.equal(stored[name], tensor):
            raise ModelError(f"{part / WEIGHTS}: {name} reads back differently; is the disk full?")
    replace_folder(part, folder)


def load_heads(
    folder: Path, *, dtype: torch.dtype, device: torch.device, backbone: LanguageModel
) -> MedusaHeads:
    """Heads for decoding: frozen, in eval mode, in `dtype` on `device`.

    Raises:
        ModelError: if anything is missing, unknown, of another shape, not finite, or made for a
            backbone of other sizes; what was found and expected is named.
    """
    shape = read_shape(folder)
    for name, found, expected in (
        ("hidden_size", shape.hidden_size, backbone.hidden_size),
        ("vocab_size", shape.vocab_size, backbone.vocab_size),
    ):
        if found != expected:
            raise ModelError(
                f"{folder}: heads of {name}={found} do not fit a backbone of {name}={expected}; "
                "use the model they were trained on"
            )
    stored = _read_tensors(folder)
    _check_tensors(folder, stored, shape)
    heads = MedusaHeads(shape, stored.get(TOKEN_MAP))
    heads.load_state_dict({_own_name(name, shape): tensor for name, tensor in stored.items()})
    return heads.to(device=device, dtype=dtype).eval().requires_grad_(False)


def read_shape(folder: Path) -> HeadsShape:
    """Sizes of the heads in a folder.

    Raises:
        ModelError: if its config is missing, incomplete or contradictory.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
        extra = config["medusa_train"]
        shape = HeadsShape(
            num_heads=config["medusa_num_heads"],
            num_layers=config["medusa_num_layers"],
            lm_head=extra["lm_head"],
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            head_vocab_size=extra["head_vocab_size"],
        )
        version = extra["version"]
    except OSError as error:
        raise ModelError(f"no heads in {folder}: {path} cannot be read ({error})") from None
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is not a config of heads ({error})") from None
    except KeyError as error:
        raise ModelError(
            f"{path} has no key {error}; expected one written by medusa_train"
        ) from None
    if version != VERSION:
        raise ModelError(f"{path} is of version {version}, expected {VERSION}; train again")
    if shape.lm_head not in ("own", "shared", "reduced"):
        raise ModelError(f"{path}: lm_head={shape.lm_head!r}, expected own, shared or reduced")
    return shape


def _config(shape: HeadsShape, base_model: str) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": base_model,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": shape.lm_head == "shared",
        "medusa_train": {
            "version": VERSION,
            "lm_head": shape.lm_head,
            "head_vocab_size": shape.head_vocab_size,
        },
    }


def _tensors(heads: MedusaHeads) -> dict[str, Tensor]:
    """All tensors under their official names, on the CPU, none sharing memory."""
    state = heads.state_dict()
    tensors = {}
    for name in _expected(heads.shape):
        tensor = state[_own_name(name, heads.shape)].to("cpu", copy=True)
        tensors[name] = (tensor if name == TOKEN_MAP else tensor.float()).contiguous()
    return tensors


def _own_name(official: str, shape: HeadsShape) -> str:
    """Name in `MedusaHeads.state_dict()` of an official name."""
    if official == TOKEN_MAP:
        return official
    head, place, rest = official.split(".", 2)
    if int(place) == shape.num_layers:
        return f"heads.{head}.lm_head"
    return f"heads.{head}.layers.{place}.{rest}"


def _expected(shape: HeadsShape) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the heads consist of."""
    size = shape.hidden_size
    expected: dict[str, tuple[int, ...]] = {}
    for k in range(shape.num_heads):
        for layer in range(shape.num_layers):
            expected[f"{k}.{layer}.linear.weight"] = (size, size)
            expected[f"{k}.{layer}.linear.bias"] = (size,)
        if shape.lm_head != "shared":
            expected[f"{k}.{shape.num_layers}.weight"] = (shape.head_vocab_size, size)
    if shape.lm_head == "reduced":
        expected[TOKEN_MAP] = (shape.head_vocab_size,)
    return expected


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); train or copy the heads again"
        ) from None


def _check_tensors(folder: Path, stored: dict[str, Tensor], shape: HeadsShape) -> None:
    path = folder / WEIGHTS
    expected = _expected(shape)
    for names, word in (
        (expected.keys() - stored.keys(), "lacks"),
        (stored.keys() - expected.keys(), "has unknown"),
    ):
        if names:
            raise ModelError(
                f"{path} {word} {', '.join(sorted(names))}; expected {len(expected)} tensors for "
                f"{shape.num_heads} heads of {shape.num_layers} layers with lm_head={shape.lm_head}"
            )
    for name, sizes in expected.items():
        if tuple(stored[name].shape) != sizes:
            raise ModelError(
                f"{path}: {name} is {list(stored[name].shape)}, expected {list(sizes)}"
            )
        if not bool(torch.isfinite(stored[name]).all()):
            raise ModelError(f"{path}: {name} has values that are not finite; train again")
    if TOKEN_MAP in expected:
        ids = stored[TOKEN_MAP]
        rising = bool((ids[1:] > ids[:-1]).all())
        if ids.dtype != torch.int64 or not rising or ids[0] < 0 or ids[-1] >= shape.vocab_size:
            raise ModelError(
                f"{path}: token_map must be ascending int64 ids below {shape.vocab_size}"
            )
