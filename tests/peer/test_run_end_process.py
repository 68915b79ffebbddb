"""The end of a run with real processes: peers stop and say so, and its model leaves as files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dugnad.peer.client import Client
from dugnad.peer.paths import Home

from .processes import Daemons, run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow

BUDGET = 150_000
"""Some twelve seconds of two capped learners: a newcomer leaves open work alone for a while."""


class Peers(Daemons):
    """Daemons that are asked whether their run has ended."""

    cpu_share = "0.3"

    def status(self, number: int) -> Any:  # Any: JSON
        return self.ask(number, "status")

    def finished(self, number: int) -> Any:  # Any: JSON
        status = self.status(number)
        return status if status and status["state"] == "finished" else None


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """Daemons that are killed at the end, whatever happened."""
    with Peers(tmp_path) as found:
        yield found


def dugnad(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dugnad.peer.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_run_ends_at_its_budget_and_its_model_leaves_as_files(
    peers: Peers, tmp_path: Path
) -> None:
    path = run_file(tmp_path)
    path.write_text(path.read_text().replace("10_000_000", str(BUDGET)))
    first = peers.launch("start", str(path))
    link = wait_for(partial(peers.link, first), 40.0, "the link")
    second = peers.launch("join", link)
    ends = [wait_for(partial(peers.finished, one), 240.0, "the end") for one in (first, second)]
    assert ends[0]["reason"] == f"the run has reached its {BUDGET:,} tokens"
    assert ends[0]["heads"] == ends[1]["heads"]
    assert ends[0]["swarm_tokens"] >= BUDGET

    late = peers.launch("join", link)
    end = wait_for(partial(peers.finished, late), 120.0, "the newcomer's end")
    assert end["heads"] == ends[0]["heads"], "a newcomer learns the last versions"
    assert end["tokens"] == 0, "and trains nothing"
    assert peers.status(first)["versions"] == ends[0]["versions"]

    run = ends[0]["run"]
    told = dugnad("export", link, str(tmp_path / "seen"), "--home", str(tmp_path / "none"))
    assert told.returncode == 0, told.stderr
    kept = dugnad("export", run, str(tmp_path / "kept"), "--home", str(tmp_path / "home1"))
    assert kept.returncode == 0, kept.stderr
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        pair = [(tmp_path / where / name).read_bytes() for where in ("seen", "kept")]
        assert pair[0] == pair[1], f"{name} differs between the network and the disk"
    card = (tmp_path / "seen" / "README.md").read_text()
    assert "reached its token budget" in card
    assert card.count("12D3Koo") == 2, "the two that trained are its contributors"
    assert not (tmp_path / "none").exists(), "an observer leaves nothing behind"

    written = dugnad("sample", "--tokens", "30", "--seed", "3", "--home", str(tmp_path / "home1"))
    assert written.returncode == 0, written.stderr
    assert len(written.stdout.encode()) >= 30
    assert "version" in written.stderr
    assert peers.processes[first].poll() is None


def test_the_organiser_bans_a_peer_lifts_the_ban_and_stops_the_run(
    peers: Peers, tmp_path: Path
) -> None:
    first = peers.launch("start", str(run_file(tmp_path)))
    link = wait_for(partial(peers.link, first), 40.0, "the link")
    second = peers.launch("join", link)

    def live(count: int) -> Any:  # Any: JSON
        status = peers.status(first)
        return status if status and status["peers_live"] == count else None

    run = wait_for(partial(live, 2), 40.0, "both")["run"]
    homes = [str(tmp_path / f"home{n}") for n in (first, second)]
    bad = wait_for(partial(peers.status, second), 20.0, "the second")["peer"]
    theirs = dugnad("organiser", "stop", run, "--reason", "mine", "--home", homes[1])
    assert theirs.returncode == 45, theirs.stderr
    told = dugnad("organiser", "ban", run, bad, "--reason", "floods", "--home", homes[0])
    assert told.returncode == 0, told.stderr
    wait_for(partial(live, 1), 40.0, "the banned peer is gone")
    rows = {row["peer"]: row for row in Client(Home(Path(homes[0]))).get("/v1/peers")}
    assert "banned by the organiser: floods" in rows[bad]["reason"]
    wait_for(lambda: "floods" in str(peers.status(second)), 60.0, "the banned peer says why")

    assert dugnad("organiser", "unban", run, bad, "--home", homes[0]).returncode == 0
    wait_for(partial(live, 2), 180.0, "the peer is back")
    assert dugnad("organiser", "stop", run, "--reason", "done", "--home", homes[0]).returncode == 0
    for number in (first, second):
        end = wait_for(partial(peers.finished, number), 150.0, "the stop")
        assert end["reason"] == "the organiser stopped the run: done"
    shown = dugnad("organiser", "show", run, "--home", homes[1])
    assert shown.stdout.splitlines() == ["stopped: done", "nobody is banned"]
