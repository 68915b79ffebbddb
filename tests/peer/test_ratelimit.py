"""Bytes a second, and bytes a month."""

from hypothesis import given
from hypothesis import strategies as st

from dugnad.peer.ratelimit import BURST_S, DAY_MS, DAYS_KEPT, Bucket, Usage


def test_no_rate_is_no_limit() -> None:
    bucket = Bucket()
    assert bucket.take(10**12, 0.0) == 0.0
    assert bucket.step(10**9) == 10**9


@given(
    rate=st.floats(1e3, 1e9),
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=50),
    pauses=st.lists(st.floats(0, 1), min_size=50, max_size=50),
)
def test_the_mean_rate_holds_whatever_the_steps(
    rate: float, sizes: list[int], pauses: list[float]
) -> None:
    bucket, now, moved = Bucket(rate), 0.0, 0
    for size, pause in zip(sizes, pauses, strict=False):
        now += bucket.take(size, now)  # waits, then moves
        moved += size
        assert moved <= (now + BURST_S) * rate * (1 + 1e-9) + 1
        now += pause


def test_a_bucket_that_rested_gives_no_more_than_a_burst() -> None:
    bucket = Bucket(1000.0)
    assert bucket.take(100, 0.0) == 0.0
    assert bucket.take(100, 1000.0) == 0.0
    assert bucket.take(100, 1000.0) == 0.1
    assert bucket.step(10**6) == 1024


def test_traffic_is_counted_by_day_and_forgotten_after_a_month() -> None:
    usage = Usage()
    usage.count(100, 0)
    usage.count(150, DAY_MS)
    usage.count(150, 2 * DAY_MS)
    assert usage.within(30, 2 * DAY_MS) == 150
    assert usage.within(2, 2 * DAY_MS) == 50
    usage.count(150, (DAYS_KEPT + 1) * DAY_MS)
    assert usage.days == {}


def test_a_new_daemon_counts_on_from_what_the_disk_holds() -> None:
    usage = Usage({10: 7})
    usage.count(5, 10 * DAY_MS)
    assert usage.within(1, 10 * DAY_MS) == 12
