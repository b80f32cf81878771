import json
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import pytest

from medusa_train.decode.generation import Generation
from medusa_train.errors import DataError
from medusa_train.evaluate import results_schema
from medusa_train.evaluate.results import build_results, read_results, write_results
from medusa_train.evaluate.results_schema import DraftInfo, HeadsInfo, ModelInfo, TreeInfo, TreeSize
from medusa_train.evaluate.statistics import Measurement

DOCUMENT = Path(__file__).parents[3] / "docs" / "results.md"

# Per prompt: kept ids, accepted drafts of each step, decode seconds. The prefill takes 0.5 s.
PLAIN = [([1, 2, 3, 4, 5], [0] * 4, 2.0), ([6, 7, 8], [0] * 2, 1.0)]
MEDUSA = [([1, 2, 3, 4, 5], [1, 1], 1.0), ([6, 7, 8], [2], 0.5)]
SLOW_DRAFT = [([1, 2, 3, 4, 5], [1, 1], 2.0), ([6, 7, 8], [1], 1.0)]
FAST_DRAFT = [([1, 2, 9, 4, 5], [3], 1.0), ([6, 7], [0, 0], 0.5)]


def measurements(answers, prefill=0.5):
    return [
        Measurement(
            prompt_id=f"p{i}",
            kind="code" if i else "write",
            generation=Generation(
                ids=ids,
                finish_reason="length",
                accepted=accepted,
                prefill_seconds=prefill,
                decode_seconds=seconds,
            ),
        )
        for i, (ids, accepted, seconds) in enumerate(answers)
    ]


def gap(prompt_id, shared, one, other):
    """Enough to see what was asked."""
    assert prompt_id == "p0"
    return 100 * one + other + len(shared) / 10


MODEL = ModelInfo(
    name="tiny",
    dtype="float32",
    device="cpu",
    parameters=1000,
    bytes=4000,
    max_new_tokens=5,
    num_prompts=2,
)
HEADS = HeadsInfo(
    architecture="2 heads x 1 layer",
    parameters=10,
    bytes=40,
    top1=[0.5, 0.25],
    top5=[0.75, 0.5],
    training_tokens=500,
    training_seconds=7.5,
)
DRAFT = DraftInfo(
    architecture="2 layers",
    parameters=20,
    bytes=80,
    training_tokens=None,
    training_seconds=None,
)
TREE = TreeInfo(
    nodes=3,
    depth=2,
    paths=[[0], [1], [0, 0]],
    chosen=[TreeSize(nodes=3, tokens_per_step=2.4, step_ms=600.0, speedup=2.0)],
)
PROVENANCE = {"created": "2025-01-01T00:00:00+00:00", "versions": {"torch": "2"}, "command": "x"}

ALL = {
    "plain": measurements(PLAIN),
    "medusa": measurements(MEDUSA),
    "draft_model/gamma=10": measurements(SLOW_DRAFT),
    "draft_model/gamma=3": measurements(FAST_DRAFT),
}


def build(measured=ALL, **changes):
    blocks = {"model": MODEL, "heads": HEADS, "draft": DRAFT, "tree": TREE} | changes
    settings = {
        "others": {},
        "gap": gap,
        "provenance": PROVENANCE,
        "bootstrap_samples": 400,
        "seed": 0,
    }
    return build_results(measured, **(settings | blocks))


def only(*names):
    return {name: ALL[name] for name in names}


def test_medusa_by_hand():
    found = build().methods.medusa
    assert (found.tokens, found.steps, found.tree_nodes) == (8, 3, 3)
    assert (found.prefill_seconds, found.decode_seconds, found.seconds) == (1.0, 1.5, 2.5)
    assert found.tokens_per_second == pytest.approx(8 / 2.5)
    assert found.tokens_per_step == pytest.approx(7 / 3)
    assert found.accepted_drafts_per_step == pytest.approx(4 / 3)
    assert found.step_ms == pytest.approx(500)
    assert found.overhead == pytest.approx(1.0)
    assert found.speedup == pytest.approx((8 / 2.5) / (8 / 4))
    assert found.residual == pytest.approx(1.6 / (7 / 3) - 1)
    assert found.acceptance_by_depth == pytest.approx([1.0, 1 / 3])
    # The two prompts alone: (5 / 1.5) / (5 / 2.5) and (3 / 1.0) / (3 / 1.5).
    assert found.speedup_by_kind["write"].speedup == pytest.approx(2.5 / 1.5)
    assert found.speedup_by_kind["code"].speedup == pytest.approx(1.5)
    assert found.speedup_by_kind["code"].prompts == 1
    assert found.speedup_ci95 == pytest.approx((1.5, 2.5 / 1.5))
    assert (found.extra_memory_bytes, found.training_tokens, found.training_seconds) == (
        40,
        500,
        7.5,
    )


def test_overhead_is_a_ratio_of_step_times_not_of_answers():
    slower = [(ids, accepted, 3 * seconds) for ids, accepted, seconds in MEDUSA]
    found = build(ALL | {"medusa": measurements(slower)}).methods.medusa
    assert found.overhead == pytest.approx(3.0)
    assert found.residual == pytest.approx(found.speedup / (found.tokens_per_step / 3.0) - 1)


def test_plain_is_the_reference():
    found = build().methods.plain
    assert (found.speedup, found.speedup_ci95) == (1.0, (1.0, 1.0))
    assert (found.tokens_per_step, found.overhead, found.residual) == (1.0, 1.0, 0.0)
    assert (found.extra_memory_bytes, found.training_tokens) == (0, 0)
    assert found.exactness.identical == 2
    assert found.verification.startswith("reference")


def test_fastest_gamma_is_the_baseline():
    results = build()
    assert results.methods.draft_model.gamma == 3
    assert results.methods.draft_model.speedup == pytest.approx((7 / 2.5) / (8 / 4))
    assert list(results.draft.by_gamma) == ["3", "10"]
    # gamma 3 accepted 3 0 0 of 3 1 1 tested; gamma 10 accepted 1 1 1 of 2 2 2 tested.
    assert results.draft.acceptance_rate == pytest.approx(3 / 5)
    assert results.draft.by_gamma["10"].acceptance_rate == pytest.approx(1 / 2)
    assert results.draft.by_gamma["10"].speedup == pytest.approx(1.0)
    assert results.draft.training_tokens is None
    assert results.comparison.medusa_over_draft.ratio == pytest.approx(8 / 7)


def test_exactness_lists_the_differing_answers():
    results = build()
    draft = results.methods.draft_model
    assert (draft.exactness.prompts, draft.exactness.identical) == (2, 0)
    assert draft.exactness.first_difference == [2, 2]
    assert draft.exactness.differing_prompts == ["p0", "p1"]
    # The second answer merely ends sooner
    assert draft.exactness.gaps == [100 * 9 + 3 + 0.2, None]
    assert "0 of 2 answers identical" in draft.verification
    medusa = results.methods.medusa
    assert (medusa.exactness.identical, medusa.exactness.first_difference) == (2, [])
    assert "2 of 2 answers identical" in medusa.verification


def test_methods_may_be_absent():
    no_draft = build(only("plain", "medusa"), draft=None)
    assert no_draft.methods.draft_model is None
    assert no_draft.draft is None
    assert no_draft.comparison.medusa_over_draft is None
    assert no_draft.methods.medusa is not None
    no_medusa = build(only("plain", "draft_model/gamma=3"), heads=None, tree=None)
    assert no_medusa.methods.medusa is None
    assert no_medusa.comparison.medusa_over_draft is None


def test_answers_of_one_token_give_null_and_strict_json(tmp_path):
    single = measurements([([1], [], 0.0), ([2], [], 0.0)])
    results = build(dict.fromkeys(ALL, single))
    medusa = results.methods.medusa
    assert medusa.tokens_per_step is None
    assert medusa.accepted_drafts_per_step is None
    assert medusa.overhead is None
    assert medusa.residual is None
    assert medusa.step_ms is None
    assert medusa.acceptance_by_depth == []
    assert results.draft.acceptance_rate is None
    assert results.methods.draft_model.gamma == 3  # a tie goes to the smaller one
    assert medusa.speedup == pytest.approx(1.0)
    write_results(tmp_path / "results.json", results)
    assert read_results(tmp_path / "results.json") == results


def test_round_trip_keeps_everything(tmp_path):
    tuples = replace(TREE, paths=((0,), (1,), (0, 0)))  # as the settings hold them
    results = build(tree=tuples)
    path = tmp_path / "results.json"
    write_results(path, results)
    assert read_results(path) == results
    found = json.loads(path.read_text())
    assert (found["schema"], found["version"]) == ("medusa_train.results", 3)
    assert found["methods"]["medusa"]["speedup_ci95"] == list(results.methods.medusa.speedup_ci95)
    assert found["tree"]["paths"] == [[0], [1], [0, 0]]
    assert found["provenance"] == PROVENANCE
    assert found["bootstrap"] == {"samples": 400, "seed": 0}


def test_numbers_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        build(heads=replace(HEADS, top1=[float("nan"), 0.5]))
    broken = replace(build(), heads=replace(HEADS, top1=[float("inf")]))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(tmp_path / "results.json", broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 4}, "has version 4 .* reads 3.*install a newer"),
        ({"version": 2}, "has version 2 .* evaluate again"),
        ({"version": None}, "has version None"),
        ({"schema": "other"}, 'expected "schema": "medusa_train.results"'),
        ({"surprise": 1}, "surprise"),
        ({"model": {"name": "x"}}, "model.dtype"),
        ({"heads": {**asdict(HEADS), "surprise": 1}}, "heads.surprise"),
        ({"heads": {**asdict(HEADS), "bytes": "40"}}, "heads.bytes"),
        ({"heads": {**asdict(HEADS), "top1": [float("nan")]}}, "NaN is not strict JSON"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(asdict(build()) | change))
    with pytest.raises(DataError, match=message):
        read_results(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_files_that_are_no_results_are_refused(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"results\.json"):
        read_results(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_results(tmp_path / "results.json")


@pytest.mark.parametrize(
    ("measured", "changes"),
    [
        (only("plain"), {"draft": None}),
        (ALL, {"heads": None}),
        (ALL, {"tree": None}),
        (ALL, {"draft": None}),
        (only("plain", "medusa"), {}),
        (ALL, {"model": replace(MODEL, num_prompts=3)}),
        (ALL | {"medusa": ALL["medusa"][::-1]}, {}),
        (ALL | {"lookahead": ALL["medusa"]}, {}),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(measured, changes):
    with pytest.raises(ValueError):
        build(measured, **changes)


def test_every_key_is_documented():
    text = DOCUMENT.read_text()
    classes = [each for each in vars(results_schema).values() if is_dataclass(each)]
    keys = {field.name for each in classes for field in fields(each)}
    missing = sorted(key for key in keys if f"`{key}`" not in text)
    assert len(keys) > 40
    assert missing == []
