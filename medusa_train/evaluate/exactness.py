"""Whether answers are those of plain decoding: compared, and put into words."""

from collections.abc import Sequence

from medusa_train.evaluate import statistics
from medusa_train.evaluate.near_ties import NEAR, Gap
from medusa_train.evaluate.results_schema import Exactness, MethodResult
from medusa_train.evaluate.statistics import Measurements

_POSITIONS_SHOWN = 10


def compare_answers(measured: Measurements, plain: Measurements, gap: Gap) -> Exactness:
    """Which answers of a method are plain decoding's, and where the others part from it.

    Args:
        measured: of the method.
        plain: of plain decoding, the same prompts in the same order.
        gap: how near to a tie the two tokens were.
    """
    prompts, positions, gaps = [], [], []
    for ours, reference in zip(measured, plain, strict=True):
        one, other = ours.generation.ids, reference.generation.ids
        place = statistics.first_difference(one, other)
        if place is not None:
            prompts.append(ours.prompt_id)
            positions.append(place)
            both = place < min(len(one), len(other))
            pair = (one[place], other[place]) if both else None
            gaps.append(gap(ours.prompt_id, one[:place], *pair) if pair else None)
    return Exactness(
        prompts=len(measured),
        identical=len(measured) - len(prompts),
        first_difference=positions,
        differing_prompts=prompts,
        gaps=gaps,
    )


def exactness_section(dtype: str, methods: Sequence[tuple[str, MethodResult]]) -> str:
    """In words, how many answers are plain decoding's, and how much all of them repeat themselves.

    Args:
        dtype: of the run.
        methods: by name, plain decoding first.
    """
    sentences = [_sentence(name, method) for name, method in methods[1:]]
    sentences.append(
        "Greedy verification is exact in exact arithmetic. A forward over several tokens rounds "
        "differently from one over a single token, so near-ties may flip: now and then in bfloat16 "
        f"or float16, hardly ever in float32. This run used {dtype}."
    )
    shares = (f"{method.repetition_share:.1%} ({name})" for name, method in methods)
    sentences.append(f"Tokens that repeat an earlier 4-gram of their answer: {', '.join(shares)}.")
    return " ".join(sentences)


def _sentence(name: str, method: MethodResult) -> str:
    found = method.exactness
    counted = f"{found.identical} of {found.prompts} answers are identical to plain decoding's"
    if method.lossy:
        return (
            f"{name}: {counted}; it is not meant to be equal, since it draws tokens at temperature "
            f"{method.temperature:g} and accepts guesses that are merely likely enough."
        )
    return f"{name}: {counted}{_positions(found.first_difference)}{_near_ties(found.gaps)}."


def _near_ties(gaps: Sequence[float | None]) -> str:
    if not gaps:
        return ""
    known = [gap for gap in gaps if gap is not None]
    largest = f", at most {max(known):.1f}" if known else ""
    ended = f"; {len(gaps) - len(known)} end too soon or too late" if len(known) < len(gaps) else ""
    return (
        f"; at {sum(gap <= NEAR for gap in known)} of these {len(gaps)} places the two tokens' "
        f"logits are a near-tie, within {NEAR:g} spacings of the dtype{largest}{ended}"
    )


def _positions(positions: Sequence[int]) -> str:
    if not positions:
        return ""
    shown = ", ".join(map(str, positions[:_POSITIONS_SHOWN]))
    more = ", ..." if len(positions) > _POSITIONS_SHOWN else ""
    return f"; {len(positions)} differ, first at token {shown}{more} (from 0)"
