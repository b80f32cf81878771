"""Methods of `evaluate.also` in results, report and pictures; a lossy one bears that word."""

import json
import re
from dataclasses import asdict, replace

import pytest
from results_case import results_of, tiny_model

from medusa_train.decode.generation import Generation
from medusa_train.errors import DataError
from medusa_train.evaluate import plots
from medusa_train.evaluate.method_result import Traits, no_weights
from medusa_train.evaluate.report import render_report, verdict
from medusa_train.evaluate.results import read_results, write_results
from medusa_train.evaluate.results_schema import (
    DraftInfo,
    HeadsInfo,
    TreeInfo,
)
from medusa_train.evaluate.run import _headline
from medusa_train.evaluate.statistics import Measurement

PROMPTS = 12
TYPICAL = "Medusa with typical acceptance (lossy)"
ADAPTIVE = "draft model with adaptive gamma"
COST = {"parameters": 1, "training_tokens": 5, "training_seconds": 6.0}


def answers(accepted, seconds, others=0):
    """Twelve answers of ten tokens; the first `others` of them differ from token 4 on."""
    found = []
    for i in range(PROMPTS):
        generation = Generation(
            ids=[*range(4), *([99] * 6 if i < others else range(4, 10))],
            finish_reason="length",
            accepted=accepted,
            prefill_seconds=0.1,
            decode_seconds=seconds - 0.1,
        )
        found.append(Measurement(prompt_id=str(i), kind="code", generation=generation))
    return found


MEASURED = {
    "plain": answers([0] * 9, 1.0),
    "medusa": answers([2, 2, 2], 0.5),
    "draft_model/gamma=2": answers([1, 1, 1, 1, 0], 0.8),
    "lookup": answers([8, 0], 0.625),
    "draft_adaptive": answers([2, 4, 0], 0.4),
    "medusa_typical": answers([2, 2, 2], 0.25, others=9),
}
HEADS = HeadsInfo(architecture="2 heads", bytes=2_000_000, top1=[0.5], top5=[0.7], **COST)
DRAFT = DraftInfo(architecture="3 layers", bytes=40_000_000, **COST)
OTHERS = {
    "lookup": Traits(adds=no_weights("n-grams"), depth=10),
    "draft_adaptive": Traits(adds=DRAFT, depth=16),
    "medusa_typical": Traits(adds=HEADS, depth=2, lossy=True, temperature=0.7),
}


def build(*names):
    """Plain decoding, Medusa and a draft model, with these others (all if none is named)."""
    others = {name: OTHERS[name] for name in names or OTHERS}
    return results_of(
        {name: MEASURED[name] for name in MEASURED if name not in OTHERS or name in others},
        tiny_model(PROMPTS),
        heads=HEADS,
        draft=DRAFT,
        tree=TreeInfo(nodes=3, depth=2, paths=[[0]], chosen=[]),
        others=others,
    )


@pytest.fixture(scope="module")
def results():
    return build()


def test_others_are_measured_as_all_are(results):
    found = results.methods.others
    assert list(found) == list(OTHERS)
    assert found["lookup"].speedup == pytest.approx(1.6)
    assert found["lookup"].tokens_per_step == pytest.approx(5)
    assert found["lookup"].acceptance_by_depth == [0.5] * 8 + [0, 0]
    assert (found["lookup"].extra_memory_bytes, found["lookup"].training_tokens) == (0, 0)
    assert found["draft_adaptive"].extra_memory_bytes == DRAFT.bytes
    assert len(found["draft_adaptive"].acceptance_by_depth) == 16
    assert found["lookup"].verification.startswith("greedy: output equals plain")


def test_only_what_is_lossy_is_called_that(results):
    typical = results.methods.others["medusa_typical"]
    assert (typical.lossy, typical.temperature) == (True, 0.7)
    assert typical.verification == (
        "typical acceptance: answers may differ from plain decoding's; 3 of 12 identical here"
    )
    rest = [m for m in results.methods.others.values() if m is not typical]
    for method in (results.methods.plain, results.methods.medusa, *rest):
        assert (method.lossy, method.temperature) == (False, 0.0)


def test_medusa_is_compared_with_the_lossless_ones(results):
    ratios = results.comparison.medusa_over_others
    assert {name: found.ratio for name, found in ratios.items()} == pytest.approx(
        {"lookup": 0.625 / 0.5, "draft_adaptive": 0.4 / 0.5}
    )


def test_they_are_written_and_read_and_another_name_is_refused(tmp_path, results):
    path = tmp_path / "results.json"
    write_results(path, results)
    assert read_results(path) == results

    found = json.loads(path.read_text())
    found["methods"]["others"]["beam"] = asdict(results.methods.others["lookup"])
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match=r"methods\.others\.beam"):
        read_results(path)


def test_one_that_was_not_measured_is_refused(monkeypatch):
    monkeypatch.delitem(MEASURED, "lookup")
    with pytest.raises(ValueError, match="others are"):
        build("lookup")


def test_every_mention_of_a_lossy_method_says_so(results):
    text = render_report(results)
    assert text.count(TYPICAL) == text.count("Medusa with typical acceptance") >= 6
    rows = [line for line in text.splitlines() if line.startswith("|") and "typical" in line]
    assert len(rows) == 2  # trade-offs, and the columns of the kinds
    assert all("(lossy)" in row for row in rows)
    assert "(lossy)" not in render_report(build("lookup", "draft_adaptive"))


def test_tables_have_a_row_or_a_column_for_each(results):
    text = render_report(results)
    assert (
        f"| {TYPICAL} | 2 heads | 2.0 | 3.00 | 0.50 | 4.00 [4.00, 4.00] | typical acceptance: "
        "answers may differ from plain decoding's; 3 of 12 identical here | 5 | 6 |"
    ) in text
    assert "| prompt lookup | n-grams | 0.0 | 5.00 |" in text
    assert f"| {ADAPTIVE} | 3 layers | 40.0 | 3.00 |" in text
    assert f"Medusa, 3 nodes | prompt lookup | {ADAPTIVE} | {TYPICAL} |" in text
    assert "| code | 12 | 1.25 | 2.00 | 1.60 | 2.50 | 4.00 |" in text
    assert f"({ADAPTIVE}), -33.3% ({TYPICAL})." in text  # 4 / (3 / 0.5) - 1


def test_what_is_not_greedy_is_said_in_the_conditions(results):
    assert f"at a time, greedy ({TYPICAL}: at temperature 0.7), on cpu" in render_report(results)
    assert "at a time, greedy, on cpu" in render_report(build("lookup"))


def test_differing_answers_of_a_lossy_method_are_no_fault(results):
    text = render_report(results)
    assert (
        f"{TYPICAL}: 3 of 12 answers are identical to plain decoding's; it is not meant to be "
        "equal, since it draws tokens at temperature 0.7 and accepts guesses that are merely "
        "likely enough."
    ) in text
    assert "prompt lookup: 12 of 12 answers are identical to plain decoding's." in text


def test_a_lossy_method_wins_nothing_though_it_is_the_fastest(results):
    text = verdict(results)
    (sentence,) = [s for s in re.split(r"(?<=\.) (?=[A-Z])", text) if "typical" in s]
    assert sentence == (
        f"{TYPICAL} ran at 4.00 [4.00, 4.00] times the speed of plain decoding, but its answers "
        "may differ from plain decoding's, so it is compared with no other method."
    )


def test_the_verdict_compares_medusa_with_every_lossless_one(results):
    text = verdict(results)
    assert "Prompt lookup is faster than plain decoding: 1.60" in text
    assert f"The {ADAPTIVE} is faster than plain decoding: 2.50" in text
    assert "The best draft model of fixed gamma (gamma 2) is faster than plain" in text
    assert "Medusa is faster than the best draft model of fixed gamma: 1.60" in text
    assert "Medusa is faster than prompt lookup: 1.25" in text
    assert f"Medusa is slower than the {ADAPTIVE}: 0.80" in text
    assert "of fixed gamma" not in verdict(build("lookup"))


def test_a_handful_of_prompts_decides_nothing_of_them_either(results):
    few = replace(results, model=replace(results.model, num_prompts=3))
    assert not re.search("is (faster|slower)", verdict(few))


def test_pictures_show_them(results):
    axes = plots._speedup_figure(results).axes[0]
    labels = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    assert labels[-3:] == ["prompt lookup", "draft adaptive", "Medusa typical (lossy)"]
    heights = [bar.get_height() for bar in axes.patches]  # pyright: ignore
    assert heights[-3:] == pytest.approx([1.6, 2.5, 4.0])
    assert len({bar.get_facecolor() for bar in axes.patches}) == 6

    axes = plots._acceptance_figure(results).axes[0]
    lines = [line.get_label() for line in axes.lines]
    assert lines[2:] == ["prompt lookup", ADAPTIVE, TYPICAL]
    assert axes.get_xlim()[1] == pytest.approx(8.3)  # no step accepted more than 8


def test_the_headline_has_their_numbers_and_says_which_are_lossy(results):
    found = _headline(results)
    assert found["lookup/speedup"] == pytest.approx(1.6)
    assert found["draft_adaptive/tokens_per_step"] == pytest.approx(3)
    assert found["medusa_typical_lossy/speedup"] == pytest.approx(4)
    assert not any(name.startswith("medusa_typical/") for name in found)
