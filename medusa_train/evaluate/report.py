"""`report.md`: what the results say, in words and tables for people who decide."""

from pathlib import Path

from pydantic import JsonValue

from medusa_train.evaluate.exactness import exactness_section
from medusa_train.evaluate.markdown import megabytes, number, table, with_interval
from medusa_train.evaluate.names import named_methods
from medusa_train.evaluate.plots import ACCEPTANCE, SPEEDUP, draw_plots
from medusa_train.evaluate.results_schema import Results
from medusa_train.evaluate.verdict import verdict
from medusa_train.track.manifest import write_text

REPORT = "report.md"

_DEFINITIONS = """\
* Tokens per step: mean tokens that one forward of the model emits after the prefill (plain: 1).
* Overhead: seconds of one decoding step / seconds of one plain decoding step.
* Speed-up: tokens per second / plain tokens per second, prefill included, pooled over prompts.
* Brackets: 95 % interval, prompts resampled in pairs; timing noise of repeats is not in it.
* Residual: speed-up / (tokens per step / overhead) - 1; prefill and cut last blocks make it up."""


def write_report(folder: Path, results: Results) -> Path:
    """Write `report.md` and its two pictures into an existing folder; gives the report's path."""
    draw_plots(folder, results)
    path = folder / REPORT
    write_text(path, render_report(results))
    return path


def render_report(results: Results) -> str:
    """The report as Markdown; the pictures are linked as files beside it."""
    sections = [
        f"# Medusa on {results.model.name}",
        verdict(results),
        _conditions(results),
        "## Trade-offs",
        _trade_offs(results),
        _costs(results.provenance),
        _residuals(results),
        f"![Speed-up by method]({SPEEDUP})",
        f"![Share of steps by accepted drafts]({ACCEPTANCE})",
        *_heads(results),
        *_backbone(results),
        *_gammas(results),
        *_tree(results),
        "## Speed-up by kind of prompt",
        _kinds(results),
        "## Exactness and repetition",
        exactness_section(results.model.dtype, named_methods(results)),
        "## How to reproduce",
        _reproduce(results.provenance),
        "## Definitions",
        _DEFINITIONS,
    ]
    return "\n\n".join(sections) + "\n"


def _conditions(results: Results) -> str:
    model = results.model
    drawn = [
        f"{name}: at temperature {method.temperature:g}"
        for name, method in named_methods(results)
        if method.temperature > 0
    ]
    greedy = f"greedy ({', '.join(drawn)})" if drawn else "greedy"
    return (
        f"Measured on {model.num_prompts} prompts with up to {model.max_new_tokens} new tokens "
        f"each, one prompt at a time, {greedy}, on {model.device} in {model.dtype} "
        f"({model.parameters:,} parameters, {megabytes(model.bytes)} MB)."
    )


def _trade_offs(results: Results) -> str:
    return table(
        "method|architecture|extra memory, MB|tokens per step|overhead|speed-up [95 %]"
        "|verification|training tokens|training seconds",
        (
            (
                name,
                method.architecture,
                megabytes(method.extra_memory_bytes),
                number(method.tokens_per_step),
                number(method.overhead),
                with_interval(method.speedup, method.speedup_ci95),
                method.verification,
                number(method.training_tokens, 0),
                number(method.training_seconds, 0),
            )
            for name, method in named_methods(results)
        ),
    )


def _costs(provenance: dict[str, JsonValue]) -> str:
    """What the table leaves out of the cost of training."""
    rows = provenance.get("distill")
    both = ""
    if isinstance(rows, dict) and isinstance(rows.get("tokens"), int):
        both = (
            f" Heads and draft model learnt from the same {rows['tokens']:,} tokens of the model's "
            f"own, which took {_plain_text(rows.get('seconds'))} seconds to make."
        )
    return f"Training tokens count repeats; training seconds are optimiser steps alone.{both}"


def _residuals(results: Results) -> str:
    found = [
        f"{'not known' if method.residual is None else f'{method.residual:+.1%}'} ({name})"
        for name, method in named_methods(results)
    ]
    return "Residual of speed-up = tokens per step / overhead: " + ", ".join(found) + "."


def _heads(results: Results) -> list[str]:
    if results.heads is None:
        return []
    pairs = zip(results.heads.top1, results.heads.top5, strict=True)
    rows = ((k, k + 2, f"{one:.1%}", f"{five:.1%}") for k, (one, five) in enumerate(pairs))
    return [
        "## Accuracy of the heads on held-out rows",
        table("head|tokens ahead|top 1|top 5", rows),
    ]


def _backbone(results: Results) -> list[str]:
    change = None if results.heads is None else results.heads.backbone_change
    if change is None:
        return []
    factor = change.perplexity / change.perplexity_before - 1
    return [
        "## What became of the backbone",
        "Heads and backbone were trained together, so plain decoding above is that of the new "
        "backbone. On held-out answers of the original one its perplexity is "
        f"{change.perplexity:.3f}, where the original has {change.perplexity_before:.3f} "
        f"({factor:+.1%}); its distribution lies {change.kl:.4f} nats (KL) from the original's in "
        f"the mean; and its best token is the answer's own at {change.agreement:.1%} of the "
        f"positions (the original: {change.agreement_before:.1%}). All of that was measured before "
        f"the changes were rounded to the {results.model.dtype} of the model that is used here.",
    ]


def _gammas(results: Results) -> list[str]:
    if results.draft is None:
        return []
    tried = sorted(results.draft.by_gamma.items(), key=lambda item: int(item[0]))
    rows = (
        (
            gamma,
            number(found.acceptance_rate),
            number(found.tokens_per_step),
            number(found.overhead),
            with_interval(found.speedup, found.speedup_ci95),
        )
        for gamma, found in tried
    )
    title = "gamma|acceptance rate|tokens per step|overhead|speed-up [95 %]"
    note = "The fastest gamma on these prompts is the baseline, which favours the draft model."
    return ["## Draft model by gamma", table(title, rows), note]


def _tree(results: Results) -> list[str]:
    if results.tree is None:
        return []
    rows = (
        (size.nodes, number(size.tokens_per_step), number(size.step_ms), number(size.speedup))
        for size in results.tree.chosen
    )
    note = (
        f"Used: {results.tree.nodes} nodes, {results.tree.depth} deep. The curve is the estimate "
        "by which a size is chosen, without prefill; the tables above are measured."
    )
    title = "nodes|tokens per step|step, ms|estimated speed-up"
    return ["## Size of the tree", table(title, rows), note]


def _kinds(results: Results) -> str:
    methods = named_methods(results)[1:]
    rows = (
        (
            kind,
            plain.prompts,
            *(number(method.speedup_by_kind[kind].speedup) for _, method in methods),
        )
        for kind, plain in results.methods.plain.speedup_by_kind.items()
    )
    return table("|".join(["kind", "prompts", *(name for name, _ in methods)]), rows)


def _reproduce(provenance: dict[str, JsonValue]) -> str:
    rest = [
        f"* {key}: {_plain_text(value)}" for key, value in provenance.items() if key != "command"
    ]
    command = provenance.get("command")
    lines = [] if command is None else [f"    {_plain_text(command)}", ""]
    return "\n".join(lines + rest) or "No provenance was recorded."


def _plain_text(value: JsonValue) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(_plain_text(each) for each in value) or "none"
    return "not known" if value is None else str(value)
