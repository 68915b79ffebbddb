"""What a volunteer sets against what the machine shows: the limits of real daemons, measured.

    python benchmarks/limits.py --json limits.json

Two parts, one table. On loopback, one daemon whose owner gives a share of one core, a memory, and
a program that comes first. In network namespaces (root only), a peer whose owner gives rates and a
quota; what it moved is counted by the emulated line, packet by packet, headers and control
included, not by the daemon itself.

| row | asked | measured |
|---|---|---|
| cpu_share | of one thread | CPU s of the learner / wall s |
| cpu_share_all | the same | CPU s of daemon, p2pd and learner / wall s |
| cores | 1 | cores that any thread of the learner may run on |
| nice, idle_io | 10, 1 | of the learner (daemon and p2pd are light and must answer in time) |
| pause_s | one look and a step | from the named program's start until the learner stood still |
| paused_cpu | 0 | CPU s of the learner / wall s while it ran |
| resume_s | one look | from the program's end until a step was done |
| memory_before | | the most that daemon and children held while the learner was made smaller |
| memory_mb | as set | the most that daemon and children held afterwards |
| download_mbit, upload_mbit | as set | the busiest WINDOW_S on the line |
| traffic_counted | 1 | what the daemon says it moved / what the line carried |
| quota_mb | as set | what the line carried when the daemon had left by itself |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from _churnswarm import WORDS
from _nethosts import Host, Hosts, missing
from _wan import Line

from dugnad.peer.client import Client
from dugnad.peer.demoswarm import LINK_PREFIX, PROGRAM, peer_environment
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

LOOK_S: Final = 0.2
WINDOW_S: Final = 5.0
"""Rates are a mean over this: a bucket lets a tenth of a second's allowance through at once."""
SHRINKS: Final = 3
"""Of the learner, one each half minute, until the memory is met."""
START_S: Final = 120.0
STILL_S: Final = 1.0
"""A learner that used no CPU for so long stands still."""
EXIT_QUOTA: Final = 33
QUOTA_BYTES: Final = 12_000_000
LINE: Final = Line(up_mbit=200.0, down_mbit=200.0, delay_ms=5.0)

RUN_FILE: Final = """
[run]
name = "limits"
purpose = "to see what a peer takes"
licence = "CC0-1.0"
token_budget = 1_000_000_000
admission = "open"
seed = 1
[model]
dim = {dim}
layers = 4
heads = 4
hidden = {hidden}
context = 128
[data]
source = "text"
[train]
batch_sequences = {batch}
unit_sequences = {unit}
learning_rate = 1e-3
[exchange]
fragments = 2
steps_per_merge = {steps}
merge_floor_s = {floor_s}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One limit: what was asked, what was measured, and the most that counts as kept."""

    name: str
    asked: float
    measured: float
    most: float
    least: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the machine showed what its owner had asked for."""
        return self.least <= self.measured <= self.most


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--only", choices=["shares", "memory", "line"], help="one part")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measured stretch")
    options = parser.parse_args()
    rows: list[Row] = []
    skipped = ""
    with tempfile.TemporaryDirectory(prefix="dugnad-limits-") as name:
        folder = Path(name)
        (folder / "s").mkdir(mode=0o700)
        if options.only in (None, "shares"):
            rows += shares_and_programs(folder, options.seconds)
        if options.only in (None, "memory"):
            rows += memory(folder, options.seconds)
        if options.only in (None, "line"):
            skipped = missing()
            rows += [] if skipped else rates_and_quota(folder)
    if skipped:
        print(f"rates and quota are not measured: {skipped}", file=sys.stderr)
    print(f"{'limit':18} {'asked':>10} {'measured':>10}  kept")
    for row in rows:
        print(
            f"{row.name:18} {row.asked:10.3f} {row.measured:10.3f}  {'yes' if row.kept else 'NO'}"
        )
    if options.json:
        found = {row.name: asdict(row) | {"kept": row.kept} for row in rows}
        report = {"rows": found, "skipped": skipped, "passed": all(row.kept for row in rows)}
        options.json.write_text(json.dumps(report, indent=1))


# -- one daemon ------------------------------------------------------------------------------------


class Daemon:
    """One `dugnad` process, here or on a host of the emulated network."""

    def __init__(self, folder: Path, name: str, host: Host | None = None) -> None:
        self.home = Home(folder / name)
        self.log = folder / f"{name}.log"
        self._host = host
        self._environment = peer_environment(folder / "s")
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *arguments: str) -> None:
        """Start it; its log goes on."""
        command = [*PROGRAM, *arguments, "--yes", "--home", str(self.home.root), "--threads", "1"]
        popen = subprocess.Popen if self._host is None else self._host.popen
        with self.log.open("ab") as out:
            self.process = popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def status(self) -> Any:  # Any: JSON of its status, None while it does not answer
        ask = Client(self.home, 2.0)
        try:
            if self._host is None:
                return ask.get("/v1/status")
            return self._host.call(lambda: ask.get("/v1/status"))
        except UserError:
            return None

    def link(self) -> str:
        words = self.log.read_text(errors="replace").splitlines()
        return next((line for line in words if line.startswith(LINK_PREFIX)), "")

    def family(self) -> list[psutil.Process]:
        """The daemon and its children, the learner among them."""
        assert self.process is not None
        try:
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def learner(self) -> psutil.Process:
        """The process that trains."""
        for one in self.family():
            with contextlib.suppress(psutil.Error):
                if "dugnad.peer.learner" in " ".join(one.cmdline()):
                    return one
        raise SystemExit(f"no learner runs:\n{self.log.read_text(errors='replace')[-2000:]}")

    def step(self) -> int:
        found = self.status()
        return int(found["step"]) if found else 0

    def end(self) -> None:
        """Ask it to leave, and end it when it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        family = self.family()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(25.0)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        self.process.wait()

    def until(self, what: Callable[[], Any], name: str, seconds: float = START_S) -> Any:
        """Poll until ``what`` gives something true."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := what():
                return found
            time.sleep(LOOK_S)
        words = self.log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{name} did not come within {seconds:.0f} s\n{words}")


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU time that these have used so far."""
    total = 0.0
    for one in processes:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def write_run(folder: Path, name: str, **values: float) -> Path:
    """A small text and a run file that trains on it."""
    place = folder / f"run-{name}"
    (place / "text").mkdir(parents=True)
    lines = (
        " ".join(WORDS[(row * 7 + at) % len(WORDS)] for at in range(9)) for row in range(40_000)
    )
    (place / "text" / "a.txt").write_text("\n".join(lines))
    shape = {"dim": 64, "hidden": 128, "batch": 8, "unit": 32, "steps": 40, "floor_s": 2.0}
    path = place / "run.toml"
    path.write_text(RUN_FILE.format(**(shape | values)))
    return path


# -- on loopback -----------------------------------------------------------------------------------


def shares_and_programs(folder: Path, seconds: float) -> list[Row]:
    """A quarter of core 0 (or the first there is), and nothing while the owner plays."""
    share, core = 0.25, min(psutil.Process().cpu_affinity())
    game = folder / "treasure-hunt"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", game)
    daemon = Daemon(folder, "shares")
    run = write_run(folder, "shares")
    arguments = ["--listen", "127.0.0.1:0", "--cpu-share", f"{share}"]
    arguments += ["--set", f"cores={core}", "--set", f"pause_while={game.name}"]
    try:
        daemon.launch("start", str(run), *arguments)
        daemon.until(lambda: daemon.step() > 3, "training")
        time.sleep(2.0)
        learner, family = daemon.learner(), daemon.family()
        used, used_all, at = cpu_seconds([learner]), cpu_seconds(family), time.monotonic()
        time.sleep(seconds)
        wall = time.monotonic() - at
        rows = [
            Row(
                "cpu_share", share, (cpu_seconds([learner]) - used) / wall, share * 1.05, share / 2
            ),
            Row("cpu_share_all", share, (cpu_seconds(family) - used_all) / wall, share * 1.5),
            Row("cores", 1, len(cores_of(learner)), 1, 1),
            Row("nice", 10, learner.nice(), 19, 10),
            Row("idle_io", 1, float(learner.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE), 1, 1),
        ]
        return rows + game_rows(daemon, learner, game, seconds)
    finally:
        daemon.end()


def cores_of(process: psutil.Process) -> set[int]:
    """The cores that any of its threads may run on."""
    found: set[int] = set()
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            found |= os.sched_getaffinity(thread.id)
    return found


def game_rows(daemon: Daemon, learner: psutil.Process, game: Path, seconds: float) -> list[Row]:
    """The owner's program begins, and ends."""
    with subprocess.Popen([str(game), "600"]) as playing:
        try:
            begun = time.monotonic()
            stood = daemon.until(lambda: still_since(learner), "the pause", 30.0)
            pause_s = stood - begun
            used, at = cpu_seconds([learner]), time.monotonic()
            time.sleep(seconds / 2)
            paused = (cpu_seconds([learner]) - used) / (time.monotonic() - at)
            reason = daemon.status()["reason"]
            before = daemon.step()
        finally:
            playing.kill()
    ended = time.monotonic()
    if "treasure-hunt" not in reason:
        raise SystemExit(f"paused for another reason: {reason!r}")
    daemon.until(lambda: daemon.step() > before, "training after the game", 30.0)
    return [
        Row("pause_s", 2.0, pause_s, 4.0),
        Row("paused_cpu", 0.0, paused, 0.01),
        Row("resume_s", 2.0, time.monotonic() - ended, 4.0),
    ]


def still_since(process: psutil.Process) -> float:
    """When a process began to use no CPU; 0 while it uses some."""
    used, at = cpu_seconds([process]), time.monotonic()
    time.sleep(STILL_S)
    return at if cpu_seconds([process]) - used < 0.02 else 0.0


def memory(folder: Path, seconds: float) -> list[Row]:
    """Less memory than a whole batch takes: the learner has to take fewer sequences at a time."""
    asked = 900.0
    daemon = Daemon(folder, "memory")
    run = write_run(folder, "memory", dim=256, hidden=1024, batch=128, unit=128)
    try:
        daemon.launch("start", str(run), "--listen", "127.0.0.1:0", "--set", f"memory_mb={asked}")
        daemon.until(lambda: daemon.step() > 0, "training", 300.0)
        before = busiest(daemon, SHRINKS * 35.0)
        if before <= asked:
            raise SystemExit(f"{before:.0f} MB at most: the limit was never met")
        return [
            Row("memory_before", math.inf, before, math.inf, asked),
            Row("memory_mb", asked, busiest(daemon, 2 * seconds), asked, 300.0),
        ]
    finally:
        daemon.end()


def busiest(daemon: Daemon, seconds: float) -> float:
    """The most MB that daemon and children hold in a stretch."""
    most, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        most = max(most, sum(rss(one) for one in daemon.family()) / 1e6)
        time.sleep(LOOK_S)
    return most


def rss(process: psutil.Process) -> int:
    """Bytes that it holds; none when it has gone."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


# -- on an emulated line ---------------------------------------------------------------------------


def rates_and_quota(folder: Path) -> list[Row]:
    """A newcomer with a narrow gift of its line, and then with little left of its month."""
    down, up = 8.0, 4.0
    run = write_run(folder, "rates", dim=256, hidden=512, batch=2, unit=16, steps=2, floor_s=20.0)
    with Hosts({"giver": LINE, "taker": LINE}, seed=1) as hosts:
        giver = Daemon(folder, "giver", hosts["giver"])
        taker = Daemon(folder, "taker", hosts["taker"])
        free = ["--listen", "0.0.0.0:0"]
        try:
            giver.launch(
                "start", str(run), *free, "--set", "upload_mbit=0", "--set", "cpu_share=0.3"
            )
            link = giver.until(giver.link, "the link")
            arguments = ["join", link, *free, "--set", f"upload_mbit={up}"]
            arguments += ["--set", f"download_mbit={down}", "--set", "cpu_share=0.3"]
            line = Meter(hosts, "taker")
            taker.launch(*arguments)
            taker.until(lambda: listed(taker, line), "a listed contribution", 240.0)
            until = time.monotonic() + 30.0
            while time.monotonic() < until:
                line.look()
                time.sleep(LOOK_S)
            counted, carried = taker.status()["quota_used"], line.total()
            rows = [
                Row("download_mbit", down, line.most["down"], down * 1.1, down / 2),
                Row("upload_mbit", up, line.most["up"], up * 1.1, up / 2),
                Row("traffic_counted", 1.0, counted / carried, 1.02, 0.9),
            ]
            taker.end()
            moved = until_used_up(taker, line, used_on_disk(taker, counted), arguments)
            return [*rows, Row("quota_mb", QUOTA_BYTES / 1e6, moved / 1e6, QUOTA_BYTES * 1.1e-6)]
        finally:
            taker.end()
            giver.end()


def until_used_up(daemon: Daemon, line: Meter, used: int, arguments: Sequence[str]) -> int:
    """Start it again with a little left of its month; bytes that went over the line till it left
    by itself."""
    before = line.total()
    daemon.launch(*arguments, "--set", f"quota_gb={(used + QUOTA_BYTES) / 1e9}")
    process = daemon.process
    assert process is not None
    daemon.until(lambda: process.poll() is not None, "the end of the quota", 300.0)
    if process.returncode != EXIT_QUOTA:
        raise SystemExit(f"it ended with {process.returncode}, not for its quota")
    return line.total() - before


def used_on_disk(daemon: Daemon, at_least: int) -> int:
    """Bytes that the daemon wrote down as used when it left."""
    from dugnad.peer.savedlife import load_usage

    used = load_usage(daemon.home).within(30, time.time_ns() // 1_000_000)
    return max(used, at_least)


def listed(daemon: Daemon, line: Meter) -> bool:
    """Whether a contribution of it has been merged; the line is read meanwhile."""
    line.look()
    status = daemon.status()
    return bool(status) and status["join_to_listed_s"] is not None


class Meter:
    """Reads the bytes that one host's line carried, and keeps the busiest window of each way."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self._hosts = hosts
        self._name = name
        self._looks: deque[tuple[float, int, int]] = deque()
        self.most = {"up": 0.0, "down": 0.0}
        """Mbit/s, over at least WINDOW_S."""

    def look(self) -> None:
        """Read the line now."""
        now, (up, down) = time.monotonic(), self._bytes()
        self._looks.append((now, up, down))
        while len(self._looks) > 2 and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        then, old_up, old_down = self._looks[0]
        if now - then >= WINDOW_S:
            for way, moved in (("up", up - old_up), ("down", down - old_down)):
                self.most[way] = max(self.most[way], moved * 8e-6 / (now - then))

    def total(self) -> int:
        """Bytes up and down since the network began."""
        return sum(self._bytes())

    def _bytes(self) -> tuple[int, int]:
        counts = self._hosts.counts()[self._name]
        return counts["up_bytes"], counts["down_bytes"]


if __name__ == "__main__":
    main()
