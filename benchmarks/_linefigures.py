"""What is measured of the peers of `homelink.py` over a stretch of time: where their learners' time
goes, what their processes cost, and what their lines carried."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
from _linepeer import LinePeer

Figures = dict[str, Any]  # Any: JSON
TICK_S: Final = 0.5
CODECS_SHOWN: Final = 8
COUNTED: Final = ("heartbeats_lost", "hand_ins", "merges", "tokens", "bytes_sent", "bytes_saved")
KEPT: Final = ("codec", "bits_per_param", "up_bytes_per_s", "down_bytes_per_s", "control_p99_s")


@dataclass(slots=True)
class _Seen:
    """One peer at the beginning, and the codecs since."""

    status: Figures
    at: float
    cpu: dict[str, float]
    called_lost: int
    codecs: list[str] = field(default_factory=list)


class Watch:
    """Peers from now on."""

    def __init__(self, peers: Sequence[LinePeer]) -> None:
        self.peers = peers
        self._since = [
            _Seen(peer.look(), time.monotonic(), cpu_of(peer), len(called_lost(peer)))
            for peer in peers
        ]

    def run(self, seconds: float) -> Watch:
        """Look at them now and then for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(TICK_S)
            for peer, seen in zip(self.peers, self._since, strict=True):
                status = peer.look()
                if status["hand_ins"] and seen.codecs[-1:] != [status["codec"]]:
                    seen.codecs.append(status["codec"])
        return self

    def rows(self) -> dict[str, Figures]:
        """What came of each."""
        pairs = zip(self.peers, self._since, strict=True)
        return {peer.name: _row(peer, seen) for peer, seen in pairs}


def summary(rows: dict[str, Figures]) -> Figures:
    """All peers' in one."""
    shares = [row["utilisation"] for row in rows.values()]
    trips = [row["control_p99_s"] for row in rows.values() if row["control_p99_s"] is not None]
    return {
        "utilisation": min(shares),
        "utilisation_mean": round(sum(shares) / len(shares), 4),
        "heartbeats_lost": sum(
            row["heartbeats_lost"] + row["called_lost"] for row in rows.values()
        ),
        "control_p99_s": max(trips) if trips else None,
        "merges": min(row["merges"] for row in rows.values()),
    }


def _row(peer: LinePeer, seen: _Seen) -> Figures:
    """Its rests, which its owner's share asks for, are no time that it could have trained in, nor
    is what it evaluated or proved on the swarm's behalf."""
    status, wall = peer.look(), time.monotonic() - seen.at
    spent = {name: s - seen.status["learner_s"][name] for name, s in status["learner_s"].items()}
    free = max(wall - spent["rested"] - spent["asked"], 1e-3)
    row: Figures = {"utilisation": round(spent["steps"] / free, 4)}
    for name in ("served", "starved"):
        row[f"{name}_share"] = round(spent[name] / free, 4)
    now = cpu_of(peer)
    row["cpu"] = {name: round((now[name] - seen.cpu.get(name, 0.0)) / wall, 3) for name in now}
    row |= {name: status[name] - seen.status[name] for name in COUNTED}
    gone = called_lost(peer)[seen.called_lost :]
    row |= {"called_lost": len(gone)} | ({"lost_words": gone[:3]} if gone else {})
    row |= {name: rounded(status[name]) for name in KEPT}
    row["up_mbit"] = round(8e-6 * row["bytes_sent"] / wall, 3)
    row["interval_s"] = round(status["interval_s"], 2)
    row["residual"] = round(status["residual_norm_share"], 3)
    row["codecs"] = seen.codecs[-CODECS_SHOWN:]
    return row


def called_lost(peer: LinePeer) -> list[str]:
    """What it said of peers that it called lost."""
    return [line for line in peer.words().splitlines() if " is lost: " in line]


def rounded(value: Any) -> Any:  # Any: JSON
    """Numbers to four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def cpu_of(peer: LinePeer) -> dict[str, float]:
    """CPU seconds of a peer's processes so far."""
    found = {"daemon": 0.0, "p2pd": 0.0, "learner": 0.0}
    with contextlib.suppress(psutil.Error):
        daemon = psutil.Process(peer.process.pid)
        for one in (daemon, *daemon.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                words = " ".join(one.cmdline())
                name = "learner" if "peer.learner" in words else "p2pd"
                times = one.cpu_times()
                found["daemon" if one == daemon else name] += times.user + times.system
    return found
