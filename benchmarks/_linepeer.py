"""The peers of `homelink.py`: real `dugnad` processes on hosts of an emulated network."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from _nethosts import Host, Hosts

from dugnad.peer.client import Client
from dugnad.peer.demoswarm import LINK_PREFIX, peer_environment
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

ASK_S: Final = 2.0
TICK_S: Final = 0.5
WORDS: Final = ("red", "green", "blue", "sun", "sea", "of", "and", "the", "hill", "rain")
TEXT_LINES: Final = 9_000
"""About 0.4 MB: its way to each of the others is a few seconds."""
RUN_FILE: Final = """
[run]
name = "home lines"
purpose = "to see what a swarm does on slow lines"
licence = "CC0-1.0"
token_budget = 1_000_000_000
admission = "open"
seed = 1
[model]
dim = {dim}
layers = {layers}
heads = 4
hidden = {hidden}
context = 64
[data]
source = "text"
[train]
batch_sequences = 4
unit_sequences = 16
learning_rate = 3e-3
[exchange]
fragments = 4
steps_per_merge = {steps}
merge_floor_s = 2.0
hand_in_codec = "{codec}"
commit_codec = "int8"
"""
SMALL: Final = {"dim": 128, "layers": 4, "hidden": 384}
"""0.9 million parameters: a hand-in of int8 is 3.6 s of a home line's uplink."""
LARGE: Final = {"dim": 256, "layers": 5, "hidden": 768}
"""4.4 million."""

Json = dict[str, Any]  # Any: JSON of the control API


@dataclass(slots=True)
class LinePeer:
    """One daemon on one host, and what was seen of it."""

    name: str
    host: Host
    home: Home
    log: Path
    process: subprocess.Popen[bytes]
    last: Json = field(default_factory=dict)

    def look(self) -> Json:
        """Its status now; the one before when it does not answer."""
        try:
            found = self.host.call(lambda: Client(self.home, ASK_S).get("/v1/status"))
        except UserError:
            return self.last
        assert isinstance(found, dict), "the control API answers with an object"
        self.last = found
        return found

    def steer(self, wish: str) -> None:
        """Say pause or resume."""
        self.host.call(lambda: Client(self.home, ASK_S).post("/v1/steer", {"wish": wish}))

    def words(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace")

    def link(self) -> str:
        """The link that it printed; '' before."""
        lines = (line for line in self.words().splitlines() if line.startswith(LINK_PREFIX))
        return next(lines, "")


class LineSwarm:
    """The daemons of one network; they end with their hosts."""

    def __init__(
        self, hosts: Hosts, folder: Path, *, codec: str, run: str, cpu_share: float
    ) -> None:
        self.hosts, self.folder = hosts, folder
        self.peers: list[LinePeer] = []
        self._codec, self._cpu_share = codec, cpu_share
        (folder / "s").mkdir(mode=0o700, parents=True)
        self._environment = peer_environment(folder / "s")
        self.run = folder / "run.toml"
        self.run.write_text(run)
        (folder / "text").mkdir()
        rng = random.Random(1)
        lines = (" ".join(rng.choices(WORDS, k=9)) for _ in range(TEXT_LINES))
        (folder / "text" / "a.txt").write_text("\n".join(lines))

    def start(self, names: list[str], *, quic: bool, start_s: float) -> None:
        """Start a daemon on each host; all are listed afterwards, or RuntimeError.

        The first waits for the others: a model that is ahead would have to be brought to each of
        them over its line, which is not what is measured here.
        """
        self.launch(names[0], quic, "start", str(self.run))
        link = self.wait(self.peers[0].link, start_s, "the link")
        self.peers[0].steer("pause")
        for name in names[1:]:
            self.launch(name, quic, "join", str(link))
        for peer in self.peers[1:]:
            self.wait(partial(_trains, peer), start_s, f"{peer.name} to train")
        self.peers[0].steer("resume")
        for peer in self.peers:
            self.wait(partial(_listed, peer), start_s, f"{peer.name} to be listed")

    def launch(self, name: str, quic: bool, *arguments: str) -> None:
        """Start one daemon."""
        home, log = Home(self.folder / name), self.folder / f"{name}.log"
        command = [sys.executable, "-m", "dugnad.peer.cli", *arguments, "--yes"]
        command += ["--home", str(home.root), "--threads", "1", "--listen", "0.0.0.0:0"]
        command += ["--set", "upload_mbit=0", "--set", "download_mbit=0"]  # the line decides
        command += ["--cpu-share", f"{self._cpu_share}", "--set", f"codec={self._codec}"]
        command += ["--set", f"quic={str(quic).lower()}"]
        with log.open("wb") as out:
            process = self.hosts[name].popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.peers.append(LinePeer(name, self.hosts[name], home, log, process))

    def wait(self, what: Callable[[], object], timeout_s: float, name: str) -> object:
        """Poll until ``what`` gives something true; RuntimeError with the daemons' words."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := what():
                return found
            time.sleep(TICK_S)
        words = "\n".join(f"--- {peer.name}\n{peer.words()[-1500:]}" for peer in self.peers)
        raise RuntimeError(f"waited {timeout_s:.0f} s for {name}\n{words}")


def _trains(peer: LinePeer) -> bool:
    return bool(peer.look().get("step", 0) > 0)


def _listed(peer: LinePeer) -> bool:
    return peer.look().get("join_to_listed_s") is not None
