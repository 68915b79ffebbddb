"""The demo's numbers, its verdict and how they are printed."""

import io
import json
from collections.abc import Callable

import msgspec
import pytest

from dugnad.peer.demoplan import UNIT_SEQUENCES
from dugnad.peer.demoreport import (
    Results,
    failures,
    figures,
    print_results,
    results_json,
    summary,
)
from dugnad.peer.views import Status

GOOD = Results(
    loss_before=5.545,
    loss_after=2.1,
    loss_control=2.3,
    tokens=1_000_000,
    merges=60,
    units_covered=100,
    units_lost=0,
    units_twice=2,
    longest_gap_s=2.5,
    interval_s=1.25,
    takeover_s=0.4,
    join_to_merge_s=9.0,
    digests_equal=True,
    left_behind=0,
    seconds=130.0,
    boards_equal=True,
    difference="",
    exit_codes={"one two three": 0},
    versions=(15, 15, 15, 15),
    control_tokens=300_000,
    control_s=20.0,
    tokens_per_s=16_000.0,
    steps_per_merge=37,
    peers=4,
    minutes=1.5,
    churn=True,
    control=True,
    seed=0,
    sample="The state of the Union is \x1b[31mstrong.\nThank you.",
    leaderboard={},
)
PROMISED = [
    "loss_before",
    "loss_after",
    "loss_control",
    "tokens",
    "merges",
    "units_covered",
    "units_lost",
    "units_twice",
    "longest_gap_s",
    "interval_s",
    "takeover_s",
    "join_to_merge_s",
    "digests_equal",
    "left_behind",
    "seconds",
]


def changed(**changes: object) -> Results:
    """The good results with some fields replaced."""
    return msgspec.structs.replace(GOOD, **changes)


def test_a_demo_that_shows_what_it_should_has_no_failures() -> None:
    assert failures(GOOD) == []
    assert failures(changed(loss_control=None)) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"digests_equal": False, "difference": "version 3 differs"}, "version 3 differs"),
        ({"units_lost": 1}, "1 unit of work got lost"),
        ({"loss_after": 2.3}, "not below 2.300"),
        ({"loss_after": float("nan")}, "not below"),
        ({"exit_codes": {"a b c": 1}}, "a b c was asked to leave and ended with exit code 1"),
        ({"exit_codes": {"a b c": None}}, "did not end in time"),
    ],
)
def test_each_failure_has_its_sentence(changes: dict[str, object], word: str) -> None:
    (sentence,) = failures(changed(**changes))
    assert word in sentence


def test_the_json_has_every_promised_key() -> None:
    written = json.loads(results_json(GOOD))
    assert set(PROMISED) <= written.keys()
    assert written["takeover_s"] == 0.4


def test_figures_are_the_most_that_any_survivor_knows(status_of: Callable[..., Status]) -> None:
    old = status_of(
        swarm_tokens=900,
        tokens=400,
        merges=9,
        versions=[3, 2],
        interval_s=1.0,
        longest_gap_s=2.0,
        units={"open": 3, "listed": 4, "settled": 5, "twice": 1},
        last_takeover_s=0.3,
    )
    late = status_of(
        swarm_tokens=950,
        tokens=100,
        merges=3,
        versions=[3, 3],
        interval_s=1.5,
        longest_gap_s=1.5,
        units={"listed": 6, "settled": 4, "lost": 1},
        last_takeover_s=None,
    )
    found = figures([old, late])
    assert (found.tokens, found.merges, found.peer_tokens_max) == (950, 9, 400)
    assert (found.units_covered, found.units_lost, found.units_twice) == (10, 1, 1)
    assert (found.interval_s, found.longest_gap_s) == (1.25, 2.0)
    assert found.takeover_s == 0.3
    assert found.versions == (3, 3)


def test_what_the_daemon_counts_itself_is_taken_from_it(status_of: Callable[..., Status]) -> None:
    one = status_of(units={"covered": 7, "twice_sequences": UNIT_SEQUENCES, "given_up": 0})
    two = status_of(units={"covered": 8, "twice_sequences": 1, "given_up": 2})
    found = figures([one, two])
    assert (found.units_covered, found.units_lost, found.units_twice) == (8, 2, 2)


def test_what_was_not_seen_is_said_and_not_invented(status_of: Callable[..., Status]) -> None:
    assert figures([status_of(units={})]).takeover_s is None
    text = summary(changed(takeover_s=None, join_to_merge_s=None, loss_control=None, interval_s=0))
    assert "not seen from seeing the loss" in text
    assert "not asked for" in text


def test_the_printed_report_is_safe_and_ends_in_the_verdict() -> None:
    stream = io.StringIO()
    print_results(GOOD, stream, now_ms=1)
    assert "\x1b" not in stream.getvalue()
    assert "2.0 intervals" in stream.getvalue()
    assert stream.getvalue().endswith("All went well, with nobody in charge.\n")
    stream = io.StringIO()
    print_results(changed(units_lost=2), stream, now_ms=1)
    assert stream.getvalue().endswith("failed: 2 units of work got lost\n")
