"""The demo's processes, with a stand-in for the daemon: watched, killed, and nothing left."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from dugnad.peer.demoswarm import DemoPeer, DemoSwarm, exit_text, living, peer_environment
from dugnad.peer.errors import UserError

pytestmark = pytest.mark.slow  # processes

PATIENCE_S = 30.0

# A daemon without a swarm: the real control API, a child process, a link, one event.
STAND_IN = """
import asyncio, ctypes, signal, subprocess, sys
from pathlib import Path
from dugnad.peer.control import ControlServer
from dugnad.peer.paths import Home
from dugnad.peer.views import EventRow, Status

ORPHAN = {orphan}
home = Home(Path(sys.argv[sys.argv.index("--home") + 1]))
home.create()
leash = None if ORPHAN else lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=leash)

class View:
    def __init__(self): self.left = asyncio.Event()
    def status(self):
        return Status(run="r", name="n", peer="{peer}", state="training", reason="", pid=1,
            uptime_s=1.0, started_at_ms=1, version="1", step=1, tokens=1, tokens_per_s=1.0,
            swarm_tokens=1, swarm_tokens_per_s=1.0, peers_live=1, versions=[1], heads=["aa"],
            anchor_loss=None, train_loss=None, merges=1, interval_s=1.0, longest_gap_s=1.0,
            units={{}}, addresses=[], link="dugnad:x", residual_norm_share=0.0, bytes_sent=0,
            bytes_received=0, codec="int8", last_takeover_s=None, join_to_listed_s=1.0)
    def peers(self): return []
    def leaderboard(self): return {{"rows": []}}
    def units(self): return {{}}
    def events(self, since):
        row = EventRow(n=1, at_ms=1, kind="joined", text="one joined", data={{}})
        return [row] if since < 1 else []
    def request_leave(self, drain): self.left.set()

async def main():
    view = View()
    server = ControlServer(view, home)
    await server.start()
    print("dugnad:the-link", flush=True)
    await view.left.wait()
    await server.close()
    child.kill()
    child.wait()

asyncio.run(main())
"""
PEER = "12D3KooW9pP4Seg3kZYhySpuVjn1RPdQBsUFZKiFxGMGQN5MeL6A"


def stand_in(folder: Path, orphan: bool = False) -> tuple[str, ...]:
    """A program that behaves like a daemon; with `orphan`, its child does not die with it."""
    path = folder / "standin.py"
    path.write_text(textwrap.dedent(STAND_IN).format(orphan=orphan, peer=PEER))
    return (sys.executable, "-P", str(path))


@pytest_asyncio.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[DemoSwarm]:
    """A swarm of stand-ins, stopped at the end."""
    swarm = DemoSwarm(tmp_path, stand_in(tmp_path))
    yield swarm
    await swarm.stop()


async def launched(swarm: DemoSwarm) -> DemoPeer:
    """A peer that has answered once."""
    peer = swarm.add()
    await peer.launch("join", "dugnad:x", cpu_share=0.5)
    async with asyncio.timeout(PATIENCE_S):
        while await peer.look() is None:
            swarm.check()
            await asyncio.sleep(0.05)
    return peer


def children() -> list[psutil.Process]:
    """Processes below this one."""
    return living(psutil.Process().children(recursive=True))


async def test_a_peer_is_launched_looked_at_and_left_without_a_trace(swarm: DemoSwarm) -> None:
    peer = await launched(swarm)
    assert peer.link() == "dugnad:the-link"
    assert peer.last is not None
    assert [event.text for event in peer.last.events] == ["one joined"]
    assert peer.name == "reed-velvet-winter"
    assert peer.listed_after_s is not None
    again = await peer.look(board=True)
    assert again is not None
    assert again.events == ()  # each event comes once
    assert again.board == {"rows": []}
    assert await peer.leave(PATIENCE_S) == 0
    swarm.check()  # it was asked to leave
    assert await peer.wait_for_family(3.0) == []
    assert peer.sockets_left() == 0
    assert children() == []


async def test_the_children_of_a_killed_peer_die_and_it_is_no_survivor(swarm: DemoSwarm) -> None:
    first, second = await launched(swarm), await launched(swarm)
    assert await first.kill() == 0
    assert first.exit_code == -signal.SIGKILL
    assert [peer for peer, _ in await swarm.look()] == [second]
    assert await first.look() is None


async def test_children_that_outlive_a_killed_peer_are_counted_and_ended(tmp_path: Path) -> None:
    swarm = DemoSwarm(tmp_path, stand_in(tmp_path, orphan=True))
    peer = await launched(swarm)
    orphans = children()
    try:
        assert await peer.kill() == 1
    finally:
        await swarm.stop()
    assert living(orphans) == []


async def test_a_peer_that_dies_by_itself_is_an_error_with_its_last_words(swarm: DemoSwarm) -> None:
    peer = await launched(swarm)
    assert peer.last is not None
    with peer.log.open("a") as log:
        log.write("error E017: the disk is full\n")
    for process in psutil.Process().children():
        os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while peer.lives:  # noqa: ASYNC110  # as the demo sees it
            await asyncio.sleep(0.02)
    with pytest.raises(UserError, match="SIGKILL") as caught:
        swarm.check()
    assert "the disk is full" in caught.value.sentence
    assert str(peer.log) in caught.value.fix


async def test_stopping_ends_everything_and_removes_the_sockets(tmp_path: Path) -> None:
    swarm = DemoSwarm(tmp_path, stand_in(tmp_path))
    peer = await launched(swarm)
    await swarm.stop()
    assert not peer.lives
    assert children() == []
    assert list((tmp_path / "s").iterdir()) == []


async def test_a_peer_whose_launch_is_cancelled_is_known_and_stopped(tmp_path: Path) -> None:
    swarm = DemoSwarm(tmp_path, stand_in(tmp_path))
    peer = swarm.add()
    launching = asyncio.create_task(peer.launch("join", "dugnad:x", cpu_share=0.5))
    await asyncio.sleep(0)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    await swarm.stop()
    assert not peer.lives
    assert children() == []


def test_peers_do_not_inherit_the_users_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DUGNAD_HOME", "/elsewhere")
    monkeypatch.setenv("DUGNAD_NAME", "me")
    environment = peer_environment(tmp_path)
    assert not any(key.startswith("DUGNAD_") for key in environment)
    assert environment["OMP_NUM_THREADS"] == "1"


def test_exit_codes_are_told_in_words() -> None:
    assert exit_text(19) == "exit code 19"
    assert exit_text(-9) == "SIGKILL"
