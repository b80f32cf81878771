import re
from dataclasses import replace

import pytest
from results_case import results_of, tiny_model

from medusa_train.decode.generation import Generation
from medusa_train.evaluate.report import render_report, verdict, write_report
from medusa_train.evaluate.results_schema import (
    BackboneChange,
    DraftInfo,
    HeadsInfo,
    Ratio,
    TreeInfo,
    TreeSize,
)
from medusa_train.evaluate.statistics import Measurement

PROMPTS = 12
FASTER, SLOWER, UNSURE = (1.5, (1.4, 1.6)), (0.7, (0.6, 0.8)), (0.98, (0.9, 1.06))


def measured(accepted, seconds, odd=()):
    """Twelve answers; those of the odd prompts differ from the token at that position on."""
    found = []
    for i in range(PROMPTS):
        ids = list(range(10))
        if i < len(odd):
            ids[odd[i]] = 99
        generation = Generation(
            ids=ids,
            finish_reason="length",
            accepted=accepted,
            prefill_seconds=0.1,
            decode_seconds=seconds,
        )
        kind = "code" if i % 3 else "write"
        found.append(Measurement(prompt_id=str(i), kind=kind, generation=generation))
    return found


def base(*, medusa=True, draft=True):
    methods = {"plain": measured([0] * 9, 0.9)}
    if medusa:
        methods["medusa"] = measured([2, 2, 2], 0.4, odd=[3, 7])
    if draft:
        methods["draft_model/gamma=2"] = measured([1, 1, 1, 1, 0], 0.8)
        methods["draft_model/gamma=3"] = measured([2, 2, 1, 0], 0.7)
    heads = HeadsInfo(
        architecture="2 heads | reduced",
        parameters=1,
        bytes=2_500_000,
        top1=[0.612, 0.4],
        top5=[0.8, 0.66],
        training_tokens=123_456,
        training_seconds=61.7,
    )
    weights = DraftInfo(
        architecture="3 layers",
        parameters=1,
        bytes=40_000_000,
        training_tokens=None,
        training_seconds=None,
    )
    size = TreeSize(nodes=8, tokens_per_step=2.25, step_ms=31.4, speedup=1.72)
    return results_of(
        methods,
        tiny_model(PROMPTS, dtype="bfloat16", parameters=1234, bytes=5_000_000),
        heads=heads if medusa else None,
        draft=weights if draft else None,
        tree=TreeInfo(nodes=8, depth=2, paths=[[0]], chosen=[size]) if medusa else None,
        provenance={
            "time": "2025-01-01T00:00:00+00:00",
            "packages": {"torch": "2.0", "numpy": "2.4"},
            "hardware": {"cores": 4, "gpus": [], "disks": ["a", "b"]},
            "git": {"sha": None},
            "command": "python -m medusa_train +recipe=smoke",
        },
    )


def judged(medusa, draft, between, **model):
    """Results with the given speed-ups (value, interval): against plain, and Medusa over draft."""
    found = base()
    speedups = {
        name: replace(getattr(found.methods, name), speedup=value, speedup_ci95=interval)
        for name, (value, interval) in (("medusa", medusa), ("draft_model", draft))
    }
    return replace(
        found,
        model=replace(found.model, **model),
        methods=replace(found.methods, **speedups),
        comparison=replace(
            found.comparison, medusa_over_draft=Ratio(ratio=between[0], ci95=between[1])
        ),
    )


def test_clear_winners_are_named_with_their_intervals():
    text = verdict(judged(FASTER, FASTER, FASTER))
    assert "Medusa is faster than plain decoding: 1.50 [1.40, 1.60] times its speed." in text
    assert "The best draft model (gamma 3) is faster than plain decoding" in text
    assert "Medusa is faster than the best draft model" in text
    assert "cannot tell" not in text


def test_speedups_below_one_are_said_to_be_slower():
    text = verdict(judged(SLOWER, FASTER, SLOWER))
    assert (
        "Medusa is slower than plain decoding: 0.70 [0.60, 0.80] times its speed, below 1" in text
    )
    assert "Medusa is slower than the best draft model" in text
    assert "Medusa is faster" not in text


@pytest.mark.parametrize("between", [UNSURE, (1.3, (1.0, 1.7)), (0.9, (0.7, 1.0))])
def test_no_winner_is_named_when_the_interval_covers_one(between):
    text = verdict(judged(FASTER, FASTER, between))
    sentence = next(s for s in re.split(r"(?<=\.) (?=[A-Z])", text) if "best draft model:" in s)
    assert "cannot tell which is faster" in sentence
    assert "Medusa is faster than the best" not in text
    assert "Medusa is slower than the best" not in text


def test_an_undecided_value_below_one_is_called_that():
    text = verdict(judged(UNSURE, UNSURE, FASTER))
    assert text.count("below 1 on these prompts, but the interval covers 1") == 2
    assert "plain decoding: 0" not in text  # neither faster nor slower
    above = verdict(judged((1.02, (0.9, 1.1)), FASTER, FASTER))
    assert "below 1" not in above


@pytest.mark.parametrize(("prompts", "words"), [(1, "1 prompt is"), (9, "9 prompts are")])
def test_a_handful_of_prompts_decides_nothing(prompts, words):
    text = verdict(judged(FASTER, SLOWER, FASTER, num_prompts=prompts))
    assert text.count(f"{words} too few for an interval: this run cannot tell.") == 3
    assert "is faster" not in text
    assert "is slower" not in text


def test_rounding_never_hides_the_side_of_one():
    text = verdict(judged((1.003, (1.0004, 1.006)), FASTER, FASTER))
    assert "Medusa is faster than plain decoding: 1.0030 [1.0004, 1.0060]" in text


def test_missing_methods_are_said_to_be_missing():
    text = render_report(base(draft=False))
    assert "No draft model was measured" in text
    assert "best draft model" not in text
    assert "## Draft model by gamma" not in text
    text = render_report(base(medusa=False))
    assert "Medusa was not measured." in text
    assert "## Accuracy of the heads" not in text
    assert "## Size of the tree" not in text


def test_answers_that_run_in_circles_are_warned_of():
    found = judged(FASTER, FASTER, FASTER)
    assert "Beware" not in verdict(found)
    plain = replace(found.methods.plain, repetition_share=0.456)
    text = verdict(replace(found, methods=replace(found.methods, plain=plain)))
    assert "Beware: 46% of the tokens" in text


def test_every_table_has_its_rows():
    text = render_report(base())
    # plain 1.0 s per answer, draft 0.8 s, Medusa 0.5 s, of 10 tokens each
    assert "| plain | the backbone alone | 0.0 | 1.00 | 1.00 | 1.00 [1.00, 1.00] |" in text
    assert (
        "| Medusa, 8 nodes | 2 heads \\| reduced | 2.5 | 3.00 | 1.33 | 2.00 [2.00, 2.00] | greedy: "
        "output equals plain decoding in exact arithmetic; 10 of 12 answers identical here "
        "| 123,456 | 62 |"
    ) in text
    assert "| not known | not known |" in text  # training of the draft model
    assert "-11.1% (Medusa, 8 nodes)" in text  # 2 / (3 / (4/3)) - 1
    assert "| 0 | 2 | 61.2% | 80.0% |" in text
    assert "| 1 | 3 | 40.0% | 66.0% |" in text
    # gamma 3: 5 accepted; 3 + 3 + 2 + 1 tested
    assert "| 3 | 0.56 | 2.25 | 1.75 | 1.25 [1.25, 1.25] |" in text
    assert "| 8 | 2.25 | 31.40 | 1.72 |" in text
    assert "| code | 8 | 1.25 | 2.00 |" in text
    assert "| write | 4 | 1.25 | 2.00 |" in text


def test_a_trained_backbone_is_reported_and_a_frozen_one_is_not_spoken_of():
    frozen = base()
    assert "What became of the backbone" not in render_report(frozen)
    change = BackboneChange(
        perplexity_before=1.6, perplexity=1.64, kl=0.0123, agreement_before=1.0, agreement=0.957
    )
    joint = replace(frozen, heads=replace(frozen.heads, backbone_change=change))
    text = render_report(joint)
    assert "its perplexity is 1.640, where the original has 1.600 (+2.5%)" in text
    assert "0.0123 nats (KL)" in text
    assert "at 95.7% of the positions (the original: 100.0%)" in text


def test_tables_have_as_many_cells_as_columns():
    text = render_report(base())
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_exactness_tells_number_and_places():
    text = render_report(base())
    assert (
        "Medusa, 8 nodes: 10 of 12 answers are identical to plain decoding's; "
        "2 differ, first at token 3, 7 (from 0); at 2 of these 2 places the two tokens' logits are "
        "a near-tie, within 4 spacings of the dtype, at most 1.5."
    ) in text
    assert "draft model, gamma 3: 12 of 12 answers are identical to plain decoding's." in text
    assert "bfloat16" in text


def test_many_differing_answers_are_cut_short():
    found = base()
    wrong = replace(
        found.methods.medusa.exactness, identical=0, first_difference=list(range(100, 112))
    )
    medusa = replace(found.methods.medusa, exactness=wrong)
    text = render_report(replace(found, methods=replace(found.methods, medusa=medusa)))
    assert "0 of 12 answers are identical" in text
    assert "12 differ, first at token 100, 101" in text
    assert "109, ... (from 0)" in text


def test_how_to_reproduce_is_there():
    text = render_report(base())
    assert "\n    python -m medusa_train +recipe=smoke\n" in text
    assert "* time: 2025-01-01T00:00:00+00:00\n" in text
    assert "* packages: torch 2.0, numpy 2.4\n" in text
    assert "* hardware: cores 4, gpus none, disks a, b\n" in text
    assert "* git: sha not known\n" in text
    assert "No provenance was recorded." in render_report(replace(base(), provenance={}))


def test_numbers_that_need_steps_are_not_known_without_any():
    found = base()
    medusa = replace(
        found.methods.medusa, tokens_per_step=None, overhead=None, residual=None, step_ms=None
    )
    text = render_report(replace(found, methods=replace(found.methods, medusa=medusa)))
    assert "| 2.5 | not known | not known |" in text
    assert "not known (Medusa, 8 nodes)" in text


def test_report_links_the_pictures_beside_it(tmp_path):
    path = write_report(tmp_path, base())
    text = path.read_text()
    assert path == tmp_path / "report.md"
    links = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert links == ["speedup.png", "acceptance.png"]
    assert all((tmp_path / link).stat().st_size > 1000 for link in links)
    assert {each.name for each in tmp_path.iterdir()} == {"report.md", *links}


def test_definitions_take_five_lines():
    text = render_report(base())
    assert len(text.split("## Definitions\n\n")[1].splitlines()) == 5
