"""The pace of all bulk data together, over a played line."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.peer.uplink import RATE_MIN, STALLED_S, UNDER_WAY_MIN, Uplink

TICK_S = 0.02
RTT_S = 0.08
STREAMS = 4


class Line:
    """A sender that always has more, over a line that carries first come, first served."""

    def __init__(self, rate_at: Callable[[float], float]) -> None:
        self.uplink, self.rate_at = Uplink(), rate_at
        self.now, self.free_at, self.next_at = 0.0, 0.0, 0.0
        self.under_way: list[tuple[float, int, int]] = []
        self.queues: list[float] = []
        self.carried = 0
        self._turn = 0

    def run(self, seconds: float) -> float:
        """Send for so long; bytes a second that arrived."""
        end, before, began = self.now + seconds, self.carried, self.now
        while self.now < end:
            self._arrive()
            self._send()
            self.now += TICK_S
        return (self.carried - before) / (self.now - began)

    def _send(self) -> None:
        while self.next_at <= self.now:
            size = min(32 << 10, self.uplink.step(32 << 10))
            if self.uplink.room(self.now) < min(size, 16 << 10):
                return
            self._turn = (self._turn + 1) % STREAMS
            self.next_at = self.now + self.uplink.take(size, self.now)
            begin = max(self.next_at, self.free_at)
            self.queues.append(begin - self.next_at)
            self.free_at = begin + size / self.rate_at(begin)
            self.under_way.append((self.free_at + RTT_S, self._turn, size))
            self._tell(self._turn, 0)

    def _arrive(self) -> None:
        for row in [one for one in self.under_way if one[0] <= self.now]:
            self.under_way.remove(row)
            self.carried += row[2]
            self._tell(row[1], row[2])

    def _tell(self, stream: int, arrived: int) -> None:
        left = sum(size for _, one, size in self.under_way if one == stream)
        self.uplink.moved(stream, arrived, left, self.now)


def test_an_unknown_line_is_slow_at_first_and_a_quick_one_shows_within_seconds() -> None:
    line = Line(lambda now: 12_500_000.0)
    assert line.uplink.rate == SLOW_BYTES_PER_S
    line.run(4.0)
    assert line.uplink.rate > 3_000_000.0


def test_a_home_line_is_used_and_little_waits_in_it() -> None:
    line = Line(lambda now: 250_000.0)
    line.run(5.0)
    line.queues.clear()
    assert line.run(30.0) > 0.8 * 250_000.0
    assert line.uplink.full
    assert sorted(line.queues)[int(0.99 * len(line.queues))] < 0.3


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_line_that_halves_or_doubles_is_followed_within_five_seconds_of_sending(
    factor: float,
) -> None:
    line = Line(lambda now: 250_000.0 * (factor if now > 10.0 else 1.0))
    line.run(10.0)
    line.run(5.0)
    assert line.uplink.rate == pytest.approx(250_000.0 * factor, rel=0.35)
    line.queues.clear()
    line.run(10.0)
    assert max(line.queues) < 0.6


def test_a_line_that_all_but_stood_still_for_a_while_is_soon_used_again() -> None:
    line = Line(lambda now: 20_000.0 if 10.0 < now < 12.0 else 250_000.0)
    line.run(12.0)
    line.run(1.0)  # what was sent meanwhile takes its time
    assert line.uplink.rate < 0.1 * 250_000.0
    line.queues.clear()
    line.run(2.0)
    assert line.uplink.rate > 0.4 * 250_000.0
    line.run(8.0)
    assert line.uplink.rate == pytest.approx(250_000.0, rel=0.35)
    assert max(line.queues) < 0.3


def test_a_noisy_line_neither_starves_nor_floods() -> None:
    rng = random.Random(1)
    line = Line(lambda now: 250_000.0 * rng.uniform(0.5, 1.5))
    line.run(5.0)
    assert line.run(60.0) > 0.6 * 250_000.0


def test_a_stream_that_waits_for_a_lost_packet_does_not_hold_up_the_others() -> None:
    uplink = Uplink()
    uplink.moved(1, 0, UNDER_WAY_MIN, 0.0)
    assert uplink.room(0.1) == 0
    uplink.moved(2, 0, 1000, STALLED_S)
    assert uplink.room(STALLED_S) == UNDER_WAY_MIN - 1000
    uplink.moved(1, 100, UNDER_WAY_MIN - 100, STALLED_S)
    assert uplink.room(STALLED_S) == 0


def test_a_line_on_which_nothing_moves_gets_no_more() -> None:
    uplink = Uplink()
    uplink.moved(1, 0, UNDER_WAY_MIN, 0.0)
    assert uplink.room(100.0) == 0


def test_many_streams_that_wait_for_their_turn_are_no_queue_in_the_line() -> None:
    """Found in the demo: a seed that served a dozen shards at once paced itself down to nothing."""
    uplink, now = Uplink(), 0.0
    streams, step = 24, uplink.step(1 << 20)
    while now < 4.0:
        for stream in range(streams):  # the line takes at once whatever had its turn
            uplink.moved(stream, step, 0, now, waiting=step)
            uplink.take(step, now)
        if now == 0.0:
            assert uplink.room(now) == 0, "they do take up room"
        now += 0.1
    assert uplink.rate > 8 * SLOW_BYTES_PER_S
    for stream in range(streams):
        uplink.ended(stream)
    assert uplink.room(now) >= UNDER_WAY_MIN


def test_a_stream_that_ended_takes_no_room() -> None:
    uplink = Uplink()
    uplink.moved(1, 0, UNDER_WAY_MIN, 0.0)
    uplink.ended(1)
    assert uplink.room(0.0) == UNDER_WAY_MIN
    uplink.ended(1)


def test_the_pace_never_falls_below_a_modems() -> None:
    line = Line(lambda now: 100.0)
    line.run(20.0)
    assert line.uplink.rate >= RATE_MIN
