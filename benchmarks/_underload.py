"""What training loses while many listen: a real daemon that trains and serves its page, alone.

Short phases with and without readers take turns, so that what else runs on the machine disturbs
both alike. The readers are one process at the lowest priority: on a volunteer's line they would be
elsewhere. Run with an address, this module is that process: `on` and `off` on its input.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Final

import aiohttp
import psutil
from _churnfigures import interval
from _churnswarm import ChurnPeer, write_run_file
from onscreen import page_of

from dugnad.peer.client import Client

START_S: Final = 90.0
"""The peer trains after this, or the benchmark gives up."""
WARM_S: Final = 8.0
"""Its speed is steady after this."""
SETTLE_S: Final = 1.0
"""After readers came or went, before a phase is measured: connecting is not what is asked."""
LARGER: Final = {"dim = 16": "dim = 64", "hidden = 32": "hidden = 176", "layers = 1": "layers = 2"}
"""The churn benchmark's model with steps of some ten milliseconds, as a small real one has."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What was seen in one phase: tokens a second, tokens per CPU second of the learner, and CPU
    seconds a second of the daemon.
    """

    speed: float
    per_cpu: float
    daemon_cpu: float


class Watched:
    """The daemon, its learner, and the readers."""

    def __init__(self, peer: ChurnPeer, readers: subprocess.Popen[str]) -> None:
        assert peer.process is not None
        self.peer = peer
        self.readers = readers
        self.daemon = psutil.Process(peer.process.pid)
        children = self.daemon.children(recursive=True)
        self.learner = next(c for c in children if "dugnad.peer.learner" in " ".join(c.cmdline()))
        self.client = Client(peer.home, 5.0)

    def turn(self, on: bool) -> None:
        """All readers come, or go."""
        assert self.readers.stdin is not None
        assert self.readers.stdout is not None
        self.readers.stdin.write("on\n" if on else "off\n")
        self.readers.stdin.flush()
        if self.readers.stdout.readline().strip() != "done":
            raise SystemExit("the readers ended")

    def phase(self, seconds: float) -> Phase:
        """Watch for so long."""
        begun, tokens, learner, daemon = self._now()
        time.sleep(seconds)
        ended, after, learner_after, daemon_after = self._now()
        wall, done = ended - begun, after - tokens
        return Phase(
            done / wall, done / max(learner_after - learner, 1e-3), (daemon_after - daemon) / wall
        )

    def _now(self) -> tuple[float, int, float, float]:
        tokens: int = self.client.get("/v1/status")["tokens"]
        return time.monotonic(), tokens, _cpu(self.learner), _cpu(self.daemon)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def training_loss(folder: Path, readers: int, pairs: int, seconds: float) -> dict[str, float]:
    """The figures of `pairs` pairs of phases."""
    run = write_run_file(folder, seed=1, merge_s=4.0)
    text = run.read_text()
    for small, larger in LARGER.items():
        text = text.replace(small, larger)
    run.write_text(text)
    (folder / "s").mkdir(mode=0o700)
    peer = ChurnPeer(1, folder, ["start", str(run), "--dashboard", "127.0.0.1:0"], 1.0)
    peer.start()
    crowd = None
    try:
        address = _trains(peer)
        crowd = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, __file__, address, str(readers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        time.sleep(WARM_S)
        watched = Watched(peer, crowd)
        alone, listened = _phases(watched, pairs, seconds)
        shown = len(crowd_connections(watched.daemon))
    finally:
        if crowd is not None:
            crowd.kill()
            crowd.communicate()
        peer.end()
    return loss_figures(alone, listened) | {"load_readers": readers, "load_connections": shown}


def _trains(peer: ChurnPeer) -> str:
    """Its page's address, once it trains."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        peer.look()
        if peer.last.get("tokens", 0) > 0 and (address := page_of(peer)):
            return address
        time.sleep(0.2)
    raise SystemExit("the peer did not train: " + peer.log.read_text(errors="replace"))


def crowd_connections(daemon: psutil.Process) -> list[object]:
    """Connections to the daemon now."""
    return [one for one in daemon.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]


def _phases(watched: Watched, pairs: int, seconds: float) -> tuple[list[Phase], list[Phase]]:
    alone: list[Phase] = []
    listened: list[Phase] = []
    for pair in range(pairs):
        for on in (False, True) if pair % 2 else (True, False):
            watched.turn(on)
            time.sleep(SETTLE_S)
            (listened if on else alone).append(watched.phase(seconds))
    watched.turn(True)
    return alone, listened


def loss_figures(alone: list[Phase], listened: list[Phase]) -> dict[str, float]:
    """Losses of pairs as medians with their 95 % interval; CPU shares as medians."""
    both = list(zip(alone, listened, strict=True))
    wall, low, high = interval([1 - b.speed / a.speed for a, b in both])
    cpu, cpu_low, cpu_high = interval([1 - b.per_cpu / a.per_cpu for a, b in both])
    quiet, busy = (median(one.daemon_cpu for one in found) for found in (alone, listened))
    return {
        "training_loss_under_load": wall,
        "training_loss_low": low,
        "training_loss_high": high,
        "training_loss_per_cpu": cpu,
        "training_loss_per_cpu_low": cpu_low,
        "training_loss_per_cpu_high": cpu_high,
        "daemon_cpu_alone": quiet,
        "daemon_cpu_under_load": busy,
        "tokens_per_s_alone": median(one.speed for one in alone),
    }


async def listen(address: str, readers: int, orders: IO[str]) -> None:
    """Be the readers: all of them connected after `on`, none after `off`."""
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(address, connector=connector, timeout=timeout) as client:
        tasks: list[asyncio.Task[None]] = []
        while order := (await loop.run_in_executor(None, orders.readline)).strip():
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            wanted = readers if order == "on" else 0
            opened = asyncio.Semaphore(0)
            tasks = [asyncio.create_task(_read(client, opened)) for _ in range(wanted)]
            for _ in range(wanted):
                await opened.acquire()
            print("done", flush=True)


async def _read(client: aiohttp.ClientSession, opened: asyncio.Semaphore) -> None:
    async with client.get("/api/v1/events") as answer:
        opened.release()
        async for _ in answer.content.iter_any():
            pass


if __name__ == "__main__":
    asyncio.run(listen(sys.argv[1], int(sys.argv[2]), sys.stdin))
