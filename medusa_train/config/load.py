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


def shipped_models() -> dict[str, str]:
    """Each shipped choice of `model=` that names a model, and its `model.name`."""
    found: dict[str, str] = {}
    for path in sorted((shipped_dir("configs") / "model").glob("*.yaml")):
        name = OmegaConf.select(OmegaConf.load(path), "name", default="")
        if name:
            found[path.stem] = str(name)
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
        container: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_missing_or_broken(error)) from None
    found, faults = _validate(container)
    if found is not None:
        return found
    # An unknown key keeps the combinations of its section from being looked at: look again without
    for fault in faults:
        if fault["type"] == "unexpected_keyword_argument":
            _drop(container, fault["loc"])
    faults += _validate(container)[1]
    lines = list(dict.fromkeys(_explain(fault) for fault in faults))
    listed = "\n".join(f"  - {line}" for line in lines)
    raise ConfigError(f"{len(lines)} setting(s) to change:\n{listed}")


def _validate(container: Any) -> tuple[Config | None, list[dict[str, Any]]]:
    """The typed settings, or what is wrong with them."""
    try:
        return TypeAdapter(Config).validate_json(json.dumps(container)), []
    except ValidationError as error:
        return None, [dict(fault) for fault in error.errors()]


def _drop(container: Any, place: tuple[int | str, ...]) -> None:
    for part in place[:-1]:
        container = container[part]
    del container[place[-1]]


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
    """The valid dotted key that looks most like `key`, in its own section if there is one."""
    keys = list(valid_keys())
    section, _, leaf = key.rpartition(".")
    siblings = [name for name in keys if name.rpartition(".")[0] == section]
    leaves = {name.rpartition(".")[2]: name for name in keys}
    for written, names, cutoff in ((key, siblings, 0.7), (key, keys, 0.7), (leaf, leaves, 0.7)):
        close = difflib.get_close_matches(written, names, n=1, cutoff=cutoff)
        if close:
            return leaves.get(close[0], close[0]) if names is leaves else close[0]
    return None


def _explain(fault: dict[str, Any]) -> str:
    """One fault of pydantic's list as `key: what was found, what is expected`."""
    # pydantic names the alternative of a union that it tried; users know only the setting
    key = ".".join(str(part) for part in fault["loc"] if "[" not in str(part))
    if fault["type"] == "missing":
        return f"{key}: is missing"
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
