"""What a run says: sentences on the terminal, and the same with dates in a log file."""

import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler


def start_logging(folder: Path, *, rank: int) -> None:
    """Send all logging to the terminal and to `medusa_train.rank<N>.log` in `folder`.

    Ranks above 0 say only warnings on the terminal. Calling it again changes the file.
    """
    if sys.stderr.isatty():
        terminal: logging.Handler = RichHandler(
            console=Console(stderr=True), show_time=False, show_path=False, highlighter=None
        )
    else:
        terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    file = logging.FileHandler(folder / f"medusa_train.rank{rank}.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[terminal, file], force=True)
    for chatty in ("httpx", "matplotlib", "deepspeed", "DeepSpeed", "fsspec", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
