"""`dugnad simulate`: exit codes, the JSON file, the plot, the story of what was broken."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dugnad.peer import cli
from dugnad.simulation.command import Wish, main
from dugnad.simulation.scenario import names

IMPOSSIBLE = """title = "more than there is"
seconds = 12
calm_s = 12
[swarm]
peers = [2, 3]
[[event]]
at_s = 5
do = "freeze"
seconds = 2
[hold]
goodput_min = 1.5
"""


def no_clock() -> float:
    return 0.0


@pytest.fixture
def impossible(tmp_path: Path) -> str:
    path = tmp_path / "impossible.toml"
    path.write_text(IMPOSSIBLE)
    return str(path)


def test_it_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Wish(listing=True), no_clock) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names())
    assert "not in `all`" in out


def test_the_command_line_passes_on_what_was_asked_for(
    impossible: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", impossible, "--seeds", "1", "--seed", "5"])
    assert ended.value.code == 1
    assert "BROKEN: goodput" in capsys.readouterr().out


def test_a_series_that_holds_gives_0_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    wish = Wish("same-moment", seeds=2, seed=3, json_file=out, plot=plot)
    assert main(wish, no_clock) == 0
    found = json.loads(out.read_text())
    assert found["passed"] is True
    assert found["violations"] == []
    runs = found["scenarios"]["same-moment"]["runs"]
    assert [run["seed"] for run in runs] == [3, 4]
    assert "\nsame-moment " in capsys.readouterr().out, "the name stands in full"
    assert {"goodput", "participation", "longest_gap", "bytes", "digest"} <= runs[0].keys()
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_a_broken_promise_gives_1_and_its_seed_options_and_story(
    impossible: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(Wish(impossible, seeds=1, seed=5, json_file=out), no_clock) == 1
    text = capsys.readouterr().out
    assert "seed 5" in text
    assert "swarm.peers" in text
    assert "BROKEN: goodput" in text
    assert "HandIn" in text
    assert "--seed 5 --replay" in text
    (violation,) = json.loads(out.read_text())["violations"]
    assert violation["seed"] == 5
    assert violation["story"]


def test_a_replay_tells_the_same_account_again(
    impossible: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(Wish(impossible, seeds=1, seed=5), no_clock)
    first = capsys.readouterr().out
    assert main(Wish(impossible, seed=5, replay=True), no_clock) == 1
    assert capsys.readouterr().out == first


def test_a_file_that_cannot_be_written_is_told_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none" / "out.json", tmp_path):
        assert main(Wish("crowd-10000", json_file=path), no_clock) == 2
        assert main(Wish(plot=path), no_clock) == 2
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wish", [Wish("no-such"), Wish("no/such.toml"), Wish(replay=True), Wish("storm", seeds=0)]
)
def test_bad_input_gives_2_and_says_why(wish: Wish, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wish, no_clock) == 2
    assert capsys.readouterr().err
