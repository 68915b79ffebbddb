"""What a link carries, learned from what it carried."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.linkrate import RATE_MAX, Delivery, LinkRate
from dugnad.dht.advert import SLOW_BYTES_PER_S


def test_an_unknown_link_counts_as_slow() -> None:
    assert LinkRate().assumed == SLOW_BYTES_PER_S


def test_the_first_transfer_is_believed() -> None:
    link = LinkRate()
    link.learn(Delivery(1_000_000, 0.5))
    assert link.assumed == 2_000_000


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_transfers_follow_a_line_that_halved_or_doubled(factor: float) -> None:
    link = LinkRate(1e6)
    for _ in range(2):
        link.learn(Delivery(500_000, 500_000 / (factor * 1e6)))
    assert link.rate == pytest.approx(factor * 1e6, rel=0.1)


def test_a_transfer_that_was_held_up_can_only_raise_the_estimate() -> None:
    link = LinkRate(1e6)
    link.learn(Delivery(100_000, 1.0, telling=False))
    assert link.rate == 1e6
    link.learn(Delivery(2_000_000, 1.0, telling=False))
    assert link.rate > 1e6
    fresh = LinkRate()
    fresh.learn(Delivery(1000, 1.0, telling=False))
    assert fresh.rate == 0.0, "less than what an unknown link is taken for says nothing"


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(-5, 10**12), st.floats(allow_nan=True, allow_infinity=True), st.booleans()
        ),
        max_size=30,
    )
)
def test_no_transfer_makes_the_rate_negative_or_endless(
    rows: list[tuple[int, float, bool]],
) -> None:
    link = LinkRate()
    for size, seconds, telling in rows:
        link.learn(Delivery(size, seconds, telling))
        assert math.isfinite(link.rate)
        assert 0.0 <= link.rate <= RATE_MAX
