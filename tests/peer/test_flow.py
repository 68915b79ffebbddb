"""One transfer under way, over a played line."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.linkcontrol import LinkControl
from dugnad.averaging.linkrate import LinkRate
from dugnad.dht.ids import PeerId
from dugnad.peer.flow import PACE, QUEUE_S, WINDOW_BYTES_MIN, Flow
from dugnad.peer.ratelimit import BURST_S

STEP = 16 << 10
RTT_S = 0.08
HOME = PeerId(bytes(32))


@dataclass
class Line:
    """Carries one step after the other, at a rate that the time decides."""

    rate_at: Callable[[float], float]
    free_at: float = 0.0
    longest_queue_s: float = 0.0

    def carry(self, size: int, now: float) -> float:
        """When the word of its arrival is back."""
        begin = max(now, self.free_at)
        self.longest_queue_s = max(self.longest_queue_s, begin - now)
        self.free_at = begin + size / self.rate_at(begin)
        return self.free_at + RTT_S


def _noisy(rng: random.Random, rate: float, at: float) -> float:
    return rate * rng.uniform(0.9, 1.1)


def send(flow: Flow, line: Line, size: int, now: float) -> float:
    """Send `size` bytes as the flow allows; when the last word of them came."""
    words: list[tuple[float, int]] = []
    left, total = size, 0
    while left or words:
        part = min(STEP, flow.room(), left)
        if part and part in (STEP, left):
            now += flow.sent(part, now)
            left, total = left - part, total + part
            heapq.heappush(words, (line.carry(part, now), total))
        while words and (words[0][0] <= now or not (left and flow.room() >= min(STEP, left))):
            at, arrived = heapq.heappop(words)
            now = max(now, at)
            flow.arrived(arrived, now)
    return now


def test_a_known_line_is_filled_and_what_waits_in_it_is_bounded() -> None:
    line = Line(lambda now: 250_000.0)
    flow = Flow(LinkRate(250_000.0), RTT_S, 0.0)
    end = send(flow, line, 2_000_000, 0.0)
    assert end == pytest.approx(2_000_000 / (PACE * 250_000.0), rel=0.1)
    assert line.longest_queue_s <= RTT_S + QUEUE_S
    found = flow.delivery(end)
    assert found.telling
    assert found.rate == pytest.approx(250_000.0, rel=0.05)


def test_once_the_rate_is_known_nothing_queues() -> None:
    line = Line(lambda now: 250_000.0)
    flow = Flow(LinkRate(250_000.0), RTT_S, 0.0)
    now = send(flow, line, 1_000_000, 0.0)
    line.longest_queue_s = 0.0
    for _ in range(100):  # the same transfer goes on
        now += flow.sent(STEP, now)
        arrived = line.carry(STEP, now)
        line.longest_queue_s = max(line.longest_queue_s, arrived - now - RTT_S)
    assert line.longest_queue_s < BURST_S + 2 * STEP / 250_000.0


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_a_line_that_changed_is_known_after_one_transfer(factor: float) -> None:
    rate = 250_000.0 * factor
    line = Line(lambda now: rate)
    flow = Flow(LinkRate(250_000.0), RTT_S, 0.0)
    end = send(flow, line, 600_000, 0.0)
    assert flow.delivery(end).rate == pytest.approx(rate, rel=0.15)
    assert line.longest_queue_s <= (RTT_S + QUEUE_S) / min(factor, 1.0)


def test_a_line_that_halves_in_the_middle_is_noticed_before_the_end() -> None:
    line = Line(lambda now: 500_000.0 if now < 3.0 else 250_000.0)
    flow = Flow(LinkRate(500_000.0), RTT_S, 0.0)
    end = send(flow, line, 3_000_000, 0.0)
    assert flow.delivery(end).rate == pytest.approx(250_000.0, rel=0.15)


def test_a_quick_line_taken_for_slow_is_found_out() -> None:
    line = Line(lambda now: 12_500_000.0)
    flow = Flow(LinkRate(), RTT_S, 0.0)
    end = send(flow, line, 20_000_000, 0.0)
    assert flow.delivery(end).rate > 2_000_000.0


def test_a_transfer_that_its_owner_held_up_is_no_word_about_the_line() -> None:
    flow = Flow(LinkRate(1e6), RTT_S, 0.0)
    flow.sent(1000, 0.0)
    flow.paused()
    flow.arrived(1000, 5.0)
    assert not flow.delivery(5.0).telling


def test_a_transfer_that_took_hardly_longer_than_its_way_is_no_word_either() -> None:
    flow = Flow(LinkRate(1e6), RTT_S, 0.0)
    flow.sent(1000, 0.0)
    flow.arrived(1000, 0.1)
    assert not flow.delivery(0.1).telling


def test_a_few_bytes_that_overtake_the_usual_round_trip_are_no_word_of_a_quick_line() -> None:
    link = LinkRate(25_000.0)
    flow = Flow(link, 0.5, 0.0)  # its heartbeats had to wait behind something
    flow.sent(8_000, 0.0)
    flow.arrived(8_000, 0.1)
    link.learn(flow.delivery(0.1))
    assert link.rate <= 8_000 / 0.1


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.floats(0.0, 1.0)), max_size=40))
def test_false_words_of_progress_never_open_the_window_further(
    words: list[tuple[int, float]],
) -> None:
    flow, now, sent = Flow(LinkRate(1e5), RTT_S, 0.0), 0.0, 0
    for total, pause in words:
        size = min(STEP, flow.room())
        flow.sent(size, now)
        sent += size
        now += pause
        flow.arrived(total, now)
        assert 0 <= flow.under_way <= sent
        assert flow.room() <= max(flow.window, WINDOW_BYTES_MIN)


@pytest.mark.parametrize("seed", range(6))
def test_rates_that_halve_and_double_are_followed_within_two_hand_ins(seed: int) -> None:
    """Control, flow and line together: the codec chosen is through before the next is due."""
    rng = random.Random(seed)
    sizes, seconds = (500_000,), 5.0
    control, now, rate = LinkControl(sizes), 0.0, 500_000.0
    for number in range(60):
        if number and number % 5 == 0:
            rate *= 0.5 if rate > 1e6 or (rate > 1.3e5 and rng.random() < 0.5) else 2.0
        chosen = control.hand_in(0, HOME, seconds)
        if number % 5 >= 2:
            assert chosen.size / rate <= seconds
            assert control.rate_to(HOME) == pytest.approx(rate, rel=0.35)
        line = Line(partial(_noisy, rng, rate))
        flow = Flow(control.link(HOME), RTT_S, now)
        end = send(flow, line, chosen.size, now)
        control.delivered(HOME, flow.delivery(end))
        now += seconds
