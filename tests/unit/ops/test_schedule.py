import pytest

from medusa_train.ops.schedule import lr_factor


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_rises_to_the_peak_and_never_trains_with_zero(schedule):
    factors = [lr_factor(s, total=10, warmup=4, schedule=schedule) for s in range(10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors == sorted(factors[:4]) + sorted(factors[4:], reverse=True)
    assert factors[-1] > 0


def test_half_way_values():
    assert lr_factor(5, total=10, warmup=0, schedule="linear") == 0.5
    assert lr_factor(5, total=10, warmup=0, schedule="cosine") == pytest.approx(0.5)
    assert lr_factor(5, total=10, warmup=0, schedule="constant") == 1.0


def test_past_the_end_it_is_zero():
    assert lr_factor(99, total=10, warmup=0, schedule="linear") == 0
    assert lr_factor(99, total=10, warmup=0, schedule="cosine") == 0


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="'step'"):
        lr_factor(1, total=2, warmup=0, schedule="step")
