"""From a folder and a few options to a backbone and a way of decoding."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from medusa_train.config.load import load
from medusa_train.config.schema import ModelConfig
from medusa_train.decode import Lookup, Medusa, Method, Plain
from medusa_train.decode.medusa import most_ranks
from medusa_train.errors import CheckpointError, ConfigError, ModelError
from medusa_train.model.backbone import Backbone
from medusa_train.model.heads import MedusaHeads
from medusa_train.model.weights import CONFIG, load_heads
from medusa_train.ops.tree import Tree, build_tree, chain_tree
from medusa_train.track.manifest import read_manifest
from medusa_train.track.places import MERGED_FOLDER, TREE

MethodName = Literal["medusa", "plain", "lookup"]

# Of the settings that heads were trained with: what makes the backbone the one they know
_SAME_BACKBONE = ("revision", "dtype", "quantization", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guesser:
    """A method, what it is in a line, and who guesses (None: nobody)."""

    method: Method
    described: str
    name: str | None


def backbone_settings(
    heads: Path, *, model: str | None, dtype: str | None, device: str | None
) -> ModelConfig:
    """How to load the backbone of heads: the one they were trained on, unless `model` is given.

    Raises:
        ModelError: if the heads do not name it.
        CheckpointError: if medusa2 has left no merged backbone.
        ConfigError: if a setting does not hold.
    """
    wanted = {} if model is not None else _trained_with(heads)
    wanted |= {key: value for key, value in (("dtype", dtype), ("device", device)) if value}
    overrides = [f"model.{key}={json.dumps(value)}" for key, value in wanted.items()]
    settings = load("model.name=chat", "run_name=chat", "stages=[evaluate]", *overrides).model
    return replace(settings, name=model or _backbone_name(heads))


def choose_method(
    name: MethodName, backbone: Backbone, heads_folder: Path, tree_file: Path | None
) -> Guesser:
    """The method of that name.

    Args:
        name: `medusa` alone reads the heads.
        backbone: decodes.
        heads_folder: as `find_heads` gives it.
        tree_file: see `choose_tree`.

    Raises:
        MedusaError: if heads or tree do not fit.
    """
    match name:
        case "plain":
            return Guesser(method=Plain(backbone), described="plain decoding", name=None)
        case "lookup":
            described = "prompt lookup, no heads"
            return Guesser(method=Lookup(backbone), described=described, name="prompt lookup")
        case "medusa":
            heads = load_heads(
                heads_folder, dtype=backbone.dtype, device=backbone.device, backbone=backbone
            )
            tree, origin = choose_tree(heads, backbone, heads_folder, tree_file)
            described = f"{len(heads)} heads from {heads_folder}, {origin}"
            method = Medusa(backbone, heads, tree)
            return Guesser(method=method, described=described, name="the heads")


def choose_tree(
    heads: MedusaHeads, backbone: Backbone, heads_folder: Path, given: Path | None
) -> tuple[Tree, str]:
    """The tree to decode with, and where it is from.

    Args:
        heads: at least as many as the tree is deep.
        backbone: theirs.
        heads_folder: beside whose stage `evaluate` may have left a tree.
        given: a file like that; None for that one or else, as serving engines do, the best guess
            of each head in a row.

    Raises:
        ConfigError: if the file cannot be read, or is of other heads.
    """
    measured = heads_folder.parent.parent / "evaluate" / TREE
    if given is None and not measured.is_file():
        origin = f"a chain of their best guesses ({measured} is missing; --tree names another)"
        return chain_tree(len(heads)), origin
    path = given or measured
    try:
        paths = [list(ranks) for ranks in json.loads(path.read_text())["paths"]]
        most = most_ranks(backbone, heads)
        tree = build_tree(paths, num_heads=len(heads), max_rank=most)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); --tree names another") from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise ConfigError(
            f'{path} holds no tree for these heads{reason}; expected {{"paths": [[0], ...]}} as '
            "evaluate writes it, and --tree names another"
        ) from None
    return tree, f"a tree of {tree.nodes} nodes from {path}"


def _trained_with(heads: Path) -> dict[str, str]:
    """Settings of the backbone that heads in the folder of a stage were trained on."""
    found = read_manifest(heads.parent)
    made = {} if found is None else found["settings"].get("model", {})
    return {key: made[key] for key in _SAME_BACKBONE if made.get(key) is not None}


def _backbone_name(heads: Path) -> str:
    """The merged backbone beside heads of medusa2, else the one that they name."""
    merged, stage = heads.parent / MERGED_FOLDER, read_manifest(heads.parent)
    if merged.is_dir():
        return str(merged)
    if stage is not None and stage["stage"] == "medusa2":
        raise CheckpointError(
            f"the heads of medusa2 belong to the backbone that was trained with them, and {merged} "
            "is missing: run medusa2 with medusa2.merge=true, or name a merged one with --model"
        )
    try:
        return str(json.loads((heads / CONFIG).read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{heads / CONFIG} names no base model ({error!r}); name it with --model"
        ) from None
