"""The verdict: which method is faster, claiming no more than the intervals do.

A comparison whose 95 % interval covers 1, or rests on a handful of prompts, is told as undecided. A
lossy method wins nothing: it does other work.
"""

from medusa_train.evaluate.markdown import with_interval
from medusa_train.evaluate.names import other_name
from medusa_train.evaluate.results_schema import Results

MIN_PROMPTS = 10  # resampling fewer says little of the spread of prompts
MUCH_REPETITION = 0.2  # share of tokens; above it answers run in circles


def verdict(results: Results) -> str:
    """One paragraph: each method against plain decoding, then Medusa against the other ones."""
    methods = results.methods
    sentences = [*_against_plain(results), *_medusa_against(results), *_lossy(results)]
    if methods.medusa is not None or methods.draft_model is not None or methods.others:
        sentences.append("Brackets hold 95 % intervals over prompts.")
    share = methods.plain.repetition_share
    if share > MUCH_REPETITION:
        sentences.append(
            f"Beware: {share:.0%} of the tokens of the plain answers repeat an earlier 4-gram. "
            "Answers that run in circles are easy to draft, so these speed-ups flatter."
        )
    return " ".join(sentences)


def _against_plain(results: Results) -> list[str]:
    medusa, draft = results.methods.medusa, results.methods.draft_model
    sentences: list[str] = []
    measured = []
    if medusa is None:
        sentences.append("Medusa was not measured.")
    else:
        measured.append(("Medusa", medusa))
    if draft is not None:
        measured.append((f"{_best_draft(results)} (gamma {draft.gamma})", draft))
    measured += [
        (_subject(other_name(key, method)), method)
        for key, method in results.methods.others.items()
        if not method.lossy
    ]
    sentences += [
        _compare(name, "plain decoding", method.speedup, method.speedup_ci95, results)
        for name, method in measured
    ]
    if draft is None:
        sentences.append("No draft model was measured, so Medusa is not compared with one.")
    return sentences


def _medusa_against(results: Results) -> list[str]:
    found = []
    if results.comparison.medusa_over_draft is not None:
        found.append((_best_draft(results), results.comparison.medusa_over_draft))
    for key, ratio in results.comparison.medusa_over_others.items():
        found.append((_subject(other_name(key, results.methods.others[key])), ratio))
    return [_compare("Medusa", name, each.ratio, each.ci95, results) for name, each in found]


def _lossy(results: Results) -> list[str]:
    return [
        f"{other_name(key, method)} ran at {with_interval(method.speedup, method.speedup_ci95)} "
        "times the speed of plain decoding, but its answers may differ from plain decoding's, so "
        "it is compared with no other method."
        for key, method in results.methods.others.items()
        if method.lossy
    ]


def _best_draft(results: Results) -> str:
    adaptive = "draft_adaptive" in results.methods.others
    return "the best draft model" + (" of fixed gamma" if adaptive else "")


def _subject(name: str) -> str:
    return f"the {name}" if name.startswith("draft model") else name


def _compare(
    name: str, other: str, ratio: float, interval: tuple[float, float], results: Results
) -> str:
    """What a ratio of speeds and its interval allow to say."""
    low, high = interval
    name, text = name[0].upper() + name[1:], with_interval(ratio, interval)
    prompts = results.model.num_prompts
    if prompts < MIN_PROMPTS:
        few = f"{prompts} prompt{'s are' if prompts > 1 else ' is'} too few for an interval"
        return f"{name} ran at {text} times the speed of {other}, but {few}: this run cannot tell."
    if low > 1:
        return f"{name} is faster than {other}: {text} times its speed."
    if high < 1:
        return f"{name} is slower than {other}: {text} times its speed, below 1."
    below = "below 1 on these prompts, but " if ratio < 1 else ""
    return (
        f"{name} ran at {text} times the speed of {other}: {below}the interval covers 1, "
        "so this run cannot tell which is faster."
    )
