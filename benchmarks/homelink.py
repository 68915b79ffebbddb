"""What the exchange does on lines that people have at home. Needs root (network namespaces).

    python benchmarks/homelink.py --json homelink.json
    python benchmarks/homelink.py --part mixed --seconds 120

Real daemons train one model over an emulated wide-area network (`_wan`, `_nethosts`). Their
learners are capped at a share of a core, as several share this machine's; the rests that this takes
are no time that a learner could have trained in. Parts:

* home: four peers on 10 Mbit/s down, 2 up, 80 ms round trip, 1 % loss, over TCP;
* quic: the same where the network carries no TCP at all;
* mixed: lines of 2, 8, 25 and 100 Mbit/s, of which one is halved midway;
* join: when a newcomer on 2 Mbit/s is of use, with 0.9 and with 4.4 million parameters;
* codecs: tokens to a target on lines of 2 to 100 Mbit/s, one of them halved midway, the controller
  against each fixed codec; in the simulator's numeric mode (`_linkworld`), since real processes
  would need hours for it;
* lan: no line to speak of, to see what of the learners' time the machine itself takes.

| key | what | goal |
|---|---|---|
| utilisation | of a learner's time, its rests aside, that steps take, the lowest peer | >= 0.95 |
| utilisation_without_line | the same in the turns without a line: what is not the line's | |
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
from statistics import median
from typing import Final

from _linefigures import TICK_S, Figures, Watch, summary
from _linepeer import LARGE, RUN_FILE, SMALL, LinePeer, LineSwarm
from _linkworld import codecs
from _nethosts import Hosts, missing
from _wan import Line

from dugnad.averaging.linkcontrol import GAMMA

HOME: Final = Line(2.0, 10.0, delay_ms=20.0, loss=0.005)
"""Two of them make a way of 80 ms there and back on which one packet in a hundred is lost."""
LAN: Final = Line(1000.0, 1000.0)
PARTS: Final = ("home", "quic", "mixed", "join", "codecs", "lan")
NEWCOMER: Final = Line(2.0, 2.0, delay_ms=20.0, loss=0.001)
AHEAD: Final = 12
"""Merges of all fragments together that the founder has made when the newcomer comes."""
JOIN_S: Final = 240.0
MIXED: Final = (2.0, 8.0, 25.0, 100.0)
START_S: Final = 150.0
TURNS: Final = 4
"""With a line, without, with, without: what else the machine does changes meanwhile."""
FITS: Final = 1.25 * GAMMA
"""Hand-ins fit when the line carries them in the share of an interval that they are meant to take,
as far as its rate is known (to a quarter)."""
GOALS: Final = {
    "utilisation": (">=", 0.95),
    "heartbeats_lost": ("<=", 0),
    "control_p99_s": ("<=", 1.0),
    "controller_adapts_hand_ins": ("<=", 2),
    "tokens_to_target_speed": (">=", 1.5),
}


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
        elif part == "join":
            found[part] = joining(options)
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
    parser.add_argument("--cpu-share", type=float, default=0.25, help="of each learner")
    parser.add_argument("--seeds", type=int, default=3, help="of the simulated comparison")
    parser.add_argument("--codec", default="auto", help="auto, or a codec for all hand-ins")
    options = parser.parse_args()
    options.seconds = options.seconds or (60.0 if options.short else 180.0)
    return options


@contextmanager
def swarm_of(
    lines: dict[str, Line],
    options: argparse.Namespace,
    *,
    quic: bool,
    richest: str,
    model: dict[str, int] = SMALL,
) -> Iterator[LineSwarm]:
    """One daemon on each line, none of which runs yet."""
    with (
        tempfile.TemporaryDirectory(prefix="homelink-") as folder,
        Hosts(lines, seed=1, without_tcp=quic) as hosts,
    ):
        run = RUN_FILE.format(steps=options.steps, codec=richest, **model)
        swarm = LineSwarm(
            hosts, Path(folder), codec=options.codec, run=run, cpu_share=options.cpu_share
        )
        yield swarm


def equal(options: argparse.Namespace, line: Line, *, quic: bool) -> Figures:
    """Equal lines; in turns with no line at all, which shows what the machine itself takes."""
    names = [f"peer{n}" for n in range(options.peers)]
    with swarm_of(dict.fromkeys(names, line), options, quic=quic, richest="int8") as swarm:
        swarm.start(names, quic=quic, start_s=START_S)
        found: dict[bool, list[Figures]] = {True: [], False: []}
        for turn in range(TURNS):
            on_line = line == LAN or turn % 2 == 0
            for name in names:
                swarm.hosts.change(name, line if on_line else LAN)
            rows = Watch(swarm.peers).run(options.seconds / (TURNS / 2)).rows()
            found[on_line].append(summary(rows) | {"peers": rows})
        figures = dict(found[True][-1])
        for name in ("utilisation", "utilisation_mean"):
            figures[name] = round(median(one[name] for one in found[True]), 4)
            if found[False]:
                figures[f"{name}_without_line"] = round(
                    median(one[name] for one in found[False]), 4
                )
        worst = [one["control_p99_s"] for one in found[True] if one["control_p99_s"] is not None]
        figures["control_p99_s"] = max(worst, default=None)
        figures["turns"] = [one["utilisation_mean"] for one in found[True] + found[False]]
        return figures


def mixed(options: argparse.Namespace) -> Figures:
    """Unequal lines, of which one is halved when half of the time is over."""
    lines = {
        f"peer{n}": Line(mbit, mbit, delay_ms=20.0, loss=0.001) for n, mbit in enumerate(MIXED)
    }
    with swarm_of(lines, options, quic=False, richest="float32") as swarm:
        swarm.start(list(lines), quic=False, start_s=START_S)
        rows = Watch(swarm.peers).run(options.seconds / 2.0).rows()
        victim, line = swarm.peers[1], lines["peer1"]
        half = replace(line, up_mbit=line.up_mbit / 2.0, down_mbit=line.down_mbit / 2.0)
        swarm.hosts.change(victim.name, half)
        adapted = _adapted(victim, half, options.seconds / 2.0)
        fitting = [n for n, row in enumerate(adapted, 1) if row["fits"]]
        return summary(rows) | {
            "peers": rows,
            "halved_mbit": [line.up_mbit, half.up_mbit],
            "hand_ins_after_halving": adapted,
            "controller_adapts_hand_ins": fitting[0] if fitting else None,
            "codecs": {peer.name: peer.look()["codec"] for peer in swarm.peers},
        }


def joining(options: argparse.Namespace) -> Figures:
    """A newcomer on 2 Mbit/s while a lone founder on a quick line merges on and on."""
    found: Figures = {}
    lines = {"founder": Line(100.0, 100.0, delay_ms=20.0), "newcomer": NEWCOMER}
    for name, model in (("small", SMALL), ("large", LARGE)):
        with swarm_of(lines, options, quic=False, richest="int8", model=model) as swarm:
            found[f"joins_{name}"] = _joined(swarm)
    return found


def _joined(swarm: LineSwarm) -> Figures:
    swarm.launch("founder", False, "start", str(swarm.run))
    founder = swarm.peers[0]
    link = swarm.wait(founder.link, START_S, "the link")
    swarm.wait(lambda: founder.look().get("merges", 0) >= AHEAD, START_S, "merges")
    swarm.launch("newcomer", False, "join", str(link))
    newcomer, began, before = swarm.peers[1], time.monotonic(), founder.look()
    row: Figures = {}
    while time.monotonic() - began < JOIN_S and "listed_s" not in row:
        time.sleep(TICK_S)
        status = newcomer.look()
        if status.get("step", 0) > 0:
            row.setdefault("trains_s", round(time.monotonic() - began, 1))
        if status.get("join_to_listed_s") is not None:
            row["listed_s"] = round(status["join_to_listed_s"], 1)
    after = founder.look()
    row["merges_meanwhile"] = after["merges"] - before["merges"]
    row["interval_s"] = round(after["interval_s"], 2)
    row["received_mb"] = round(newcomer.look().get("bytes_received", 0) / 1e6, 2)
    row["parameters"] = after["parameters"]
    return row


def _adapted(peer: LinePeer, line: Line, seconds: float) -> list[Figures]:
    """The hand-ins of a peer after its line changed: what each took and whether that fits."""
    found: list[Figures] = []
    known = peer.look()["hand_ins"]
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
