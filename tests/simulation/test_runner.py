"""The scenarios hold, the same seed gives the same trace, and broken rules are noticed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dugnad.averaging.contributor import Contributor, Own
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.view import View
from dugnad.dht.ids import PeerId
from dugnad.simulation.runner import Result, play
from dugnad.simulation.scenario import draw, names, text_of

FIRST = {name: draw(name, text_of(name), 0).scenario for name in names()}
SCENARIOS = [name for name, one in FIRST.items() if not one.known and one.numeric is None]
QUICK = ("all-stop", "home-dies", "kill-any", "mass-leave", "newborns-alone", "two-homes-die")
"""Those that take about a fifth of a second."""
FRESH = int(os.environ["TEST_SEED"]) * 100
"""Other seeds every day; the number is in the test's name, so that a failure can be repeated."""

# (scenario, seed): what once was broken
REGRESSIONS = [
    ("mass-leave", 6),  # two that left at once handed their last work to each other
    # all full peers had died between signing and announcing: nobody could be home again
    pytest.param("everything", 72, marks=pytest.mark.slow),
    ("old-snapshot", 0),  # a peer that caught up version by version used a listed number again
]
# the same with rosters and units cores
MENDED = [
    # work listed anew that had come back and gone along with later work: as much was dropped
    ("everything", 2),
    ("everything", 10),
    # payloads waited for anchors that nobody had; live peers were lost on slow lines
    ("thin-lines", 4),
    ("thin-lines", 44),
]


def run(name: str, seed: int) -> Result:
    return play(draw(name, text_of(name), seed))


def told(name: str, seed: int) -> Result:
    """The scenario as it was before peers had rosters: the network's draws are the same."""
    return play(draw(name, text_of(name).replace("[swarm]", "[swarm]\nroster = false"), seed))


def what(result: Result) -> list[str]:
    return [broken.what for broken in result.violations]


@pytest.mark.parametrize("name", QUICK)
def test_a_scenario_holds(name: str) -> None:
    assert what(run(name, 1)) == []


@pytest.mark.parametrize(("name", "seed"), REGRESSIONS)
def test_what_was_broken_stays_mended(name: str, seed: int) -> None:
    assert what(told(name, seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), MENDED)
def test_what_was_broken_with_real_rosters_stays_mended(name: str, seed: int) -> None:
    assert what(run(name, seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [FRESH])
def test_a_scenario_holds_for_a_fresh_seed(name: str, seed: int) -> None:
    assert what(run(name, seed)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_four_that_start_at_the_same_moment_are_one_swarm(seed: int) -> None:
    assert what(run("same-moment", seed)) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, second, other = run("home-dies", 7), run("home-dies", 7), run("home-dies", 8)
    assert first.digest == second.digest != other.digest
    assert first.timeline == second.timeline
    assert (first.goodput, first.bytes) == (second.goodput, second.bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["storm", "volunteers"])
def test_processes_with_other_hash_seeds_give_the_same_digest(name: str) -> None:
    code = (
        "from dugnad.simulation.runner import play\n"
        "from dugnad.simulation.scenario import draw, text_of\n"
        f"print(play(draw({name!r}, text_of({name!r}), 3)).digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert digests == {run(name, 3).digest + "\n"}


def test_a_core_that_uses_a_number_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Contributor, "skip_listed", lambda _: None)
    result = told("old-snapshot", 0)
    assert "was used twice" in what(result)[0]
    assert "HandIn" in result.violations[0].story


def test_leavers_that_trust_each_other_lose_work(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = told("mass-leave", 6).goodput
    assert whole > 0.97

    def home(_self: Contributor, _own: Own, home: PeerId) -> PeerId | None:
        return home

    def taken(_self: Contributor, own: Own) -> bool:
        return bool({"accepted", "refused"} & set(own.sent.values()))

    monkeypatch.setattr(Contributor, "_receiver", home)
    monkeypatch.setattr(Contributor, "_taken", taken)
    assert told("mass-leave", 6).goodput < whole - 0.02


@pytest.mark.slow
def test_a_swarm_that_never_passes_over_an_idle_home_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dugnad.averaging.home.Home._pass_over", lambda _: None)
    assert any("without a commit" in one for one in what(run("idle-home", 0)))


@pytest.mark.slow
def test_a_lineage_chosen_by_who_came_after_the_fork_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_vote(self: Lineage, node: Node, fork: Node) -> int:
        above = [one for one in self.ancestors(node) if one.version > fork.version]
        return sum(sum(one.weights.values()) for one in above)

    monkeypatch.setattr(Lineage, "weight_since", all_vote)
    assert any("most old members" in one for one in what(run("claims-after-a-fork", 0)))


@pytest.mark.slow
def test_a_lineage_chosen_by_claims_over_a_class_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lineage, "cap", lambda *_: 1 << 62)
    assert any("most old members" in one for one in what(run("over-claiming", 0)))


@pytest.mark.slow
def test_peers_that_do_not_notice_silence_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_MIN_S", "SILENCE_MAX_S"):
        monkeypatch.setattr(f"dugnad.dht.heartbeat.{name}", 1000.0)
    assert any("wrong about whether" in one for one in what(run("kill-quietly", 0)))


def test_peers_that_do_not_hear_of_heads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dugnad.averaging.follower.Follower.head_in", lambda _self, _event: None)
    monkeypatch.setattr("dugnad.averaging.follower.Follower.commit_in", lambda *_: False)
    assert any("commits of fragment" in one for one in what(run("kill-any", 0)))


def test_a_head_without_a_witness_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dugnad.averaging.follower.witnessed", lambda *_: True)
    assert any("unwitnessed" in one for one in what(run("home-dies", 1)))


def test_a_core_that_fails_is_a_violation_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: View) -> bool:
        raise KeyError("boom")

    monkeypatch.setattr(View, "may_home", fail)
    result = run("kill-any", 0)
    assert "a core failed" in what(result)[0]
    assert "boom" in result.violations[0].story
