"""Speed classes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.speed import (
    CLASS_MAX,
    CLASS_MIN,
    class_speed,
    class_speed_max,
    class_weight,
    speed_class,
)


def test_a_class_step_is_a_factor_of_root_two() -> None:
    assert [speed_class(2 ** (c / 2), None) for c in range(0, 40)] == list(range(0, 40))
    assert class_speed(0) == 1.0
    assert class_speed(20) == 1024.0
    assert class_speed(21) / class_speed(20) == pytest.approx(math.sqrt(2))
    assert class_speed(-3) == pytest.approx(2**-1.5)


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_the_speed_of_the_class_is_within_a_quarter_step_of_the_speed(speed: float) -> None:
    assert 2**-0.26 < class_speed(speed_class(speed, None)) / speed < 2**0.26


def test_a_small_change_of_speed_keeps_the_class_and_a_clear_one_changes_it() -> None:
    assert speed_class(2 ** (20.74 / 2), 20) == 20
    assert speed_class(2 ** (19.26 / 2), 20) == 20
    assert speed_class(2 ** (20.76 / 2), 20) == 21
    assert speed_class(2 ** (19.24 / 2), 20) == 19
    assert speed_class(2 ** (30 / 2), 20) == 30


@given(st.floats(min_value=1e-6, max_value=1e12), st.integers(CLASS_MIN, CLASS_MAX))
def test_an_honest_peer_is_never_faster_than_its_class_allows(speed: float, before: int) -> None:
    assert speed <= class_speed_max(speed_class(speed, before)) * (1 + 1e-12)


def test_impossible_speeds_have_a_class_too() -> None:
    for speed in (0.0, -1.0, math.nan):
        assert speed_class(speed, 7) == CLASS_MIN
    assert speed_class(math.inf, None) == CLASS_MAX
    assert class_speed(10**9) == class_speed(CLASS_MAX)


def test_weights_are_proportional_to_speeds() -> None:
    for c in range(CLASS_MIN, CLASS_MAX + 1):
        assert class_weight(c) / 2**48 == pytest.approx(class_speed(c), rel=1e-4)
        assert class_weight(c) >= 1
    assert class_weight(7) < class_weight(8)
