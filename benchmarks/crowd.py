"""A crowd of real rosters: more peers than a mesh holds, over real p2pd processes on one machine.

    python benchmarks/crowd.py --peers 70 --each 10 --json FILE

They come together through one seed, stand still for a while, lose one worker with all its peers to
a SIGKILL, and take in as many new ones. Keys: `formed_s` (from the last start until every view is
whole), `links`, `sent_b_s` (control bytes that a peer sends in the calm), `lost_s` (from the kill
until each survivor knows of all the dead), `joined_s`, `false_losses` (live peers called lost by
anybody, by reason), `cores` (CPU in the calm, workers and p2pd), `left_behind` (processes).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psutil
from _crowdside import DEFAULT_MESH

NUMBER: Final = re.compile(r"by \w+|[0-9.]+")
"""What differs between two reasons of one kind."""
LIMIT_S: Final = 240.0
"""For every view to be whole: much longer than it takes, so that a slow machine says how long."""
LOOK_S: Final = 0.5
END_S: Final = 20.0


class Worker:
    """One process with several peers."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("_crowdside.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peers: list[str] = []

    def say(self, **order: object) -> None:
        """Give an order."""
        assert self.process.stdin is not None, "opened with a pipe"
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What it answers."""
        assert self.process.stdout is not None, "opened with a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker has ended: see what it printed")
        return json.loads(line)

    def family(self) -> list[psutil.Process]:
        """It and its p2pd processes."""
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def end(self) -> None:
        """Close its pipe and wait."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Crowd:
    """All workers, and every peer's view as its changes tell it."""

    def __init__(self, folder: Path, each: int, mesh_max: int) -> None:
        self.folder = folder
        self.each = each
        self.mesh_max = mesh_max
        self.workers: list[Worker] = []
        self.views: dict[str, set[str]] = {}
        self.whole_at: dict[str, float] = {}
        self.now: dict[str, dict[str, Any]] = {}
        self.false_losses: Counter[str] = Counter()
        self.count = 0

    def first(self) -> list[str]:
        """Start the first peer of all; the address that the others are told."""
        worker = self._worker()
        worker.say(do="start", count=1, seeds=[], mesh_max=self.mesh_max)
        (addresses,) = worker.answer()
        self.workers.append(worker)
        return list(addresses[:1])

    def add(self, peers: int, seeds: list[str]) -> None:
        """Start so many, one worker after the other; the first worker is filled up."""
        fresh = list(self.workers) if not self.views else []
        counts = [self.each - 1] * len(fresh)
        left = peers - sum(counts)
        fresh += [self._worker() for _ in range(left // self.each)]
        counts += [self.each] * (left // self.each)
        for worker, count in zip(fresh, counts, strict=True):
            worker.say(do="start", count=count, seeds=seeds, mesh_max=self.mesh_max)
            worker.answer()
            if worker not in self.workers:
                self.workers.append(worker)

    def _worker(self) -> Worker:
        self.count += 1
        return Worker(self.folder / f"w{self.count}")

    def look(self) -> None:
        """Follow every view up to now. A peer is whole from the change that made it right."""
        for worker in self.workers:
            worker.say(do="tell")
        rows = {id(worker): worker.answer() for worker in self.workers}
        for worker in self.workers:
            worker.peers = [row["peer"] for row in rows[id(worker)]]
        there = {peer for worker in self.workers for peer in worker.peers}
        for row in (row for found in rows.values() for row in found):
            me = row["peer"]
            view, wanted = self.views.setdefault(me, set()), there - {me}
            for at, peer, lost in row["changes"]:
                (view.discard if lost else view.add)(peer)
                if lost and peer in there:
                    self.false_losses[NUMBER.sub("_", lost.partition(":")[0])] += 1
                if view == wanted:
                    self.whole_at[me] = at
            if view != wanted:
                self.whole_at.pop(me, None)
            self.now[me] = row
        for gone in set(self.views) - there:
            for table in (self.views, self.whole_at, self.now):
                table.pop(gone, None)

    def settle(self, since: float) -> list[float]:
        """Wait until every view is right; seconds after ``since``, of each peer."""
        end = time.monotonic() + LIMIT_S
        while True:
            time.sleep(LOOK_S)
            self.look()
            if len(self.whole_at) == len(self.views):
                return [max(0.0, at - since) for at in self.whole_at.values()]
            if time.monotonic() > end:
                raise SystemExit(f"after {LIMIT_S:.0f} s {self.lacking()}")

    def lacking(self) -> str:
        """How many views are not right, and whom most of them lack, for people."""
        there = set(self.views)
        lack = Counter(peer for me, view in self.views.items() for peer in there - view - {me})
        worst = ", ".join(f"{peer[-8:]} in {count}" for peer, count in lack.most_common(5))
        links = sorted(row["links"] for row in self.now.values())
        return (
            f"{len(self.views) - len(self.whole_at)} of {len(self.views)} views are wrong; "
            f"{sum(lack.values())} entries lack ({worst or 'none'}); "
            f"links {links[0]} to {links[-1]}, "
            f"{sum(row['crowded'] for row in self.now.values())} crowded; "
            f"lost falsely: {dict(self.false_losses)}"
        )

    def cpu_s(self) -> float:
        """CPU of all workers and their p2pd processes so far."""
        times = [one.cpu_times() for worker in self.workers for one in worker.family()]
        return float(sum(one.user + one.system for one in times))

    def sent(self) -> dict[str, int]:
        """Control bytes that each peer has sent."""
        return {peer: row["sent"] for peer, row in self.now.items()}


def measure(crowd: Crowd, peers: int, calm_s: float) -> dict[str, object]:
    """Come together, stand still, lose some, take some in."""
    seeds = crowd.first()
    crowd.add(peers - 1, seeds)
    formed = crowd.settle(time.monotonic())
    forming = crowd.false_losses.copy()
    before, cpu, start = crowd.sent(), crowd.cpu_s(), time.monotonic()
    time.sleep(calm_s)
    crowd.look()
    passed = time.monotonic() - start
    rates = [(sent - before[peer]) / passed for peer, sent in crowd.sent().items()]
    links = [row["links"] for row in crowd.now.values()]
    calm = {
        "peers": len(crowd.views),
        "crowded": sum(row["crowded"] for row in crowd.now.values()),
        "formed_s": max(formed),
        "links": {"mean": statistics.mean(links), "min": min(links), "max": max(links)},
        "sent_b_s": {"mean": statistics.mean(rates), "max": max(rates)},
        "cores": (crowd.cpu_s() - cpu) / passed,
        "false_losses_forming": dict(forming),
    }
    victim = crowd.workers.pop()
    killed_at = time.monotonic()
    victim.process.kill()
    victim.process.wait()
    lost = crowd.settle(killed_at)
    asked_at = time.monotonic()
    crowd.add(crowd.each, seeds)
    joined = crowd.settle(asked_at)
    return {
        **calm,
        "killed": crowd.each,
        "lost_s": {"median": statistics.median(lost), "max": max(lost)},
        "joined_s": {"median": statistics.median(joined), "max": max(joined)},
        "false_losses": dict(crowd.false_losses),
        "rss_mb": sum(p.memory_info().rss for w in crowd.workers for p in w.family()) / 1e6,
    }


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=DEFAULT_MESH + 6)
    parser.add_argument("--each", type=int, default=10, help="peers in one process")
    parser.add_argument("--mesh-max", type=int, default=DEFAULT_MESH)
    parser.add_argument("--calm", type=float, default=30.0, help="seconds")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.peers % asked.each or asked.peers < 2 * asked.each:
        parser.error("--peers is a multiple of --each, and at least twice as many")
    with tempfile.TemporaryDirectory(prefix="dgn") as folder:
        crowd = Crowd(Path(folder), asked.each, asked.mesh_max)
        family: list[psutil.Process] = []
        try:
            found = measure(crowd, asked.peers, asked.calm)
            family = [one for worker in crowd.workers for one in worker.family()]
        finally:
            for worker in crowd.workers:
                worker.end()
    _, left = psutil.wait_procs(family, END_S)
    found["left_behind"] = len(left)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
