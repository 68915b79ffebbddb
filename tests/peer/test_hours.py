"""Hours of the week, as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.peer.hours import DAY_MINUTES, WEEK_MINUTES, Hours, day_and_time, parse_hours

TUESDAY = DAY_MINUTES


@pytest.mark.parametrize(
    ("text", "allowed", "forbidden"),
    [
        ("", [0, WEEK_MINUTES - 1], []),
        ("mon-fri 18-24", [TUESDAY + 18 * 60, TUESDAY + 1439], [TUESDAY + 1079, 5 * 1440 + 1200]),
        ("22:30-6", [0, 359, 1350, WEEK_MINUTES - 1], [360, 1349]),
        ("sun 23-1", [WEEK_MINUTES - 60, 59], [60, WEEK_MINUTES - 61]),
        ("sat-mon 0-24", [0, 5 * 1440, 6 * 1440], [TUESDAY, 5 * 1440 - 1]),
        ("tue 8-9, tue 12-13", [TUESDAY + 480, TUESDAY + 779], [TUESDAY + 540, TUESDAY + 780]),
    ],
)
def test_hours_are_read_as_they_are_meant(
    text: str, allowed: list[int], forbidden: list[int]
) -> None:
    hours = parse_hours(text)
    assert [minute for minute in allowed if not hours.allow(minute)] == []
    assert [minute for minute in forbidden if hours.allow(minute)] == []


@pytest.mark.parametrize(
    "text", ["noon", "25-26", "8-8", "24-3", "8:60-9", "foo 8-9", "mon 8", "8-9," * 70]
)
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not|no length|at most"):
        parse_hours(text)


def test_the_next_change_is_told() -> None:
    hours = parse_hours("mon-fri 18-24, sat-sun 0-24")
    assert hours.next_change(TUESDAY) == 18 * 60
    assert day_and_time(TUESDAY + hours.next_change(TUESDAY)) == "tue 18:00"
    assert hours.next_change(TUESDAY + 18 * 60) == 6 * 60
    assert hours.next_change(4 * 1440 + 18 * 60) == 6 * 60 + 2 * 1440  # friday evening to monday
    assert Hours().next_change(5) == 0
    assert parse_hours("0-24").next_change(7) == 0


@given(st.integers(0, 23), st.integers(1, 24), st.integers(0, WEEK_MINUTES - 1))
def test_every_day_has_the_same_hours_when_no_day_is_named(a: int, b: int, minute: int) -> None:
    if a == b:
        return
    hours = parse_hours(f"{a}-{b}")
    assert hours.minutes == 7 * ((b - a) % 24 or 24) * 60
    assert hours.allow(minute) == hours.allow((minute + DAY_MINUTES) % WEEK_MINUTES)
    later = (minute + hours.next_change(minute)) % WEEK_MINUTES
    assert hours.minutes == WEEK_MINUTES or hours.allow(later) != hours.allow(minute)
