"""Crowds under a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dugnad.simulation import crowdreport
from dugnad.simulation.command import Wish, main
from dugnad.simulation.crowd import CrowdPlan, play_crowd
from dugnad.simulation.crowdreport import measured, rehearse_crowd

SMALL = CrowdPlan(24, 0.2, seconds=60.0, sampled=8)


def no_clock() -> float:
    return 0.0


def test_a_small_crowd_keeps_every_promise_and_replays_exactly() -> None:
    result = rehearse_crowd("small", SMALL, 1, no_clock)
    assert result.violations == []
    assert result.joined > 0
    assert result == replace(
        rehearse_crowd("small", SMALL, 1, no_clock), memory_mb=result.memory_mb
    )
    assert result.digest != rehearse_crowd("small", SMALL, 2, no_clock).digest


def test_views_of_a_crowd_in_too_much_motion_are_seen_to_be_wrong() -> None:
    result = rehearse_crowd("restless", replace(SMALL, churn_per_min=4.0), 1, no_clock)
    assert any("wrong" in what for what in result.violations)


def test_when_nobody_comes_or_goes_nobody_is_lost_and_views_are_exact() -> None:
    world = play_crowd(replace(SMALL, churn_per_min=1e-9), 1)
    result = measured("calm", world, 1, 0.0)
    assert (result.error_max, result.false_losses) == (0.0, 0)


def test_a_crowd_that_breaks_a_promise_says_how_to_see_it_again_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(crowdreport.CROWDS, "crowd-3000", replace(SMALL, churn_per_min=4.0))
    plot = tmp_path / "crowd.svg"
    assert main(Wish("crowd-3000", seed=4, plot=plot), no_clock) == 1  # one seed, if none is asked
    out = capsys.readouterr().out
    assert "again: dugnad simulate crowd-3000 --seed 4 --replay" in out
    assert "\ncrowd-3000 " in out, "the name stands in full"
    drawn = ElementTree.parse(plot).getroot()
    lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 3
    assert all(len(one.attrib["points"].split()) >= 6 for one in lines)


@pytest.mark.slow
def test_three_hundred_peers_with_a_fifth_in_motion_keep_every_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(crowdreport.CROWDS, "crowd-3000", CrowdPlan(300, 0.2, seconds=90.0))
    out = tmp_path / "crowd.json"
    assert main(Wish("crowd-3000", seeds=2, json_file=out), no_clock) == 0
    found = json.loads(out.read_text())
    assert found["passed"]
    assert [one["false_now"] for one in found["runs"]] == [0, 0]
