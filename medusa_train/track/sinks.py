"""Where metrics go: always a JSONL file, Weights & Biases beside it unless disabled.

Metrics are plain numbers by name. Every call names its step; steps never go back.
"""

import json
import math
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from medusa_train.config.schema import TrackConfig
from medusa_train.errors import ConfigError
from medusa_train.track.manifest import write_text

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id.txt"

Metrics = Mapping[str, float]


class Sink(Protocol):
    """Takes metrics."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Take metrics of a step."""
        ...

    def attach(self, files: Sequence[Path]) -> None:
        """Take files that people look at: plots and reports."""
        ...

    def artifact(self, name: str, kind: str, folder: Path, pattern: str = "*") -> None:
        """Take what other runs can build on: the files of a folder, which change no more.

        Args:
            name: what it is, unique in the stage, such as `heads`.
            kind: `model` or `dataset`.
            folder: where it lies; files keep their place in it.
            pattern: which of its files; `**` goes into subfolders.
        """
        ...

    def close(self) -> None:
        """Write out what is left; safe to call twice."""
        ...


class NullSink:
    """Takes metrics and forgets them: for all processes but the first."""

    def log(self, metrics: Metrics, step: int) -> None:
        """Forget them."""

    def attach(self, files: Sequence[Path]) -> None:
        """Forget them too."""

    def artifact(self, name: str, kind: str, folder: Path, pattern: str = "*") -> None:
        """And these."""

    def close(self) -> None:
        """Nothing to close."""


class JsonlSink:
    """One line of strict JSON a call: step, time in seconds since 1970, then the metrics.

    A value that is not finite becomes null and its name is listed under `nonfinite`.
    """

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        """Open a file and drop what an earlier run logged after the step it is resumed from.

        Args:
            path: of the file; its folder exists.
            start_step: lines of later steps are dropped; with 0 all are.
        """
        kept = []
        if start_step > 0 and path.exists():
            lines = path.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= start_step]
        write_text(path, "".join(line + "\n" for line in kept))
        self._stream = path.open("a")

    def log(self, metrics: Metrics, step: int) -> None:
        """Write a line at once, so that a killed run keeps it."""
        values = {name: float(value) for name, value in metrics.items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), **values}
        if bad:
            line.update(dict.fromkeys(bad), nonfinite=bad)
        self._stream.write(json.dumps(line, allow_nan=False) + "\n")
        self._stream.flush()

    def attach(self, files: Sequence[Path]) -> None:
        """They lie on disk already."""

    def artifact(self, name: str, kind: str, folder: Path, pattern: str = "*") -> None:
        """It lies there too."""

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class WandbSink:
    """One W&B run a stage; a resumed stage goes on with the same run."""

    def __init__(
        self,
        folder: Path,
        track: TrackConfig,
        *,
        run_name: str,
        stage: str,
        settings: Mapping[str, Any],
    ) -> None:
        """Start or take up the run; its files lie in the stage folder.

        Raises:
            ConfigError: if W&B refuses, as it does online without a key.
        """
        import wandb

        self._wandb = wandb
        try:
            self._run: Any = wandb.init(
                dir=str(folder),
                mode=track.mode,
                project=track.project,
                entity=track.entity,
                group=track.group or run_name,
                name=f"{run_name}-{stage}",
                job_type=stage,
                tags=list(track.tags),
                config=dict(settings),
                id=_run_id(folder),
                resume="allow" if track.mode == "online" else None,
                settings=wandb.Settings(console="off", x_disable_stats=True, silent=True),
            )
        except wandb.Error as error:
            raise _refused(track, error) from error

    def log(self, metrics: Metrics, step: int) -> None:
        """Send them; W&B itself draws values that are not finite as gaps."""
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def attach(self, files: Sequence[Path]) -> None:
        """Show pictures among the charts, and keep all files as one artifact of the run."""
        pictures = {f.stem: self._wandb.Image(str(f)) for f in files if f.suffix == ".png"}
        self._run.log(pictures)
        self._log_artifact("report", "report", {file.name: file for file in files})

    def artifact(self, name: str, kind: str, folder: Path, pattern: str = "*") -> None:
        """Send them; a version that W&B has already costs nothing."""
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        files = {path.relative_to(folder).as_posix(): path for path in found}
        self._log_artifact(name, kind, files)

    def _log_artifact(self, name: str, kind: str, files: Mapping[str, Path]) -> None:
        """Named by run and stage, so that later runs of that name make further versions of it."""
        allowed = re.sub(r"[^\w.-]", "-", f"{self._run.name}-{name}")
        artifact = self._wandb.Artifact(allowed, kind)
        for place, file in files.items():
            # Immutable: else W&B copies every file before it reads it
            artifact.add_file(str(file), name=place, policy="immutable")
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Finish the run and wait until its file is whole, which `finish` alone does not.

        Called while an exception is on its way, it lets W&B show the run as failed.
        """
        if self._run is not None:
            self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
            self._run = None
            self._wandb.teardown()


class FanOut:
    """Several sinks as one; each gets everything, also when another one fails."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, metrics: Metrics, step: int) -> None:
        """Pass them on, in order: the file comes first."""
        for sink in self._sinks:
            sink.log(metrics, step)

    def attach(self, files: Sequence[Path]) -> None:
        """Pass them on."""
        for sink in self._sinks:
            sink.attach(files)

    def artifact(self, name: str, kind: str, folder: Path, pattern: str = "*") -> None:
        """Pass it on."""
        for sink in self._sinks:
            sink.artifact(name, kind, folder, pattern)

    def close(self) -> None:
        """Close all, then raise the first fault if there was one."""
        faults = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                faults.append(error)
        if faults:
            raise faults[0]


def check_login(track: TrackConfig) -> None:
    """Refuse at once what `WandbSink` would refuse after hours; in a terminal W&B asks for a key.

    Raises:
        ConfigError: if metrics are to be sent, and there is no key or W&B does not take it.
    """
    if track.mode == "online":
        import wandb

        try:
            wandb.login(force=True, verify=True)
        except wandb.Error as error:
            raise _refused(track, error) from error


def open_sinks(
    folder: Path,
    track: TrackConfig,
    *,
    is_main: bool,
    run_name: str,
    stage: str,
    settings: Mapping[str, Any],
    start_step: int = 0,
) -> Sink:
    """The sinks of a stage: none but on the first process, W&B unless disabled.

    Args:
        folder: of the stage; exists.
        track: what the user chose.
        is_main: whether this is the first process.
        run_name: name of the whole run, and of the group unless one is given.
        stage: name of the stage.
        settings: shown by W&B; plain JSON-like values.
        start_step: step that an earlier run is resumed from, 0 for a new one.

    Raises:
        ConfigError: if W&B cannot be started.
    """
    if not is_main:
        return NullSink()
    sinks: list[Sink] = [JsonlSink(folder / METRICS, start_step=start_step)]
    if track.mode != "disabled":
        sinks.append(WandbSink(folder, track, run_name=run_name, stage=stage, settings=settings))
    return FanOut(sinks)


def _refused(track: TrackConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"W&B does not start with track.mode={track.mode}: {error} "
        "(log in with `wandb login`, or use track=offline or track=disabled)"
    )


def _step_of(line: str) -> float:
    """Step of a line; a torn last line of a killed run counts as too late."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _run_id(folder: Path) -> str:
    """The W&B id of this stage, made once and kept beside its files."""
    path = folder / WANDB_ID
    if not path.exists():
        write_text(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()
