"""The measurements of `scripts/benchmark.py`, one module for each of its subcommands."""
