"""Measurements over time in bounded memory."""

from dugnad.dashboard.series import (
    DAYS_MAX,
    HOURS_MAX,
    MINUTES_MAX,
    RECENT_MAX,
    Point,
    Series,
)


def series(times_s: range) -> Series:
    """A value at each of these seconds, equal to the second."""
    made = Series()
    for second in times_s:
        made = made.add(Point.of(second * 1000, second, float(second)))
    return made


def test_roll_ups_have_the_mean_and_the_extremes() -> None:
    made = series(range(120))
    assert [(p.value, p.low, p.high, p.n) for p in made.minutes] == [
        (29.5, 0, 59, 60),
        (89.5, 60, 119, 60),
    ]
    assert made.days[0].n == 120


def test_old_values_stay_as_roll_ups_and_memory_is_bounded() -> None:
    made = series(range(0, 86_400 * 3, 20))
    assert len(made.recent) == RECENT_MAX
    assert len(made.minutes) == MINUTES_MAX
    assert len(made.hours) == 72
    assert len(made.points()) <= RECENT_MAX + MINUTES_MAX + HOURS_MAX + DAYS_MAX


def test_points_rise_and_reach_from_the_first_to_the_last() -> None:
    points = series(range(0, 86_400 * 3, 20)).points()
    assert [p.at_ms for p in points] == sorted({p.at_ms for p in points})
    assert points[0].at_ms < 3_600_000
    assert points[-1].value == 86_400 * 3 - 20


def test_a_clock_that_went_back_does_not_disturb_the_order() -> None:
    made = series(range(10)).add(Point.of(0, 11, 1.0))
    assert made.recent[-1].at_ms == 9000


def test_the_mean_is_of_the_window_and_none_is_not_zero() -> None:
    made = series(range(10))
    assert made.mean(9000, 2000) == 8.0
    assert made.mean(10**9, 2000) is None
    assert Series().last is None
