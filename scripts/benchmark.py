"""Measure this package against what people use without it: a table, and rows for the record.

    python scripts/benchmark.py decode --json decode.json
    python scripts/benchmark.py train
    python scripts/benchmark.py distill --model some/model --repeats 9

What every row means is in docs/benchmarks.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported

import torch
from bench import decode, decode_memory, distill, growth, latency, train
from bench.case import DEFAULT_MODEL, Case, build_case
from bench.rows import Row
from rich.console import Console
from rich.table import Table

from medusa_train.errors import MedusaError
from medusa_train.model.device import dtype_name

BENCHMARKS: dict[str, Callable[[Case], list[Row]]] = {
    "decode": decode.run,
    "latency": latency.run,
    "memory": decode_memory.run,
    "train": train.run,
    "growth": growth.run,
    "distill": distill.run,
}
LEAST_REPEATS = 5
TINY = "--tiny shows that everything runs and measures nothing: these figures mean nothing."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status."""
    options = _parser().parse_args(argv)
    try:
        case = build_case(
            model=options.model,
            repeats=options.repeats,
            tiny=options.tiny,
            compiled=options.compile,
        )
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    rows = BENCHMARKS[options.benchmark](case)
    if options.json is not None:
        write_rows(options.json, rows)
        if options.benchmark == "latency":
            latency.plot(rows, options.json.with_suffix(".png"))
    _print(case, options.benchmark, rows)
    if options.tiny:
        print(TINY)
    return 0


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a JSON list; a folder that is missing is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows there; latency: a plot beside it"
    )
    parser.add_argument(
        "--model", metavar="NAME", help=f"as model.name of a recipe; default {DEFAULT_MODEL}"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="little work on a random model: a check, no measurement"
    )
    parser.add_argument(
        "--compile", action="store_true", help="decode through torch.compile (ours, not the peer)"
    )
    parser.add_argument(
        "--repeats", type=_repeats, default=LEAST_REPEATS, metavar="N", help="rounds; default 5"
    )
    return parser


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_REPEATS:
        raise argparse.ArgumentTypeError(
            f"expected a whole number, at least {LEAST_REPEATS}, found {text}"
        )
    return int(text)


def _print(case: Case, benchmark: str, rows: Sequence[Row]) -> None:
    backbone = case.backbone
    dtype = dtype_name(backbone.dtype)
    threads = f"{torch.get_num_threads()} threads, " if backbone.device.type == "cpu" else ""
    table = Table(
        title=f"{benchmark}: {backbone.name}, {dtype}, {backbone.device}",
        caption=f"{threads}medians of {case.repeats} rounds, ours and the peer in turn",
    )
    table.add_column("name", no_wrap=True)
    for column in ("ours", "peer", "ratio", "spread"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for row in rows:
        figures = (f"{row.value:.4g}", f"{row.peer:.4g}", f"{row.ratio:.3f}", f"{row.spread:.1%}")
        table.add_row(row.name, *figures, row.unit)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
