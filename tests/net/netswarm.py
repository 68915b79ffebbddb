"""Real daemons on hosts of an emulated network: started, asked and watched from outside."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

import psutil
import pytest
from _nethosts import Host, Hosts

from dugnad.peer.client import Client
from dugnad.peer.demoswarm import LINK_PREFIX, peer_environment
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

pytestmark = [pytest.mark.net, pytest.mark.slow]

CPU_SHARE = "0.1"
"""Four learners share two cores: without a cap they starve their daemons."""

# Found by the interpreter at its start, through PYTHONPATH: this process lives in another time.
SHIFTED = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {seconds}
time.time_ns = lambda: _time_ns() + {seconds} * 10**9
"""


def clock_shift(folder: Path, seconds: int) -> Mapping[str, str]:
    """Variables with which Python programs see a wall clock that is that far ahead; the forward
    clock stays, and so does p2pd's, which is no Python program."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SHIFTED.format(seconds=seconds))
    rest = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{rest}" if rest else str(folder)}


@dataclass
class NetPeer:
    """One daemon on one host."""

    name: str
    host: Host
    home: Home
    log: Path
    process: Popen[bytes]

    def status(self) -> Any:  # Any: JSON of dugnad.peer.views.Status, None when it does not answer
        try:
            return self.host.call(lambda: Client(self.home, 2.0).get("/v1/status"))
        except UserError:
            return None

    def board(self) -> Any:  # Any: JSON of the leaderboard
        return self.host.call(lambda: Client(self.home, 2.0).get("/v1/leaderboard"))

    def peers(self) -> Any:  # Any: JSON of the peers that it knows
        return self.host.call(lambda: Client(self.home, 2.0).get("/v1/peers"))

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def link(self) -> str:
        lines = [one for one in self.words().splitlines() if one.startswith(LINK_PREFIX)]
        return lines[0] if lines else ""

    def p2pds(self) -> list[psutil.Process]:
        """Its libp2p daemons: one, or none for a moment."""
        children = psutil.Process(self.process.pid).children()
        return [one for one in children if "p2pd" in one.name() and one.status() != "zombie"]

    def version(self) -> int:
        """The lowest version of its fragments; -1 when it does not answer."""
        status = self.status()
        return min(status["versions"]) if status else -1


class NetSwarm:
    """The daemons of one test; they end with their hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.peers: dict[str, NetPeer] = {}
        (folder / "s").mkdir(mode=0o700)
        self._environment = peer_environment(folder / "s")

    def launch(self, name: str, *arguments: str, **variables: str) -> NetPeer:
        home, log = Home(self.folder / name), self.folder / f"{name}.log"
        command = [sys.executable, "-m", "dugnad.peer.cli", *arguments, "--yes"]
        command += ["--home", str(home.root), "--threads", "1", "--cpu-share", CPU_SHARE]
        command += ["--listen", "0.0.0.0:0"]
        host = self.hosts[name]
        with log.open("wb") as out:
            process = host.popen(
                command,
                env={**self._environment, **variables},
                stdin=DEVNULL,
                stdout=out,
                stderr=STDOUT,
                start_new_session=True,
            )
        self.peers[name] = NetPeer(name, host, home, log, process)
        return self.peers[name]

    def until_merged(self, names: Iterable[str], versions: int, timeout_s: float) -> None:
        """Wait until each of these holds that version of every fragment."""
        for name in names:
            peer = self.peers[name]
            self.wait_for(partial(_at_least, peer, versions), timeout_s, f"version of {name}")

    def agreed(self, names: Iterable[str]) -> bool:
        statuses = [self.peers[name].status() for name in names]
        return all(statuses) and len({tuple(one["heads"]) for one in statuses}) == 1

    def wait_for(self, what: Callable[[], Any], timeout_s: float, name: str) -> Any:
        """Poll until ``what`` gives something true; the daemons' words when it does not."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := what():
                return found
            time.sleep(0.2)
        words = "\n".join(f"--- {p.name}\n{p.words()[-1500:]}" for p in self.peers.values())
        raise AssertionError(f"{name} did not come within {timeout_s} s\n{words}")


def _at_least(peer: NetPeer, version: int) -> bool:
    return peer.version() >= version
