"""`train`: what training costs, as a loss alone and as whole steps of both stages."""

from bench import loss, steps
from bench.case import Case
from bench.rows import Row


def run(case: Case) -> list[Row]:
    """All rows of `train`."""
    return [*loss.run(case), *steps.run(case)]
