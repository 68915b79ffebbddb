"""The peers of `churn.py`: real `dugnad` processes, killed, stopped, woken and started again.

What is seen of them goes into the spans of `_churnfigures`. One thread; a peer is asked by short
requests, a stopped one is not asked.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from _churnfigures import Merge, Sample, Span, Use

from dugnad.dht.ids import RunId, parse_peer, parse_run
from dugnad.peer.client import Client
from dugnad.peer.demoswarm import LINK_PREFIX, PROGRAM, living, peer_environment
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

ASK_S: Final = 1.0
GONE_S: Final = 5.0
"""Children of a killed daemon must be gone after this."""
TERM_S: Final = 20.0
"""A daemon that is asked to leave has ten seconds for its last hand-in, and some for the rest."""
USE_S: Final = 3.0
"""Between two looks at memory and descriptors."""
TEXT_LINES: Final = 60_000
"""About 75 000 sequences: more than a long churn run trains on."""
WORDS: Final = ["red", "green", "blue", "sun", "sea", "of", "and", "the", "hill", "rain"]

RUN_FILE: Final = """
[run]
name = "churn"
purpose = "to see a swarm live with faults"
licence = "CC0-1.0"
token_budget = 1_000_000_000
admission = "open"
seed = {seed}
[model]
dim = 16
layers = 1
heads = 2
hidden = 32
context = 32
[data]
source = "text"
[train]
batch_sequences = 4
unit_sequences = 16
learning_rate = 3e-3
[exchange]
fragments = 2
steps_per_merge = 20
merge_floor_s = {merge_s}
"""


def write_run_file(folder: Path, seed: int, merge_s: float, count: int = TEXT_LINES) -> Path:
    """A small text of so many lines and a run file that trains on it."""
    rng = random.Random(seed)
    (folder / "text").mkdir()
    lines = (" ".join(rng.choices(WORDS, k=9)) for _ in range(count))
    (folder / "text" / "a.txt").write_text("\n".join(lines))
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(seed=seed, merge_s=merge_s))
    return path


class ChurnPeer:
    """One peer through all of its lives."""

    def __init__(self, number: int, folder: Path, command: Sequence[str], cpu_share: float) -> None:
        self.number = number
        self.home = Home(folder / f"peer-{number}")
        self.log = folder / f"peer-{number}.log"
        self.identity = b""
        self.spans: list[Span] = []
        self.stopped: list[psutil.Process] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.family: set[psutil.Process] = set()
        self.last: dict[str, Any] = {}  # Any: JSON of its status
        self.outlived: set[psutil.Process] = set()
        self._environment = peer_environment(folder / "s")
        self._command = [*command, "--yes", "--home", str(self.home.root)]
        self._command += ["--listen", "127.0.0.1:0", "--threads", "1"]
        self._command += ["--cpu-share", f"{cpu_share}"]
        self._command += ["--set", "upload_mbit=0", "--set", "download_mbit=0"]  # no line to spare
        self._use_at = 0.0

    @property
    def span(self) -> Span:
        """Its present or last life."""
        return self.spans[-1]

    @property
    def up(self) -> bool:
        """Whether it runs and is not stopped."""
        return self.process is not None and self.process.poll() is None and not self.stopped

    def start(self) -> None:
        """Start its daemon, the first time or again; its log goes on."""
        assert not self.up, "it runs"
        self.spans.append(Span(self.number, time.time()))
        self.last = {}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, *self._command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self) -> None:
        """Ask how it is and write it down; nothing when it does not answer."""
        assert self.process is not None
        self._see_family()
        client = Client(self.home, ASK_S)
        try:
            if client.daemon().pid != self.process.pid:
                return  # the file of its former life
            status = client.get("/v1/status")
        except UserError:
            return
        now, span = time.time(), self.span
        self.last, self.identity = status, parse_peer(status["peer"])
        if span.begin is None:
            span.begin = now
        if span.started and span.listed is None and status["join_to_listed_s"] is not None:
            span.listed = now
        span.samples.append(Sample(now, status["tokens"], status["state"] == "training"))
        if now - self._use_at >= USE_S:
            self._use_at = now
            self._measure(now)

    def kill(self) -> None:
        """SIGKILL to the daemon; its children have to notice."""
        self.span.end = time.time()
        self._see_family()
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        until = time.monotonic() + GONE_S
        while (left := living(self.family)) and time.monotonic() < until:
            time.sleep(0.05)
        self.outlived.update(left)

    def ask_to_leave(self) -> None:
        """SIGTERM."""
        self.span.end = time.time()
        self._see_family()
        assert self.process is not None
        self.process.terminate()

    def stop(self, *, daemon_only: bool) -> None:
        """SIGSTOP, the daemon first."""
        self.span.end = time.time()
        self._see_family()
        assert self.process is not None
        daemon = psutil.Process(self.process.pid)
        self.stopped = [daemon] if daemon_only else [daemon, *daemon.children(recursive=True)]
        for one in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()

    def wake(self) -> None:
        """SIGCONT, the daemon last."""
        for one in reversed(self.stopped):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()
        self.stopped = []
        now = time.time()
        self.spans.append(Span(self.number, now, begin=now, started=False))

    def sockets_left(self) -> list[Path]:
        """Files in its folder for sockets; a daemon that left in order leaves none."""
        runtime = self.home.runtime(self._environment)
        return [path for path in runtime.rglob("*") if not path.is_dir()]

    def end(self) -> None:
        """End all of its processes at any cost."""
        if self.process is not None and self.process.poll() is None:
            self._see_family()
            for one in self.stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()
            self.process.kill()
            self.process.wait()
        for child in living(self.family):
            with contextlib.suppress(psutil.Error):
                child.kill()
        shutil.rmtree(self.home.runtime(self._environment), ignore_errors=True)

    def _see_family(self) -> None:
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))

    def _measure(self, now: float) -> None:
        sizes, fds = [], 0
        assert self.process is not None
        with contextlib.suppress(psutil.Error, OSError):
            daemon = psutil.Process(self.process.pid)
            for one in (daemon, *daemon.children(recursive=True)):
                sizes.append(one.memory_info().rss / 1e6)
                fds += one.num_fds()
            self.span.uses.append(Use(now, sum(sizes), sizes[0], fds))


def link_of(peer: ChurnPeer) -> str:
    """The line to share that it printed last; '' before."""
    if not peer.log.exists():
        return ""
    lines = peer.log.read_text(errors="replace").splitlines()
    return next((one for one in reversed(lines) if one.startswith(LINK_PREFIX)), "")


def run_of(link: str) -> RunId:
    """The run that a link names."""
    return parse_run(link.removeprefix(LINK_PREFIX).partition("?")[0])


def lineage_of(peer: ChurnPeer, run: RunId, peers: Sequence[ChurnPeer]) -> list[Merge]:
    """The commits of the chain that this peer holds, oldest first, from its store."""
    numbers = {one.identity: one.number for one in peers}
    path = peer.home.run(run).state
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        rows = {
            digest: (parent, time_ms / 1000.0)
            for digest, parent, time_ms in store.execute(
                "SELECT digest, parent, time_ms FROM commits"
            )
        }
        tokens: dict[bytes, dict[int, int]] = {}
        for digest, maker, count in store.execute("SELECT digest, peer, tokens FROM receipts"):
            number = numbers.get(bytes(maker), -1)
            listed = tokens.setdefault(digest, {})
            listed[number] = listed.get(number, 0) + count
        heads = list(store.execute("SELECT fragment, digest FROM heads"))
    found = []
    for fragment, head in heads:
        chain, digest = [], head
        while digest in rows:
            parent, at = rows[digest]
            chain.append(Merge(fragment, at, tokens.get(digest, {})))
            digest = parent
        found += chain[::-1]
    return found


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def interrupted_in_order() -> Iterator[None]:
    """SIGTERM ends the benchmark as Ctrl-C does: the peers are ended first."""

    def stop(number: int, _: object) -> None:
        for one in _SIGNALS:  # a second one must not end the ending
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt(f"signal {number}")

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
