"""Two pictures of the results, as PNG files: speed-up by method, and how deep drafts get.

Colours are told apart with any colour vision (Okabe and Ito).
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from medusa_train.config.evaluation import AlsoName
from medusa_train.evaluate.names import other_name
from medusa_train.evaluate.results_schema import Results

SPEEDUP, ACCEPTANCE = "speedup.png", "acceptance.png"

_GREY, _ORANGE, _BLUE, _INK = "#999999", "#E69F00", "#0072B2", "#222222"
# Of further methods: colour, style of the line, label of the bar
_OTHERS: dict[AlsoName, tuple[str, str, str]] = {
    "lookup": ("#009E73", "^-.", "prompt\nlookup"),
    "draft_adaptive": ("#CC79A7", "D:", "draft\nadaptive"),
    "medusa_typical": ("#56B4E9", "v:", "Medusa\ntypical"),
}
_SIZE_INCHES, _DPI = (7.0, 4.0), 150


def draw_plots(folder: Path, results: Results) -> list[Path]:
    """Draw both pictures into a folder, `speedup.png` and `acceptance.png`; gives their paths."""
    return [
        _save(_speedup_figure(results), folder / SPEEDUP),
        _save(_acceptance_figure(results), folder / ACCEPTANCE),
    ]


def _speedup_figure(results: Results) -> Figure:
    """Bars of the speed-up over plain decoding, with whiskers for the 95 % intervals."""
    figure, axes = _figure()
    bars = _bars(results)
    for x, (_, colour, value, (low, high)) in enumerate(bars):
        axes.bar(x, value, width=0.6, color=colour)
        axes.vlines(x, low, high, color=_INK, linewidth=1.5)
        axes.hlines([low, high], x - 0.07, x + 0.07, color=_INK, linewidth=1.5)
        axes.annotate(
            f"{value:.2f}",
            (x, max(value, high)),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    axes.axhline(1.0, color=_INK, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(bars)), [label for label, *_ in bars])
    axes.set_xlim(-0.6, max(len(bars), 3) - 0.4)
    axes.set_ylim(0, 1.15 * max(max(value, high) for _, _, value, (_, high) in bars))
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title(f"Speed-up with 95 % interval over {results.model.num_prompts} prompts")
    return figure


def _bars(results: Results) -> list[tuple[str, str, float, tuple[float, float]]]:
    """Label, colour, speed-up and interval of each bar, left to right."""
    methods = results.methods
    bars = [("plain", _GREY, methods.plain.speedup, methods.plain.speedup_ci95)]
    if results.draft is not None:
        tried = sorted(results.draft.by_gamma.items(), key=lambda item: int(item[0]))
        bars += [(f"draft\ngamma {g}", _ORANGE, r.speedup, r.speedup_ci95) for g, r in tried]
    if methods.medusa is not None:
        label = f"Medusa\n{methods.medusa.tree_nodes} nodes"
        bars.append((label, _BLUE, methods.medusa.speedup, methods.medusa.speedup_ci95))
    for key, method in methods.others.items():
        colour, _, label = _OTHERS[key]
        label += "\n(lossy)" if method.lossy else ""
        bars.append((label, colour, method.speedup, method.speedup_ci95))
    return bars


def _acceptance_figure(results: Results) -> Figure:
    """Lines of the share of steps that accept at least so many drafts."""
    figure, axes = _figure()
    medusa, draft = results.methods.medusa, results.methods.draft_model
    if medusa is not None:
        _line(axes, medusa.acceptance_by_depth, "Medusa", _BLUE, "o-")
    if draft is not None:
        label = f"draft model, gamma {draft.gamma}"
        _line(axes, draft.acceptance_by_depth, label, _ORANGE, "s--")
    for key, method in results.methods.others.items():
        colour, style, _ = _OTHERS[key]
        _line(axes, method.acceptance_by_depth, other_name(key, method), colour, style)
    if axes.lines:
        axes.legend(frameon=False)
    else:
        note = "no step with drafts was measured"
        axes.text(0.5, 0.5, note, ha="center", transform=axes.transAxes)
    axes.set_ylim(0, 1.05)
    # Methods that may go far seldom do: what no step reached is left out of sight
    reached = (sum(share > 0 for share in line.get_ydata()) for line in axes.lines)  # pyright: ignore
    deepest = max(1, *reached) if axes.lines else 1
    axes.set_xlim(0.7, deepest + 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.set_xlabel("depth (drafts accepted in one step, at least)")
    axes.set_ylabel("share of steps")
    axes.set_title("How deep accepted drafts reach")
    return figure


def _line(axes: Axes, shares: list[float], label: str, colour: str, style: str) -> None:
    if shares:
        axes.plot(range(1, len(shares) + 1), shares, style, color=colour, label=label)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    """Write a picture that appears whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, format="png", dpi=_DPI)
    part.replace(path)
    return path
