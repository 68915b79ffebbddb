"""A swarm of real processes that is killed, stopped and started again by a seeded schedule.

    python benchmarks/churn.py --minutes 5 --seed 1 --json churn.json

Peers with CPU-capped learners train a tiny model over loopback; from the end of a calm minute a
fault comes every 15 s (`_churnplan`). Then all get time to agree, are asked to leave, and what they
left behind is counted. How each figure is computed stands in `_churnfigures`.

| key | what | goal |
|---|---|---|
| goodput_alive | tokens listed / tokens that the live peers could have trained | >= 0.90 |
| participation | how often a peer that trains is listed in a commit or the next one | >= 0.95 |
| dip, dip_low, dip_high | fall of the others' tokens/s after a departure; 95 % interval | <= 0.03 |
| dip_placebo | the same around moments without a fault: the noise | |
| back_s_p95 | from a restart to the first listed contribution | <= 30 |
| outage_s | mean of the same, for goodput.py | |
| units_lost | units that somebody gave up | 0 |
| digests_equal | the same heads everywhere at the end | true |
| left_behind | processes and sockets after the end | 0 |
| rss_slope, fds_slope | a peer's MB and descriptors a minute, median of lives | 0 |
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import _churnfigures as figures
from _churnplan import EVERY_S, Fault, Kind, schedule
from _churnswarm import (
    TERM_S,
    TEXT_LINES,
    ChurnPeer,
    interrupted_in_order,
    lineage_of,
    link_of,
    run_of,
    write_run_file,
)

from dugnad.peer.demoswarm import living

TICK_S: Final = 0.5
START_S: Final = 90.0
"""All peers train after this, or the benchmark gives up."""
AGREE_S: Final = 40.0
"""Equal heads must come this soon after the last fault's end."""
SETTLE_S: Final = 1.0
"""From the end of the last daemon until nothing of it may be left."""
FLOWED_S: Final = 6.0
"""After everybody trains, until the calm minute begins."""


class Churn:
    """One run of the benchmark."""

    lines = TEXT_LINES
    """Of the text that is trained on."""
    peer_of: type[ChurnPeer] = ChurnPeer

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.peers: list[ChurnPeer] = []
        self.departures: list[figures.Departure] = []
        self.begun = self.ended = self.calm = 0.0
        self.digests_equal = False
        self.run_link = ""
        self._pool = ThreadPoolExecutor(options.peers)
        self._due: list[tuple[float, Callable[[], None]]] = []

    def run(self) -> dict[str, Any]:  # Any: JSON
        """Start, disturb, let agree, end; the figures."""
        try:
            self._start()
            faults = schedule(
                self.options.seed,
                self.options.peers,
                60.0 * self.options.minutes,
                self.options.every,
            )
            self._disturb(faults)
            self.digests_equal = self._wait(self._agree, AGREE_S)
            lost = max(one.last["units"]["lost"] for one in self.peers)
            statuses = [one.last for one in self.peers]
            left = self._leave()
            return self._figures(lost, left, statuses)
        finally:
            for peer in self.peers:
                peer.end()
            self._pool.shutdown()

    def _start(self) -> None:
        options = self.options
        (self.folder / "s").mkdir(mode=0o700)
        file = write_run_file(self.folder, options.seed, options.merge, self.lines)
        first = self.peer_of(0, self.folder, ["start", str(file)], options.cpu_share)
        self.peers.append(first)
        first.start()
        if not self._wait(lambda: bool(link_of(first)), START_S):
            raise SystemExit(f"the first peer does not start: {_end_of(first.log)}")
        self.run_link = link_of(first)
        for number in range(1, options.peers):
            command = ["join", self.run_link]
            peer = self.peer_of(number, self.folder, command, options.cpu_share)
            self.peers.append(peer)
            peer.start()
        if not self._wait(lambda: all(one.span.listed for one in self.peers), START_S):
            late = [one.number for one in self.peers if not one.span.listed]
            raise SystemExit(f"peers {late} do not train; {_end_of(self.peers[late[0]].log)}")
        say(f"{options.peers} peers are listed")
        self._until(time.time() + FLOWED_S)
        self.calm = time.time()
        self._until(self.calm + options.calm)

    def _disturb(self, faults: Sequence[Fault]) -> None:
        self.begun = time.time()
        for fault in faults:
            self._until(self.begun + fault.at_s)
            self._do(fault)
        self._until(self.begun + 60.0 * self.options.minutes)
        self.ended = time.time()
        while self._due:
            self._until(self._due[0][0] + TICK_S)

    def _do(self, fault: Fault) -> None:
        peer, now = self.peers[fault.peer], time.time()
        if not peer.up:
            say(f"{now - self.begun:6.1f} s: peer {peer.number} is not up; no {fault.kind}")
            return
        say(f"{now - self.begun:6.1f} s: {fault.kind} peer {peer.number}, {fault.away_s:.1f} s")
        again = peer.start
        if fault.kind is Kind.KILL:
            peer.kill()
        elif fault.kind is Kind.RESTART:
            peer.ask_to_leave()
            again = lambda: self._start_when_ended(peer)  # noqa: E731  one of three ways back
        else:
            peer.stop(daemon_only=fault.kind is Kind.HANG)
            again = peer.wake
        self.departures.append(figures.Departure(now, peer.number, fault.kind))
        self._due.append((now + fault.away_s, again))

    def _start_when_ended(self, peer: ChurnPeer) -> None:
        assert peer.process is not None
        try:
            peer.process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            peer.kill()
        peer.start()

    def _until(self, moment: float) -> None:
        """Watch, and do what is due, until then."""
        while (now := time.time()) < moment:
            for row in [one for one in self._due if one[0] <= now]:
                self._due.remove(row)
                row[1]()
            began = time.monotonic()
            list(self._pool.map(lambda one: one.look(), [one for one in self.peers if one.up]))
            spent = time.monotonic() - began
            time.sleep(max(0.0, min(TICK_S - spent, moment - time.time())))

    def _wait(self, what: Callable[[], bool], timeout_s: float) -> bool:
        until = time.time() + timeout_s
        while not (done := what()) and time.time() < until:
            self._until(time.time() + TICK_S)
        return done

    def _agree(self) -> bool:
        heads = {tuple(one.last.get("heads", [one.number])) for one in self.peers}
        return len(heads) == 1

    def _leave(self) -> int:
        """Ask all to leave; how much of them is left."""
        for peer in self.peers:
            if peer.up:
                peer.ask_to_leave()
        until = time.time() + TERM_S
        while any(one.up for one in self.peers) and time.time() < until:
            time.sleep(0.1)
        time.sleep(SETTLE_S)
        left: list[object] = [f"daemon of peer {one.number}" for one in self.peers if one.up]
        for peer in self.peers:
            left += [*living(peer.family), *peer.outlived, *peer.sockets_left()]
        for row in left:
            say(f"left behind: {row}")
        return len(left)

    def _figures(self, lost: int, left: int, statuses: list[dict[str, Any]]) -> dict[str, Any]:
        chains = [lineage_of(one, run_of(self.run_link), self.peers) for one in self.peers]
        merges = max(chains, key=len)
        begin, end = self.begun, self.ended
        spans = [span for one in self.peers for span in one.spans]
        listed = figures.listed_tokens(merges, begin, end)
        could = could_now = 0.0
        for peer in self.peers:
            alive = figures.alive_seconds(peer.spans, begin, end)
            could += alive * figures.own_speed(peer.spans, self.calm, begin)
            could_now += alive * figures.own_speed(peer.spans, begin, end)
        back = [s.listed - s.asked for s in spans if s.started and s.listed and s.asked > begin]
        missing = [
            s.peer
            for s in spans
            if s.started and s.asked > begin and not s.listed and (s.end or end) - s.asked > 30.0
        ]
        rss = figures.slopes(spans, lambda one: one.rss_mb)
        daemon = figures.slopes(spans, lambda one: one.daemon_mb)
        fds = figures.slopes(spans, lambda one: float(one.fds))
        return {
            "minutes": self.options.minutes,
            "seed": self.options.seed,
            "peers": self.options.peers,
            "cpu_share": self.options.cpu_share,
            "faults": len(self.departures),
            "merges": len([one for one in merges if begin <= one.at < end]),
            "goodput_alive": listed / could if could else None,
            "goodput_alive_now": listed / could_now if could_now else None,
            "participation": figures.participation(merges, spans, begin, end),
            **self._dips(spans),
            "back_s_median": median(back) if back else None,
            "back_s_p95": figures.p95(back) if back else None,
            "outage_s": mean(back) if back else None,
            "back_s": [round(one, 2) for one in back],
            "wake_s_p95": _wake(spans, merges),
            "not_back": missing,
            "units_lost": lost,
            "digests_equal": self.digests_equal,
            "rss_slope": median(rss) if rss else None,
            "rss_slope_max": max(rss) if rss else None,
            "rss_slope_daemon": median(daemon) if daemon else None,
            "fds_slope": median(fds) if fds else None,
            "fds_slope_max": max(fds) if fds else None,
            "lives_watched": len(rss),
            "left_behind": left,
            "longest_gap_s": max((one["longest_gap_s"] for one in statuses), default=0.0),
            "uses": {
                str(n): [
                    [round(one.at - begin), round(one.rss_mb), round(one.daemon_mb), one.fds]
                    for one in span.uses[::5]
                ]
                for n, span in enumerate(spans)
            },
        }

    def _dips(self, spans: list[figures.Span]) -> dict[str, Any]:
        found = figures.dips(self.departures, spans)
        shift = self.options.every / 2
        calm = [
            figures.Departure(self.calm + figures.WINDOW_S * (1 + 2 * n), -1, "none")
            for n in range(int(self.options.calm / (2 * figures.WINDOW_S)))
        ]
        between = [figures.Departure(one.at + shift, -1, "none") for one in self.departures]
        placebo = figures.dips([*calm, *between], spans)
        low = high = middle = None
        if found:
            middle, low, high = figures.interval(found, self.options.seed)
        return {
            "dip": middle,
            "dip_low": low,
            "dip_high": high,
            "dips": len(found),
            "dip_placebo": median(placebo) if placebo else None,
            "dip_placebo_spread": median(abs(one) for one in placebo) if placebo else None,
        }


def _wake(spans: Sequence[figures.Span], merges: Sequence[figures.Merge]) -> float | None:
    """95th percentile of the time from SIGCONT to the next commit that lists the woken peer."""
    found = []
    for span in spans:
        if not span.started:
            after = [one.at for one in merges if one.at > span.asked and span.peer in one.tokens]
            if after:
                found.append(min(after) - span.asked)
    return figures.p95(found) if found else None


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:] if log.exists() else "it has no log"


def say(text: str) -> None:
    """Progress, for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two faults")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds before the first fault")
    parser.add_argument("--cpu-share", type=float, default=0.08, help="cap of each learner")
    parser.add_argument("--merge", type=float, default=2.0, help="seconds between merges")
    parser.add_argument("--keep", help="keep the peers' folders and logs here")
    return parser.parse_args()


def main() -> None:
    """Run it and print the figures."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="dugnad-churn-") as name, interrupted_in_order():
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        found = Churn(options, folder).run()
    for key, value in found.items():
        print(f"{key:20} {value:.4g}" if isinstance(value, float) else f"{key:20} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
