"""What heartbeats teach."""

import pytest

from dugnad.dht.heartbeat import SILENCE_LONGEST, SILENCE_MAX_S, SILENCE_MIN_S, Heartbeat


def test_regular_heartbeats_keep_the_shortest_silence() -> None:
    heartbeat = Heartbeat()
    for second in range(40):
        heartbeat.beat(float(second))
    assert heartbeat.silence_s == SILENCE_MIN_S


def test_irregular_heartbeats_allow_longer_silence_up_to_the_bound() -> None:
    heartbeat, now = Heartbeat(), 0.0
    for number in range(40):
        now += 1.0 if number % 2 else 2.5
        heartbeat.beat(now)
    assert SILENCE_MIN_S < heartbeat.silence_s <= SILENCE_MAX_S
    for number in range(40):
        now += 1.0 if number % 2 else 9.0
        heartbeat.beat(now)
    assert heartbeat.silence_s == SILENCE_MAX_S


def test_one_long_gap_among_many_short_ones_may_come_again_for_half_a_minute() -> None:
    heartbeat, now = Heartbeat(), 0.0
    for number in range(20):
        now += 2.8 if number == 10 else 1.0
        heartbeat.beat(now)
    assert heartbeat.silence_s == pytest.approx(2.8 * SILENCE_LONGEST)
    for _ in range(40):
        now += 1.0
        heartbeat.beat(now)
    assert heartbeat.silence_s == SILENCE_MIN_S


def test_a_pause_of_our_own_is_not_taken_for_a_gap() -> None:
    heartbeat = Heartbeat()
    for second in range(10):
        heartbeat.beat(float(second))
    heartbeat.paused()
    for second in range(100, 110):
        heartbeat.beat(float(second))
    assert heartbeat.silence_s == SILENCE_MIN_S


def test_the_clock_difference_comes_from_the_quickest_round_trip() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.rtt_s is None
    assert heartbeat.clock_s is None
    heartbeat.said_hello(1000.0, 990.0)
    assert heartbeat.clock_s == pytest.approx(10.0)
    heartbeat.pinged(1, 5.0)
    assert heartbeat.answered(1, 1030.05, 5.1, 1000.1)  # 0.1 s there and back, 30 s ahead
    heartbeat.pinged(2, 6.0)
    assert heartbeat.answered(2, 1031.9, 7.0, 1002.0)  # slow and one-sided
    assert heartbeat.clock_s == pytest.approx(30.0)
    assert heartbeat.rtt_s == pytest.approx(0.55)


def test_answers_to_nothing_and_second_answers_are_ignored() -> None:
    heartbeat = Heartbeat()
    heartbeat.pinged(1, 0.0)
    assert not heartbeat.answered(7, 0.0, 1.0, 1.0)
    assert heartbeat.answered(1, 0.0, 1.0, 1.0)
    assert not heartbeat.answered(1, 0.0, 1.0, 1.0)


def test_unanswered_pings_do_not_pile_up() -> None:
    heartbeat = Heartbeat()
    for number in range(100):
        heartbeat.pinged(number, float(number))
    assert not heartbeat.answered(0, 0.0, 100.0, 100.0)
    assert heartbeat.answered(99, 0.0, 100.0, 100.0)


def test_a_ping_without_an_answer_in_ten_seconds_is_lost() -> None:
    beat = Heartbeat()
    for number in range(13):
        beat.pinged(number, float(number))
        if number != 1:
            beat.answered(number, 0.0, number + 0.2, 0.0)
    assert beat.lost == 1
    assert beat.trip_s == pytest.approx(0.2)
