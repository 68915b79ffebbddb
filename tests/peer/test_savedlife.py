"""What the owner wants outlives the daemon."""

import pytest

from dugnad.peer.lifecycle import Life, State
from dugnad.peer.limits import ALLOWED, Verdict
from dugnad.peer.paths import Home
from dugnad.peer.ratelimit import Usage
from dugnad.peer.savedlife import load_life, load_usage, save_life, save_usage
from dugnad.peer.steward import reason_of


@pytest.mark.parametrize("life", [Life(State.PAUSED), Life(State.SNOOZED, 9000), Life()])
def test_a_pause_survives_a_restart(home: Home, life: Life) -> None:
    save_life(home, life)
    assert load_life(home) == life


@pytest.mark.parametrize("content", ["", "{", '{"state":"leaving"}', '{"state":"paused","x":1}'])
def test_a_damaged_file_is_as_good_as_none(home: Home, content: str) -> None:
    home.life_file.write_text(content)
    home.usage_file.write_text(content)
    assert load_life(home) == Life()
    assert load_usage(home) == Usage()


def test_traffic_survives_a_restart(home: Home) -> None:
    save_usage(home, Usage({20_000: 7}, seen=99))
    assert load_usage(home) == Usage({20_000: 7})


def test_the_persons_word_is_shown_before_the_limits() -> None:
    verdict = Verdict(False, "hours", "hours = x: goes on tue 09:00")
    assert reason_of(Life(), ALLOWED) == ""
    assert reason_of(Life(), verdict) == verdict.reason
    assert reason_of(Life(State.PAUSED), verdict).startswith("pause = on")
    assert reason_of(Life(State.SNOOZED, 10**12), verdict).startswith("snooze = until ")
    assert "out of memory" in reason_of(Life(State.FAILED, 0, "out of memory"), ALLOWED)
