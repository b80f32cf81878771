"""Tables and numbers as the report shows them."""

from collections.abc import Iterable, Sequence


def table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the title has its columns parted by `|`."""
    columns = title.split("|")
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    """With thousands apart, or that it is not known."""
    return "not known" if value is None else f"{value:,.{digits}f}"


def megabytes(size: int) -> str:
    """Of bytes, without the unit."""
    return f"{size / 1e6:,.1f}"


def with_interval(value: float, interval: tuple[float, float]) -> str:
    """Value and interval, with as many digits as it takes to see on which side of 1 they lie."""
    digits = 2
    while digits < 5 and any(end != 1 and round(end, digits) == 1 for end in interval):
        digits += 1
    low, high = (f"{end:.{digits}f}" for end in interval)
    return f"{value:.{digits}f} [{low}, {high}]"
