"""What the exchange does on lines that people have at home. Needs root (network namespaces).

    python benchmarks/homelink.py --json homelink.json
    python benchmarks/homelink.py --part mixed --seconds 120

Real daemons whose learners have no cap train one model over an emulated wide-area network
(`_wan`, `_nethosts`). Parts:

* home: four peers on 10 Mbit/s down, 2 up, 80 ms round trip, 1 % loss, over TCP;
* quic: the same where the network carries no TCP at all;
* mixed: lines of 2, 8, 25 and 100 Mbit/s, of which one is halved midway;
* codecs: tokens to a target on lines of 2 to 100 Mbit/s, one of them halved midway, the controller
  against each fixed codec; in the simulator's numeric mode (`_linkworld`), since real processes
  would need hours for it;
* lan: no line to speak of, to see what of the learners' time the machine itself takes.

| key | what | goal |
|---|---|---|
| utilisation | of a learner's time that its steps take, the lowest peer | >= 0.95 |
| heartbeats_lost | pings without an answer, and peers lost | 0 |
| control_p99_s | 99th percentile of heartbeats' round trips, the worst peer | <= 1 |
| tokens_to_target_speed | against the best single fixed codec | >= 1.5 |
| controller_adapts_hand_ins | hand-ins after the halving until one fits the line again | <= 2 |
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from _linepeer import RUN_FILE, LinePeer, LineSwarm
from _linkworld import codecs
from _nethosts import Hosts, missing
from _wan import Line

HOME: Final = Line(2.0, 10.0, delay_ms=20.0, loss=0.005)
"""Two of them make a way of 80 ms there and back on which one packet in a hundred is lost."""
LAN: Final = Line(1000.0, 1000.0)
PARTS: Final = ("home", "quic", "mixed", "codecs", "lan")
MIXED: Final = (2.0, 8.0, 25.0, 100.0)
START_S: Final = 150.0
TICK_S: Final = 0.5
FITS: Final = 1.0
"""A hand-in fits when the line carries it before the next one is due."""
GOALS: Final = {
    "utilisation": (">=", 0.95),
    "heartbeats_lost": ("<=", 0),
    "control_p99_s": ("<=", 1.0),
    "controller_adapts_hand_ins": ("<=", 2),
    "tokens_to_target_speed": (">=", 1.5),
}

Figures = dict[str, Any]  # Any: JSON


def main() -> None:
    """Measure, print, and write the numbers to --json."""
    options = parse()
    parts = PARTS if options.part == "all" else (options.part,)
    if parts != ("codecs",) and (reason := missing()):
        raise SystemExit(reason)
    found: Figures = {}
    for part in parts:
        begin = time.monotonic()
        if part == "codecs":
            found[part] = codecs(seeds=options.seeds, short=options.short)
        elif part == "mixed":
            found[part] = mixed(options)
        else:
            found[part] = equal(options, LAN if part == "lan" else HOME, quic=part == "quic")
        found[part]["seconds"] = round(time.monotonic() - begin, 1)
        show(part, found[part])
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--part", default="all", choices=["all", *PARTS])
    parser.add_argument("--short", action="store_true", help="a minute for each part")
    parser.add_argument("--seconds", type=float, default=0.0, help="measured; 0: 60 or 180")
    parser.add_argument("--peers", type=int, default=4, help="of home and quic")
    parser.add_argument("--steps", type=int, default=80, help="of a peer between merges")
    parser.add_argument("--seeds", type=int, default=3, help="of the simulated comparison")
    parser.add_argument("--codec", default="auto", help="auto, or a codec for all hand-ins")
    options = parser.parse_args()
    options.seconds = options.seconds or (60.0 if options.short else 180.0)
    return options


@contextmanager
def swarm_of(
    lines: dict[str, Line], options: argparse.Namespace, *, quic: bool, richest: str
) -> Iterator[LineSwarm]:
    """A swarm that trains, one daemon on each line."""
    with (
        tempfile.TemporaryDirectory(prefix="homelink-") as folder,
        Hosts(lines, seed=1, without_tcp=quic) as hosts,
    ):
        run = RUN_FILE.format(steps=options.steps, codec=richest)
        swarm = LineSwarm(hosts, Path(folder), codec=options.codec, run=run)
        swarm.start(list(lines), quic=quic, start_s=START_S)
        yield swarm


def equal(options: argparse.Namespace, line: Line, *, quic: bool) -> Figures:
    """Equal lines."""
    lines = {f"peer{n}": line for n in range(options.peers)}
    with swarm_of(lines, options, quic=quic, richest="int8") as swarm:
        return _measured(swarm, options.seconds)


def mixed(options: argparse.Namespace) -> Figures:
    """Unequal lines, of which one is halved when half of the time is over."""
    lines = {
        f"peer{n}": Line(mbit, mbit, delay_ms=20.0, loss=0.001) for n, mbit in enumerate(MIXED)
    }
    with swarm_of(lines, options, quic=False, richest="float32") as swarm:
        figures = _measured(swarm, options.seconds / 2.0)
        victim, line = swarm.peers[1], lines["peer1"]
        half = replace(line, up_mbit=line.up_mbit / 2.0, down_mbit=line.down_mbit / 2.0)
        swarm.hosts.change(victim.name, half)
        adapted = _adapted(victim, half, options.seconds / 2.0)
        figures["halved_mbit"] = [line.up_mbit, half.up_mbit]
        figures["hand_ins_after_halving"] = adapted
        fitting = [n for n, row in enumerate(adapted, 1) if row["fits"]]
        figures["controller_adapts_hand_ins"] = fitting[0] if fitting else None
        figures["codecs"] = {peer.name: peer.look()["codec"] for peer in swarm.peers}
        return figures


def _measured(swarm: LineSwarm, seconds: float) -> Figures:
    """Watch for so long."""
    before = {peer.name: peer.look() for peer in swarm.peers}
    began = {peer.name: time.monotonic() for peer in swarm.peers}
    codecs_seen: dict[str, list[str]] = {peer.name: [] for peer in swarm.peers}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(TICK_S)
        for peer in swarm.peers:
            status, seen = peer.look(), codecs_seen[peer.name]
            if status["hand_ins"] and (not seen or seen[-1] != status["codec"]):
                seen.append(status["codec"])
    shares, rows = [], {}
    for peer in swarm.peers:
        status, was = peer.look(), before[peer.name]
        wall = time.monotonic() - began[peer.name]
        shares.append((status["step_s"] - was["step_s"]) / wall)
        rows[peer.name] = _row(status, was, wall) | {"codecs": codecs_seen[peer.name][-8:]}
    trips = [status for peer in swarm.peers if (status := peer.last["control_p99_s"]) is not None]
    lost = sum(peer.last["heartbeats_lost"] for peer in swarm.peers)
    gone = sum(peer.words().count(" is lost: ") for peer in swarm.peers)
    return {
        "utilisation": round(min(shares), 4),
        "utilisation_mean": round(sum(shares) / len(shares), 4),
        "heartbeats_lost": lost + gone,
        "control_p99_s": round(max(trips), 3) if trips else None,
        "merges": min(row["merges"] for row in rows.values()),
        "peers": rows,
    }


def _row(status: Figures, was: Figures, wall: float) -> Figures:
    kept = ("codec", "bits_per_param", "up_bytes_per_s", "down_bytes_per_s", "control_p99_s")
    row: Figures = {name: status[name] for name in kept}
    for name in ("hand_ins", "merges", "tokens", "bytes_sent", "bytes_saved"):
        row[name] = status[name] - was[name]
    row["up_mbit"] = round(8e-6 * row["bytes_sent"] / wall, 3)
    row["interval_s"] = round(status["interval_s"], 2)
    row["residual"] = round(status["residual_norm_share"], 3)
    return row


def _adapted(peer: LinePeer, line: Line, seconds: float) -> list[Figures]:
    """The hand-ins of a peer after its line changed: what each took and whether that fits."""
    found: list[Figures] = []
    counts = {row["peer"]: row["hand_ins"] for row in peer.peers()}
    known = sum(counts.values())
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(found) < 8:
        time.sleep(TICK_S / 2.0)
        status = peer.look()
        if status["hand_ins"] <= known:
            continue
        known = status["hand_ins"]
        size = status["parameters"] * status["bits_per_param"] / 8.0
        taken = size / (line.up_mbit * 125_000.0)
        found.append(
            {
                "codec": status["codec"],
                "share_of_interval": round(taken / max(status["interval_s"], 1e-3), 3),
                "up_bytes_per_s": round(status["up_bytes_per_s"]),
                "fits": taken <= FITS * status["interval_s"],
            }
        )
    return found


def show(part: str, figures: Figures) -> None:
    """Print a part's figures, with the goals."""
    print(f"== {part} ({figures['seconds']:.0f} s)")
    for key, value in figures.items():
        if key in ("peers", "simulated"):
            for name, row in value.items():
                print(f"   {name}: " + ", ".join(f"{k} {v}" for k, v in row.items()))
        elif key in GOALS:
            sign, goal = GOALS[key]
            met = value is not None and (value >= goal if sign == ">=" else value <= goal)
            print(f"{key} = {value}   goal {sign} {goal}: {'met' if met else 'NOT met'}")
        else:
            print(f"{key} = {value}")


if __name__ == "__main__":
    main()
