"""A real swarm of real processes on loopback: one is killed with -9, one joins, all agree, and
nothing of anybody outlives them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

from .processes import run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow

CPU_SHARE = "0.15"
"""Several learners share two cores: without a cap they starve their daemons."""


@dataclass
class Peer:
    """One daemon process with its home."""

    home: Path
    process: subprocess.Popen[bytes]
    log: Path
    family: list[psutil.Process] = field(default_factory=list)

    def ask(self, path: str) -> Any:  # Any: JSON
        return Client(Home(self.home)).get(path)

    def status(self) -> Any:  # Any: JSON
        try:
            return self.ask("/v1/status")
        except UserError:
            return None

    def remember_family(self) -> None:
        self.family = psutil.Process(self.process.pid).children(recursive=True)


@dataclass
class Swarm:
    """Processes of one test."""

    folder: Path
    peers: list[Peer] = field(default_factory=list)

    def launch(self, *arguments: str) -> Peer:
        number = len(self.peers)
        home, log = self.folder / f"home{number}", self.folder / f"log{number}"
        command = [sys.executable, "-m", "dugnad.peer.cli", *arguments]
        options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", CPU_SHARE]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *options, "--home", str(home)], stdout=out, stderr=out
            )
        peer = Peer(home, process, log)
        self.peers.append(peer)
        return peer

    def start(self) -> tuple[Peer, str]:
        run = run_file(self.folder)
        peer = self.launch("start", str(run))
        return peer, wait_for(lambda: link_in(peer.log), 40.0, "the link")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A swarm that is killed at the end, whatever happened."""
    found = Swarm(tmp_path)
    yield found
    for peer in found.peers:
        if peer.process.poll() is None:
            peer.process.kill()
            peer.process.wait()


def link_in(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith("dugnad:")), "")


def merged(peer: Peer, versions: int) -> bool:
    status = peer.status()
    return bool(status) and min(status["versions"]) >= versions


def one_head(peers: list[Peer]) -> bool:
    heads = [tuple(status["heads"]) for peer in peers if (status := peer.status())]
    return len(heads) == len(peers) and len(set(heads)) == 1


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_swarm_survives_a_kill_takes_in_a_newcomer_and_leaves_nothing_behind(
    swarm: Swarm,
) -> None:
    first, link = swarm.start()
    second, third = swarm.launch("join", link), swarm.launch("join", link)
    for peer in (first, second, third):
        wait_for(partial(merged, peer, 3), 60.0, "the third version")
    second_link = wait_for(lambda: link_in(second.log), 5.0, "the link")

    first.remember_family()
    assert len(first.family) >= 2, "p2pd and the learner"
    killed = time.monotonic()
    first.process.kill()  # the first one, the organiser: nobody is special
    wait_for(lambda: "lost" in second.log.read_text(errors="replace"), 8.0, "news of the loss")
    assert time.monotonic() - killed < 8.0
    wait_for(lambda: gone(first.family), 5.0, "the end of its children")

    before = second.status()["versions"]
    late = swarm.launch("join", second_link)
    wait_for(lambda: merged(late, max(before) + 2), 60.0, "the newcomer's versions")
    listed = wait_for(lambda: late.status()["join_to_listed_s"], 60.0, "its first listing")
    assert listed > 0.0
    survivors = [second, third, late]
    wait_for(lambda: one_head(survivors), 30.0, "equal heads")

    boards = [peer.ask("/v1/leaderboard") for peer in survivors]
    assert all(board["tokens"] > 0 for board in boards)
    makers = [{row["peer"] for row in board["rows"]} for board in boards]
    assert len(makers[0]) == 4, "the dead peer's work is still credited"
    assert makers[0] == makers[1] == makers[2], "a newcomer knows the whole history"

    for peer in survivors:
        peer.remember_family()
        peer.process.send_signal(signal.SIGTERM)
    for peer in survivors:
        assert peer.process.wait(30) == 0, peer.log.read_text(errors="replace")
        assert "could not be sent" in peer.log.read_text(errors="replace")
        wait_for(partial(gone, peer.family), 5.0, "the end of its children")
        assert not (peer.home / "daemon.json").exists()
        assert not list(Home(peer.home).runtime().iterdir()), "sockets are left"


def test_a_peer_that_was_killed_goes_on_where_it_stood(swarm: Swarm) -> None:
    peer, _ = swarm.start()
    wait_for(lambda: merged(peer, 4), 60.0, "the fourth version")
    before = peer.status()
    peer.process.kill()
    peer.process.wait()
    again = Peer(peer.home, peer.process, swarm.folder / "log-again")
    command = [sys.executable, "-m", "dugnad.peer.cli", "start", str(swarm.folder / "run.toml")]
    options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", CPU_SHARE]
    with again.log.open("wb") as out:
        again.process = subprocess.Popen(
            [*command, *options, "--home", str(peer.home)], stdout=out, stderr=out
        )
    swarm.peers.append(again)
    after = wait_for(again.status, 30.0, "its status")
    assert min(after["versions"]) >= min(before["versions"]) - 1
    top = max(after["versions"])
    wait_for(lambda: merged(again, top + 2), 60.0, "new versions")
    board = again.ask("/v1/leaderboard")
    assert board["tokens"] + board["provisional"] > 0


def test_a_second_daemon_on_the_same_folder_is_refused_with_the_pid_of_the_first(
    swarm: Swarm,
) -> None:
    peer, link = swarm.start()
    command = [sys.executable, "-m", "dugnad.peer.cli", "join", link, "--yes"]
    second = subprocess.run(
        [*command, "--home", str(peer.home)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 22, second.stderr
    assert str(peer.process.pid) in second.stderr


def test_a_link_whose_peers_are_dead_says_so_for_each_address(swarm: Swarm) -> None:
    peer, link = swarm.start()
    peer.process.kill()
    peer.process.wait()
    other = swarm.launch("join", link)
    assert other.process.wait(40) == 16
    text = other.log.read_text(errors="replace")
    assert "/ip4/127.0.0.1/tcp/" in text
    assert "fix:" in text


def test_status_is_json_of_the_daemon_that_runs(swarm: Swarm) -> None:
    peer, _ = swarm.start()
    command = [sys.executable, "-m", "dugnad.peer.cli", "status", "--json"]
    done = subprocess.run(
        [*command, "--home", str(peer.home)], capture_output=True, text=True, timeout=30, check=True
    )
    assert json.loads(done.stdout)["pid"] == peer.process.pid


def test_a_peer_whose_p2pd_is_killed_starts_a_new_one_and_goes_on(swarm: Swarm) -> None:
    first, link = swarm.start()
    second = swarm.launch("join", link)
    wait_for(partial(merged, second, 2), 60.0, "the second version")
    second.remember_family()
    (p2pd,) = [process for process in second.family if "p2pd" in process.name()]
    p2pd.kill()

    def together() -> bool:
        looks = [peer.status() for peer in (first, second)]
        return all(look and look["peers_live"] == 2 for look in looks) and gone([p2pd])

    wait_for(together, 40.0, "the reunion")
    top = max(first.status()["versions"])
    wait_for(partial(merged, first, top + 2), 40.0, "new versions of the first")
    wait_for(partial(merged, second, top + 2), 40.0, "new versions of the second")
    wait_for(partial(one_head, [first, second]), 30.0, "equal heads")
    assert second.process.poll() is None


def test_a_stopped_peer_stops_nobody_and_comes_back(swarm: Swarm) -> None:
    first, link = swarm.start()
    second, third = swarm.launch("join", link), swarm.launch("join", link)
    for peer in (first, second, third):
        wait_for(partial(merged, peer, 2), 60.0, "the second version")
    third.process.send_signal(signal.SIGSTOP)
    top = max(first.status()["versions"])
    wait_for(partial(merged, first, top + 4), 60.0, "merging without the stopped one")
    third.process.send_signal(signal.SIGCONT)
    wait_for(partial(one_head, [first, second, third]), 40.0, "equal heads of all three")


def test_the_same_identity_on_two_machines_is_found_and_said(swarm: Swarm) -> None:
    first, link = swarm.start()
    second = swarm.launch("join", link)
    wait_for(partial(merged, second, 1), 60.0, "the first version")
    home = swarm.folder / "home2"
    home.mkdir(mode=0o700)
    key = home / "identity.key"
    key.write_bytes((second.home / "identity.key").read_bytes())
    key.chmod(0o600)
    double = swarm.launch("join", link)

    def one_ended() -> bool:
        return second.process.poll() is not None or double.process.poll() is not None

    wait_for(one_ended, 60.0, "the end of one of the two")
    ended = double if double.process.poll() is not None else second
    assert ended.process.wait(20) == 28, ended.log.read_text(errors="replace")
    assert "uses this identity" in ended.log.read_text(errors="replace")
    assert first.process.poll() is None


def test_a_link_with_a_living_peer_in_it_works_though_its_first_is_dead(swarm: Swarm) -> None:
    first, link = swarm.start()
    second = swarm.launch("join", link)
    wait_for(partial(merged, second, 1), 60.0, "the first version")
    other = wait_for(lambda: link_in(second.log), 5.0, "the other link").partition("?")[2]
    first.process.kill()
    first.process.wait()
    third = swarm.launch("join", f"{link}&{other}")
    wait_for(partial(merged, third, 2), 60.0, "the newcomer's versions")
    assert "seed /ip4/127.0.0.1/" in third.log.read_text(errors="replace"), "the dead one is named"
