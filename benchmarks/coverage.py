"""A whole epoch under churn: is each sequence listed, and how much is done twice?

    python benchmarks/coverage.py --seed 1 --json coverage.json

Six real peers with CPU-capped learners train one epoch of a small text over loopback while one of
them is killed, stopped or started again every few seconds (`_churnplan`). When all see the epoch as
done they are asked to leave, and the commits that are then on a disk are counted
(`_coveragefigures`).

| key | what | goal |
|---|---|---|
| covered | share of the epoch's sequences that the lineage lists | 1.0 |
| duplicates | listings of what was listed already, as a share of the epoch | <= 0.02 |
| takeover_s_p95 | from a loss being seen until its units belong to the survivors | <= 1 |
| takeovers | losses that were seen with units to take over | |
| seen_s_p95 | from a fault to a survivor's word that the peer is lost or has left | |
| uncounted | share of all trained tokens that count for nobody: died with a peer, or done twice | |
| epoch_s | from the first listed contribution until all see the epoch as done | |
| tail_s | from the last fault until then | |
| units_lost, digests_equal, left_behind | as in churn.py | 0, true, 0 |

With `--slow 8 --every 100000` nothing is killed, and the last peer has an eighth of the CPU time:

| key | what | goal |
|---|---|---|
| slow_speed | its tokens / the mean of the others, over the epoch | about 1/8 |
| slow_idle | share of the time in which it had nothing to train on | 0 |
| slow_listed | commits that list it / commits of the epoch | > 0 |
| gap_ratio | longest time between two merges of a fragment / the usual one | <= 2 |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from _churnfigures import p95, tokens_between
from _churnplan import schedule
from _churnswarm import ASK_S, ChurnPeer, interrupted_in_order, lineage_of, run_of
from _coveragefigures import EpochShape, listed, trained
from churn import AGREE_S, TICK_S, Churn, say

from dugnad.averaging.formats import Input, UnitPiece
from dugnad.dht.ids import RunId
from dugnad.dht.records import decode
from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.manifest import decode_manifest

EPOCH_S_MAX: Final = 600.0
"""An epoch that takes longer is given up, and its coverage is what it is."""
INPUTS_BYTES_MAX: Final = 4 << 20
LAST_FAULT: Final = 0.8
"""No fault after this share of the epoch: its end is to be seen."""


class CoveragePeer(ChurnPeer):
    """A peer whose word about losses is kept: (when it saw one, its kind, units, seconds)."""

    slow: tuple[int, float] = (-1, 1.0)
    """Which peer has only this part of the CPU time of the others."""

    def __init__(self, number: int, folder: Path, command: Sequence[str], share: float) -> None:
        which, by = self.slow
        super().__init__(number, folder, command, share / by if number == which else share)
        self.losses: list[tuple[float, str, int, float]] = []
        self._heard = (-1, 0)

    def look(self) -> None:
        """Ask how it is, and what it saw since."""
        super().look()
        if not self.last:
            return
        life, since = self.last["started_at_ms"], 0
        if self._heard[0] == life:
            since = self._heard[1]
        try:
            rows = Client(self.home, ASK_S).get(f"/v1/events?since={since}")
        except UserError:
            return
        for row in rows:
            since = row["n"]
            if row["kind"] in ("lost", "left"):
                data = row["data"]
                moment = row["at_ms"] / 1000.0
                self.losses.append((moment, row["kind"], data["units"], data["takeover_s"]))
        self._heard = (life, since)


class Coverage(Churn):
    """One run of the benchmark."""

    peer_of = CoveragePeer

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        super().__init__(options, folder)
        self.lines = options.lines

    def run(self) -> dict[str, Any]:  # Any: JSON
        """Start, disturb for an epoch, let agree, end; the figures."""
        try:
            self._start()
            self._epoch()
            self.digests_equal = self._wait(self._agree, AGREE_S)
            lost = max(one.last["units"]["lost"] for one in self.peers)
            left = self._leave()
            return self._coverage() | {
                "units_lost": lost,
                "digests_equal": self.digests_equal,
                "left_behind": left,
            }
        finally:
            for peer in self.peers:
                peer.end()
            self._pool.shutdown()

    def _epoch(self) -> None:
        """Faults until most of the epoch is done, then peace until all of it is."""
        options = self.options
        self.begun = time.time()
        for fault in schedule(options.seed, options.peers, EPOCH_S_MAX, options.every):
            self._until(self.begun + fault.at_s)
            if self._progress() >= LAST_FAULT:
                break
            say(f"{100.0 * self._progress():5.1f} % of the epoch is listed")
            self._do(fault)
        while self._due:  # whoever is away comes back
            self._until(self._due[0][0] + 0.5)
        rest = self.begun + EPOCH_S_MAX - time.time()
        if not self._wait(lambda: self._progress() >= 1.0, rest):
            say("the epoch is not done in time")
        self.ended = time.time()

    def _progress(self) -> float:
        """How far the epoch is in the eyes of the one who knows least of it."""
        counts = [one.last["units"] for one in self.peers if one.up and one.last]
        done = [
            1.0 if row["epoch"] > 0 else row["epoch_listed"] / row["epoch_sequences"]
            for row in counts
        ]
        return min(done, default=0.0)

    def _coverage(self) -> dict[str, Any]:
        run = run_of(self.run_link)
        manifest = decode_manifest(self.peers[0].home.run(run).manifest.read_bytes())
        fragments = len(manifest.table.fragments)
        shape = EpochShape(0, manifest.data.held_out_start, fragments)
        best = max(self.peers, key=lambda one: sum(one.last["versions"]))
        pieces = list(pieces_of(best, run))
        found = listed(pieces, run, shape)
        epochs = 1 + max(piece.epoch for _, piece in pieces)
        later = (EpochShape(n, shape.sequences, fragments) for n in range(1, epochs))
        counted = found.covered + sum(listed(pieces, run, one).covered for one in later)
        total = sum(trained(one.spans) for one in self.peers)
        losses = [row for one in self.peers if isinstance(one, CoveragePeer) for row in one.losses]
        took = [seconds for _, _, units, seconds in losses if units]
        seen = [self._since_fault(moment) for moment, *_ in losses if moment < self.ended]
        known = [one for one in seen if one is not None]
        last_fault = max((one.at for one in self.departures), default=self.begun)
        return {
            "seed": self.options.seed,
            "peers": self.options.peers,
            "cpu_share": self.options.cpu_share,
            "faults": len(self.departures),
            "sequences": found.sequences,
            "covered": found.share,
            "duplicates": found.duplicates,
            "takeover_s_p95": p95(took) if took else None,
            "takeovers": len(took),
            "units_taken": sum(units for _, _, units, _ in losses),
            "seen_s_p95": p95(known) if known else None,
            "uncounted": 1.0 - counted * manifest.data.context / total if total else None,
            "epoch_s": self.ended - self.begun,
            "tail_s": self.ended - last_fault,
            **(self._slow(best, run) if self.options.slow > 1.0 else {}),
        }

    def _slow(self, best: ChurnPeer, run: RunId) -> dict[str, Any]:
        """How the slow peer fared among the others, from the first calm moment to the end."""
        begin, end = self.begun, self.ended
        *others, slow = self.peers
        done = [tokens_between(one.span.samples, begin, end - TICK_S) for one in self.peers]
        rates = [one or 0.0 for one in done]
        inside = [one for one in slow.span.samples if begin <= one.at <= end]
        merges = [one for one in lineage_of(best, run, self.peers) if begin <= one.at <= end]
        usual = [one.last["interval_s"] for one in others]
        gaps = [one.last["longest_gap_s"] for one in others]
        return {
            "slow_speed": rates[-1] / mean(rates[:-1]) if any(rates[:-1]) else None,
            "slow_idle": mean(not one.training for one in inside) if inside else None,
            "slow_listed": mean(slow.number in one.tokens for one in merges) if merges else None,
            "gap_ratio": max(gaps) / median(usual) if median(usual) else None,
        }

    def _since_fault(self, moment: float) -> float | None:
        before = [one.at for one in self.departures if one.at <= moment]
        return moment - max(before) if before else None


def pieces_of(peer: ChurnPeer, run: RunId) -> Iterator[tuple[int, UnitPiece]]:
    """(fragment, piece) of all that the chains on this peer's disk list."""
    path = peer.home.run(run).state
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        heads = list(store.execute("SELECT fragment, digest FROM heads"))
        for fragment, digest in heads:
            while row := store.execute(
                "SELECT parent, inputs FROM commits WHERE digest = ?", (digest,)
            ).fetchone():
                digest = row[0]
                for one in decode(row[1], tuple[Input, ...], INPUTS_BYTES_MAX):
                    for piece in () if one.refusal else one.pieces:
                        yield fragment, piece


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--lines", type=int, default=40_000, help="lines of text: an epoch")
    parser.add_argument("--cpu-share", type=float, default=0.08, help="cap of each learner")
    parser.add_argument("--slow", type=float, default=1.0, help="the last peer is slower by this")
    parser.add_argument("--merge", type=float, default=2.0, help="seconds between merges")
    parser.add_argument("--keep", help="keep the peers' folders and logs here")
    return parser.parse_args()


def main() -> None:
    """Run it and print the figures."""
    options = parse()
    options.calm = 0.0
    CoveragePeer.slow = (options.peers - 1, options.slow)
    with tempfile.TemporaryDirectory(prefix="dugnad-coverage-") as name, interrupted_in_order():
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        found = Coverage(options, folder).run()
    for key, value in found.items():
        print(f"{key:20} {value:.4g}" if isinstance(value, float) else f"{key:20} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
