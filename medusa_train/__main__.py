"""`python -m medusa_train +recipe=NAME ...`: tidy argv, Hydra, check, run the stages."""

import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from safetensors import SafetensorError

from medusa_train.config.load import (
    CONFIG_DIR,
    check,
    register_recipes,
    shipped_dir,
    shipped_recipes,
)
from medusa_train.config.schema import FOLDER_NAME, is_folder_name
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.track.console import start_logging

log = logging.getLogger("medusa_train")

# Where these are given, Hydra alone knows what can be chosen
_OTHER_CONFIGS = ("--config-", "-cd", "-cp", "-cn", "hydra.searchpath")

USAGE = """\
Train Medusa heads on a causal language model and measure what they are worth.

  python -m medusa_train +recipe=NAME [key=value ...]
  deepspeed --num_gpus 8 --module medusa_train +recipe=NAME [key=value ...]

Recipes (your own: put NAME.yaml in DIR/recipe and add --config-dir DIR):
{recipes}

Groups, chosen as group=NAME:
{groups}

Any setting is key=value, as in heads.num_heads=5. stages=[evaluate] runs one stage.
--cfg job prints the composed settings, --multirun runs several, --hydra-help tells the rest.
"""


def main() -> None:
    """Entry point of the module and of the console script. Never returns: it exits."""
    argv = sys.argv[1:]
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(usage())
        sys.exit(0)
    try:
        sys.argv[1:] = tidy(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)
    register_recipes()
    _leave(_run_hydra())


def usage() -> str:
    """Help with the shipped recipes, a line each, and the config groups."""
    recipes = "\n".join(f"  {name:<12} {text}" for name, text in shipped_recipes().items())
    folders = sorted(path for path in shipped_dir("configs").iterdir() if path.is_dir())
    groups = "\n".join(
        f"  {path.name:<12} {', '.join(sorted(p.stem for p in path.glob('*.yaml')))}"
        for path in folders
        if len(list(path.glob("*.yaml"))) > 1
    )
    return USAGE.format(recipes=recipes, groups=groups)


def tidy(argv: Sequence[str]) -> list[str]:
    """Arguments as Hydra should see them.

    The `--local_rank=N` that the DeepSpeed launcher adds is dropped (the environment says it).
    A setting is passed on as `++key=value`, so that an unknown key reaches our own check, which
    lists every fault at once with the nearest valid name; Hydra would stop at the first.

    Raises:
        ConfigError: for an override that Hydra's grammar cannot read.
    """
    groups = {path.name for path in shipped_dir("configs").iterdir() if path.is_dir()} | {"recipe"}
    others = any(argument.startswith(_OTHER_CONFIGS) for argument in argv)
    tidied = []
    for argument in argv:
        if argument.startswith(("--local_rank=", "--local-rank=")):
            continue
        key = argument.split("=", 1)[0]
        if not argument.startswith("-") and "=" in argument:
            _check_grammar(argument)
            _check_choice(argument, groups, others=others)
            _check_run_name(argument)
            plain = argument[0] not in "+~" and "/" not in key and "@" not in key
            if plain and key not in groups and not key.startswith("hydra"):
                argument = f"++{argument}"
        tidied.append(argument)
    return tidied


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="config")
def _job(cfg: DictConfig) -> None:
    global _started
    _started = True
    hydra_config = HydraConfig.get()
    output_dir = Path(hydra_config.runtime.output_dir)
    start_logging(output_dir, rank=int(os.environ.get("RANK", "0")))
    with _explained():
        config = check(cfg)
        from medusa_train.parallel import current_world  # torch is slow to import: check first
        from medusa_train.pipeline import run_stages

        world = current_world()
        if world.size > 1 and hydra_config.mode is RunMode.MULTIRUN:
            raise ConfigError(
                "--multirun works with one process: its jobs would share one process group; "
                "start the launcher once for each job"
            )
        run_stages(config, output_dir)


_started = False


def _run_hydra() -> int:
    """Exit status of the run. What stops Hydra before our own code is a fault in the settings."""
    try:
        _job()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        return 2 if status == 1 and not _started else status
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C before anything was begun\n")
        return 130
    return 0


@contextlib.contextmanager
def _explained():
    """Turn what a user can do something about into a sentence and an exit status."""
    try:
        yield
    except MedusaError as error:
        log.error("%s", error)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        log.error("stopped by Ctrl-C; the same command goes on where this one stopped")
        raise SystemExit(130) from None
    except (OSError, SafetensorError) as error:
        log.error("cannot read or write: %s (is the disk full?)", error)
        raise SystemExit(1) from None


def _check_grammar(argument: str) -> None:
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        key, value = argument.split("=", 1)
        raise ConfigError(
            f"cannot read {argument!r}: quote a value with special characters, "
            f"as in '{key}=\"{value}\"'"
        ) from None


def _check_choice(argument: str, groups: set[str], *, others: bool) -> None:
    """A group cannot be left out, as every section of the settings is needed, nor misspelt."""
    key, value = argument.split("=", 1)
    group = key.lstrip("+")
    if group not in groups:
        return
    names = sorted(path.stem for path in (shipped_dir("configs") / group).glob("*.yaml"))
    known = names or list(shipped_recipes())
    if value in ("null", ""):
        raise ConfigError(f"{argument} chooses nothing: expected one of {', '.join(known)}")
    if not others and value not in known and re.fullmatch(r"[\w-]+", value):
        close = difflib.get_close_matches(value, known, n=1)
        hint = f", did you mean {close[0]}? Known" if close else "; known"
        raise ConfigError(f"{argument}: no {group} {value!r}{hint}: {', '.join(known)}")


def _check_run_name(argument: str) -> None:
    """Before Hydra makes a folder of that name, wherever that is."""
    key, value = argument.split("=", 1)
    name = value.strip("'\"")
    if key.lstrip("+") == "run_name" and "${" not in name and not is_folder_name(name):
        raise ConfigError(f"run_name={name!r}: {FOLDER_NAME}")


def _leave(status: int) -> None:
    """End the process; a distributed one without the interpreter's own tear-down."""
    if "torch" not in sys.modules:
        sys.exit(status)
    from medusa_train.parallel import leave

    leave(status)


if __name__ == "__main__":
    main()
