"""How fast a machine is said to be."""

import pytest

from dugnad.peer.pace import FIRST_WINDOW_S, WINDOW_S, Pace


def test_a_probe_at_full_speed_counts_by_the_share_that_may_be_used() -> None:
    pace = Pace(0.0)
    assert pace.tokens_per_s == 0.0
    pace.estimate(30_000.0, 0.08)
    assert pace.tokens_per_s == pytest.approx(2400.0)


def test_the_first_measurement_replaces_the_estimate_and_later_ones_are_averaged() -> None:
    pace = Pace(0.0)
    pace.estimate(30_000.0, 1.0)
    pace.begin(10.0, 0)
    assert not pace.count(10.0 + FIRST_WINDOW_S / 2, 1000)
    assert pace.tokens_per_s == 30_000.0
    assert pace.count(10.0 + FIRST_WINDOW_S, 2000)
    assert pace.tokens_per_s == 1000.0
    assert not pace.count(10.0 + FIRST_WINDOW_S + WINDOW_S / 2, 9000)
    assert pace.count(10.0 + FIRST_WINDOW_S + WINDOW_S, 2000 + int(2000 * WINDOW_S))
    assert pace.tokens_per_s == pytest.approx(1300.0)


def test_a_later_probe_does_not_undo_what_was_measured_and_a_rest_is_not_counted() -> None:
    pace = Pace(0.0)
    pace.count(FIRST_WINDOW_S, 2000)
    pace.estimate(99.0, 1.0)
    pace.begin(500.0, 2000)
    assert not pace.count(500.1, 2100)
    assert pace.tokens_per_s == 1000.0
