"""The emulated network's core: rates, delays, losses, queues and partitions, without any socket."""

from __future__ import annotations

import random

import pytest
from _wan import Line, Wan

PACKET = bytes(1250)  # 10 kbit: a millisecond at 10 Mbit/s


def wan(*lines: Line, seed: int = 1) -> Wan:
    return Wan(lines, random.Random(seed))


def delivered(net: Wan) -> list[tuple[float, int]]:
    """(when, to whom) of everything that is under way."""
    found = []
    while (due := net.due()) is not None:
        found += [(due, host) for host, _ in net.take(due)]
    return found


def test_a_packet_takes_both_delays_and_the_time_of_both_lines() -> None:
    net = wan(Line(10, 99, 20), Line(99, 5, 30))
    net.offer(1.0, 0, 1, PACKET)
    assert net.due() == pytest.approx(1.0 + 0.001 + 0.050)
    ((at, host),) = delivered(net)
    assert host == 1
    assert at == pytest.approx(1.0 + 0.001 + 0.050 + 0.002)


def test_a_burst_comes_out_at_the_rate_of_the_slower_line() -> None:
    net = wan(Line(100, 100), Line(100, 10))
    for _ in range(50):
        net.offer(0.0, 0, 1, PACKET)
    times = [at for at, _ in delivered(net)]
    assert len(times) == 50
    assert times[-1] - times[0] == pytest.approx(49 * 0.001)


def test_two_senders_share_the_line_of_their_receiver() -> None:
    net = wan(Line(100, 100), Line(100, 100), Line(100, 10))
    for _ in range(20):
        net.offer(0.0, 0, 2, PACKET)
        net.offer(0.0, 1, 2, PACKET)
    assert delivered(net)[-1][0] >= 0.040


def test_a_full_queue_drops_what_comes_last_and_counts_it() -> None:
    net = wan(Line(10, 10, queue_ms=10), Line())
    for _ in range(100):
        net.offer(0.0, 0, 1, PACKET)
    assert len(delivered(net)) == pytest.approx(11, abs=1)
    assert net.counts[0].dropped == pytest.approx(89, abs=1)


def test_loss_takes_its_share_and_the_same_seed_the_same_packets() -> None:
    runs = []
    for _ in range(2):
        net = wan(Line(1000, 1000, loss=0.1, queue_ms=1e6), Line(1000, 1000, queue_ms=1e6), seed=7)
        for number in range(2000):
            net.offer(number / 100.0, 0, 1, PACKET)
        assert len(delivered(net)) == 2000 - net.counts[0].lost
        runs.append(net.counts[0].lost)
    assert runs[0] == runs[1]
    assert 140 < runs[0] < 260


def test_a_partition_stops_what_is_sent_and_what_is_under_way_until_it_is_healed() -> None:
    net = wan(Line(delay_ms=50), Line(), Line())
    net.offer(0.0, 0, 1, PACKET)
    net.split([[0], [1, 2]])
    net.offer(0.0, 0, 2, PACKET)
    net.offer(0.0, 1, 2, PACKET)
    assert [host for _, host in delivered(net)] == [2]
    assert net.counts[0].parted == 2
    net.split([])
    net.offer(1.0, 0, 1, PACKET)
    assert [host for _, host in delivered(net)] == [1]


def test_a_line_that_changes_is_another_one_from_the_next_packet_on() -> None:
    net = wan(Line(10, 10), Line(1000, 1000))
    net.offer(0.0, 0, 1, PACKET)
    net.change(0, Line(10, 10, delay_ms=100))
    net.offer(0.0, 0, 1, PACKET)
    first, second = (at for at, _ in delivered(net))
    assert second - first == pytest.approx(0.101)


@pytest.mark.parametrize(
    "wrong", [{"up_mbit": 0}, {"down_mbit": -1}, {"delay_ms": -1}, {"loss": 1.0}, {"queue_ms": 0}]
)
def test_a_line_that_carries_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"above 0|not negative"):
        Line(**wrong)
