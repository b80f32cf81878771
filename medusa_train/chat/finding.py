"""Where heads lie, and where else some do; quick to import, so that a slip is told at once."""

from pathlib import Path

from medusa_train.errors import ModelError
from medusa_train.track.places import HEADS_FOLDER, HEADS_WEIGHTS

_PLACES = ("", HEADS_FOLDER, f"medusa2/{HEADS_FOLDER}", f"medusa1/{HEADS_FOLDER}")
_MOST = 5  # folders that are named


def find_heads(folder: Path) -> Path:
    """The heads in a folder of theirs, in that of a stage, or in that of a run.

    Of a run that has both, those of medusa2, as they are what it measures.

    Raises:
        ModelError: if there are none, naming folders near it that have some.
    """
    folder = folder.expanduser().resolve()
    found = _heads_in(folder)
    if found is not None:
        return found
    if folder.is_dir():
        near = _with_heads(folder) or _with_heads(folder.parent)
        what = f"no heads in {folder}"
    else:
        near = _with_heads(folder.parent)
        what = f"no heads: there is no folder {folder}"
    hint = f". These have heads: {', '.join(map(str, near[:_MOST]))}" if near else ""
    raise ModelError(
        f"{what}; expected a folder with {HEADS_WEIGHTS}, that of a stage medusa1 or medusa2, or "
        f"that of a run which has finished one{hint}"
    )


def _heads_in(folder: Path) -> Path | None:
    places = (folder / place for place in _PLACES)
    return next((place for place in places if (place / HEADS_WEIGHTS).is_file()), None)


def _with_heads(parent: Path) -> list[Path]:
    """The folders in one that `find_heads` would take; none where it cannot be read."""
    try:
        return [path for path in sorted(parent.iterdir()) if _heads_in(path) is not None]
    except OSError:
        return []
