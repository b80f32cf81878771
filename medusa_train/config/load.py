"""From YAML and overrides to a checked `Config`; recipes as a Hydra group."""

import difflib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from medusa_train.config.schema import Config
from medusa_train.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_dir(name: str) -> Path:
    """`configs` or `recipes`: bundled as `_<name>` in a wheel, beside the package in a checkout."""
    bundled = _PACKAGE / f"_{name}"
    return bundled if bundled.is_dir() else _PACKAGE.parent / name


CONFIG_DIR = str(shipped_dir("configs"))


def shipped_recipes() -> dict[str, str]:
    """Name of each shipped recipe and its `description`, in alphabetical order."""
    found: dict[str, str] = {}
    for path in sorted(shipped_dir("recipes").glob("*.yaml")):
        description = OmegaConf.select(OmegaConf.load(path), "description", default="")
        found[path.stem] = str(description)
    return found


def register_recipes() -> None:
    """Make `recipes/<name>.yaml` selectable as `+recipe=<name>`."""
    for path in sorted(shipped_dir("recipes").glob("*.yaml")):
        node = OmegaConf.load(path)
        ConfigStore.instance().store(
            group="recipe", name=path.stem, node=node, package="_global_", provider="medusa_train"
        )


def check(cfg: DictConfig) -> Config:
    """Check every key, type and combination at once.

    Raises:
        ConfigError: one message with every fault, each with its key, what was found, and the
            nearest valid name when the key is unknown.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        return TypeAdapter(Config).validate_json(json.dumps(container))
    except OmegaConfBaseException as error:
        raise ConfigError(_missing_or_broken(error)) from None
    except ValidationError as error:
        faults = [_explain(dict(fault)) for fault in error.errors()]
        lines = "\n".join(f"  - {line}" for line in dict.fromkeys(faults))
        raise ConfigError(f"{len(lines.splitlines())} setting(s) to change:\n{lines}") from None


def load(*overrides: str) -> Config:
    """Compose and check the same config as the command line, for tests and notebooks."""
    register_recipes()
    with initialize_config_dir(version_base="1.3", config_dir=CONFIG_DIR):
        return check(compose("config", overrides=list(overrides)))


def valid_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    hints = get_type_hints(schema)
    for field in fields(schema):
        key = prefix + field.name
        yield key
        if is_dataclass(hints[field.name]):
            yield from valid_keys(hints[field.name], key + ".")


def nearest(key: str) -> str | None:
    """The valid dotted key that looks most like `key`, or None when nothing is near."""
    keys = list(valid_keys())
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not close:
        by_leaf = {name.rsplit(".", 1)[-1]: name for name in keys}
        leaf = difflib.get_close_matches(key.rsplit(".", 1)[-1], by_leaf, n=1, cutoff=0.7)
        close = [by_leaf[name] for name in leaf]
    return close[0] if close else None


def _explain(fault: dict[str, Any]) -> str:
    """One fault of pydantic's list as `key: what was found, what is expected`."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "unexpected_keyword_argument":
        if key == "recipe":
            return f"recipe: no recipe {fault['input']!r}, known: {', '.join(shipped_recipes())}"
        near = nearest(key)
        return f"{key}: unknown key" + (f", did you mean {near}?" if near else "")
    if fault["type"] == "value_error":
        message = str(fault["msg"]).removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    return f"{key}: {fault['msg'].lower()}, got {fault['input']!r}"


def _missing_or_broken(error: OmegaConfBaseException) -> str:
    key = getattr(error, "full_key", None) or "?"
    text = str(error).splitlines()[0]
    if "Missing mandatory value" in text:
        return f"{key} has no value: give it on the command line as {key}=..."
    return f"{key}: {text}"
