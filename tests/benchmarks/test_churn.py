"""The churn benchmark: its schedule, its arithmetic, and a short form of it on real processes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from _churnfigures import (
    Departure,
    Merge,
    Sample,
    Span,
    Use,
    alive_seconds,
    dips,
    interval,
    listed_tokens,
    own_speed,
    p95,
    participation,
    slopes,
)
from _churnplan import EVERY_S, SPARED_S, Kind, schedule

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "churn.py"


def steady(peer: int, begin: float, end: float, rate: float = 100.0) -> Span:
    """A life that trained at a rate from its first moment to its last."""
    count = int((end - begin) / 0.5) + 1
    samples = [Sample(begin + n * 0.5, int(n * 0.5 * rate), True) for n in range(count)]
    return Span(peer, begin, begin=begin, end=end, samples=samples)


def test_a_schedule_follows_from_its_seed_and_leaves_a_returned_peer_in_peace() -> None:
    faults = schedule(3, peers=6, seconds=600.0)
    assert faults == schedule(3, peers=6, seconds=600.0)
    assert faults != schedule(4, peers=6, seconds=600.0)
    assert len(faults) == 600 / EVERY_S
    assert {one.kind for one in faults[:4]} == set(Kind)
    for peer in range(6):
        mine = [one for one in faults if one.peer == peer]
        for first, second in itertools.pairwise(mine):
            assert second.at_s >= first.at_s + first.away_s + SPARED_S


def test_a_peer_is_alive_from_its_first_answer_until_its_fault() -> None:
    spans = [steady(0, 0.0, 10.0), Span(0, 12.0, begin=15.0), Span(0, 40.0)]
    assert alive_seconds(spans, 5.0, 20.0) == pytest.approx(5.0 + 5.0)


def test_own_speed_is_read_where_a_peer_trained_throughout() -> None:
    span = steady(0, 0.0, 30.0, rate=100.0)
    span.samples[20:26] = [
        Sample(s.at, span.samples[19].tokens, False) for s in span.samples[20:26]
    ]
    assert own_speed([span], 0.0, 9.0) == pytest.approx(100.0)
    assert own_speed([Span(1, 0.0, begin=1.0)], 0.0, 9.0) == 0.0


def test_tokens_listed_are_the_mean_over_the_fragments() -> None:
    merges = [Merge(0, 1.0, {0: 10, 1: 10}), Merge(1, 2.0, {0: 30}), Merge(0, 9.0, {0: 99})]
    assert listed_tokens(merges, 0.0, 5.0) == pytest.approx((20 + 30) / 2)


def test_participation_asks_for_those_who_trained_throughout_in_a_commit_or_the_next() -> None:
    spans = [steady(0, 0.0, 30.0), steady(1, 0.0, 30.0), steady(2, 0.0, 4.0)]
    chain = [Merge(0, 5.0 * n, {0: 1} | ({1: 1} if n % 2 else {})) for n in range(1, 6)]
    assert participation(chain, spans, 0.0, 30.0) == 1.0
    lost = [Merge(0, one.at, {0: 1}) for one in chain]
    assert participation(lost, spans, 0.0, 30.0) == pytest.approx(0.5)
    assert participation([], spans, 0.0, 30.0) is None


def test_a_dip_compares_the_same_survivors_before_and_after() -> None:
    slowed = steady(1, 0.0, 40.0)
    for n, one in enumerate(slowed.samples):
        if one.at > 20.0:
            slowed.samples[n] = Sample(one.at, 2000 + int((one.at - 20.0) * 50), True)
    spans = [steady(0, 0.0, 20.0), slowed, steady(2, 0.0, 40.0)]
    (found,) = dips([Departure(20.0, 0, "kill")], spans)
    assert found == pytest.approx(0.25, abs=0.02)
    assert dips([Departure(20.0, 0, "kill")], spans[:1]) == []


def test_an_interval_holds_its_median_and_the_95th_percentile_is_a_value_that_was_seen() -> None:
    middle, low, high = interval([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (middle, low <= middle <= high) == (0.3, True)
    assert p95([float(n) for n in range(1, 21)]) == 20.0
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_a_leak_shows_in_the_slope_and_the_start_of_a_life_does_not() -> None:
    span = steady(0, 0.0, 300.0)
    span.uses = [
        Use(float(t), 100.0 + (t if t < 30 else 30), 80.0, 50 + t // 60) for t in range(0, 300, 3)
    ]
    (rss,) = slopes([span], lambda one: one.rss_mb)
    (fds,) = slopes([span], lambda one: float(one.fds))
    assert rss == pytest.approx(0.0)
    assert fds == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
def test_a_short_churn_lists_what_was_trained_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "churn.json"
    options = ["--minutes", "0.2", "--every", "6", "--peers", "3", "--calm", "4", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *options, "--cpu-share", "0.1", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["faults"] == 2
    assert found["merges"] > 0
    assert found["goodput_alive_now"] > 0.3  # half a minute on a busy machine measures little
    assert found["digests_equal"], done.stderr
    assert (found["units_lost"], found["left_behind"]) == (0, 0), done.stderr
    assert found["not_back"] == []
