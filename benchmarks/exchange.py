"""Averaging among N processes: ours beside hivemind's averager, gloo, and the wire alone.

    python benchmarks/exchange.py --json exchange.json --svg exchange.svg
    python benchmarks/exchange.py --gigabit --only "ours int8" "gloo float32"     (needs root)
    python benchmarks/exchange.py --matrix --minutes 60 --json matrix.json
    python benchmarks/exchange.py --cells 4x1 4x10 --rounds 3 --json matrix.json  (adds to the file)

Ours is measured from hand-in to adopted anchors at all peers: error feedback, hashes, signatures,
encryption and the outer step included; `alone` leaves out error feedback, outer step and roots, as
the others do. hivemind's is its all-reduce after matchmaking; gloo is a plain sum without
encryption; `raw` moves the bytes of a float32 ring from peer to peer and sums nothing. Vectors are
made before the clock starts and looked at after it stops. GB are those that a ring in float32 would
move: 2 (N-1) d 4 bytes. Ours uses compiled kernels where they can be had, and numpy alone with
DUGNAD_KERNELS=numpy. `--gigabit` runs each peer in a namespace with a line of 1 Gbit/s.

| key | what | goal |
|---|---|---|
| speedup_vs_hivemind | seconds of hivemind's fastest codec over ours with int8 | >= 5 |
| cpu_s_per_gb | CPU seconds of all processes a GB, ours with int8 | <= 3 |
| ratio_vs_gloo | seconds of gloo in float32 over ours with int8 | >= 0.5 |
| ratio_vs_gloo_gigabit | the same on lines of 1 Gbit/s | >= 1 |
| memory_vs_hivemind | proportional memory of a peer of ours over one of theirs | <= 1 |

A key that ends in `_alone` is of `ours int8 alone`.

hivemind's 8-bit codec fails silently with numpy 2.4 or later, so it runs in an environment of its
own and is left out without one:

    python3.11 -m venv build/hivemind && build/hivemind/bin/pip install \\
        -c <(grep -v ^numpy constraints.txt) hivemind torch psutil 'numpy<2.4'
    python benchmarks/exchange.py --hivemind-python build/hivemind/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil
from _exchangeplot import exchange_svg
from _fleet import WARM_UP, WARM_UP_OTHERS, Fleet, Measured, Peer, serve
from _gigabit import Lan, missing

OURS: Final = ("ours int8", "ours float16", "ours float32", "ours int4", "ours topk-1.56")
ALONE: Final = "ours int8 alone"
THROUGH_P2PD: Final = "ours int8 p2pd"
"""All through libp2p, as between peers that do not reach each other directly."""
HIVEMIND: Final = ("hivemind float32", "hivemind float16")
HIVEMIND_8BIT: Final = "hivemind 8bit"
CLIPPED_MAX: Final = {HIVEMIND_8BIT: 0.005}
"""Share of elements that a codec may miss by design: theirs cuts off beyond three standard
deviations, of each vector and of the mean once more."""
TRIES: Final = 2
"""Of theirs: on a busy machine its peers sometimes find no group within a minute."""
GLOO: Final = "gloo float32"
RAW: Final = ("raw tcp", "raw tls", "raw p2pd")
ROLES: Final = (*OURS, ALONE, THROUGH_P2PD, *HIVEMIND, HIVEMIND_8BIT, GLOO, *RAW)
SHORT: Final = ("ours int8", ALONE, *HIVEMIND, GLOO)
"""Of `--short` and of each cell of `--matrix`."""
GIGABIT: Final = ("ours int8", ALONE, "hivemind float16", GLOO)
SPARSE: Final = ("int4", "topk")
"""Codecs whose hand-ins are far from what was learned: the residual keeps the rest."""
MATRIX: Final = {f"{n}x{d}": (n, d * 1_000_000) for d in (1, 10, 50) for n in (2, 4, 8)}
MATRIX_MINUTES: Final = 60.0
"""What would begin later is left out."""
BYTES_PER_PARAM: Final = {ALONE: 30, GLOO: 24}
BYTES_PER_PARAM_MAX: Final = 66
"""Of a peer: ours in full with float32 hand-ins, and theirs; less where it is named above."""
BYTES_PER_PEER: Final = 150_000_000
"""Without any parameters."""
GIGABIT_MBIT: Final = 1000.0
GOALS: Final = {
    "speedup_vs_hivemind": (">=", 5.0),
    "cpu_s_per_gb": ("<=", 3.0),
    "ratio_vs_gloo": (">=", 0.5),
    "ratio_vs_gloo_gigabit": (">=", 1.0),
    "memory_vs_hivemind": ("<=", 1.0),
}

Results = dict[str, Measured]
Figures = dict[str, Any]  # Any: JSON


def main() -> None:
    """Measure, print, and write the numbers to --json; or be one of the peers."""
    options = parse()
    if options.role:
        be_peer(options)
        return
    if options.matrix or options.cells:
        matrix(options)
        return
    figures = whole(options)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--svg", help="draw them into this file")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fragments", type=int, help="of our exchange; as many as peers")
    parser.add_argument("--only", nargs="+", choices=ROLES)
    parser.add_argument("--short", action="store_true", help="int8 beside hivemind and gloo alone")
    parser.add_argument("--matrix", action="store_true", help="2, 4, 8 peers by 1, 10, 50 million")
    parser.add_argument("--cells", nargs="+", choices=MATRIX, help="these of the matrix")
    parser.add_argument(
        "--minutes", type=float, default=MATRIX_MINUTES, help="of the matrix: no more begins then"
    )
    parser.add_argument(
        "--gigabit", action="store_true", help="only on lines of 1 Gbit/s (done last otherwise)"
    )
    parser.add_argument("--hivemind-python", help="an interpreter with numpy below 2.4")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--interface", default="lo", help=argparse.SUPPRESS)
    return parser.parse_args()


def whole(options: argparse.Namespace) -> Figures:
    """Everything for one number of peers and one size: on loopback, then on lines of 1 Gbit/s."""
    chosen = ways(options, SHORT if options.short else ROLES)
    figures: Figures = {}
    results: Results = {}
    if not options.gigabit:
        results = measure_all(options, chosen)
        figures = summary(options, results)
    if options.gigabit or not options.only:
        slow = [name for name in (options.only or GIGABIT) if name in chosen]
        if reason := missing():
            print(f"lines of 1 Gbit/s are left out: {reason}")
        else:
            with Lan(options.peers, GIGABIT_MBIT) as lan:
                found = measure_all(options, slow, lan)
            figures["gigabit"] = {name: asdict(one) for name, one in found.items()}
            for name, tail in (("ours int8", ""), (ALONE, "_alone")):
                if name in found and GLOO in found:
                    ratio = found[GLOO].seconds / found[name].seconds
                    figures[f"ratio_vs_gloo_gigabit{tail}"] = ratio
    show(figures)
    if options.svg:
        rows = {
            name: (one.seconds, one.cpu_seconds / gigabytes(options))
            for name, one in results.items()
        }
        title = f"{options.peers} peers, {options.params / 1e6:g} M parameters"
        Path(options.svg).write_text(exchange_svg(title, rows))
    return figures


def ways(options: argparse.Namespace, usual: Sequence[str]) -> list[str]:
    """What is to be measured, of what can be."""
    chosen = list(options.only or usual)
    if options.hivemind_python is None and HIVEMIND_8BIT in chosen:
        chosen.remove(HIVEMIND_8BIT)
        print(f"{HIVEMIND_8BIT} is left out: it needs --hivemind-python with numpy below 2.4")
    return chosen


def matrix(options: argparse.Namespace) -> None:
    """Each number of peers by each size, or the cells that are named; what fits the memory and the
    time. Each is written to --json at once, beside those that the file has already."""
    until = time.monotonic() + 60.0 * options.minutes
    chosen = ways(options, (*SHORT, HIVEMIND_8BIT))
    for name in options.cells or MATRIX:
        options.peers, options.params = MATRIX[name]
        fitting = [way for way in chosen if fits(options, way)]
        if results := measure_all(options, fitting, until=until):
            show(add_cell(options, name, results))


def fits(options: argparse.Namespace, way: str) -> bool:
    """Whether the memory that is free now is enough; says so if not."""
    free = psutil.virtual_memory().available
    each = BYTES_PER_PARAM.get(way, BYTES_PER_PARAM_MAX) * options.params + BYTES_PER_PEER
    if (need := options.peers * each) <= free:
        return True
    print(
        f"{way}: {options.peers} peers of {options.params:,} are left out,"
        f" they would need {need / 1e9:.0f} GB of {free / 1e9:.0f}",
        flush=True,
    )
    return False


def add_cell(options: argparse.Namespace, name: str, results: Results) -> Figures:
    """The figures of a cell, written to --json if there is one. Ways that its file has of this cell
    stay, but for those measured again."""
    if options.json is None:
        return summary(options, results)
    file = Path(options.json)
    cells: dict[str, Figures] = json.loads(file.read_text())["cells"] if file.exists() else {}
    before = cells.get(name, {}).get("results", {})
    cells[name] = summary(options, {way: Measured(**one) for way, one in before.items()} | results)
    file.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    return cells[name]


def measure_all(
    options: argparse.Namespace,
    chosen: list[str],
    lan: Lan | None = None,
    until: float = math.inf,
) -> Results:
    """Each way to average that begins before `until`, printed as it comes."""
    where = ", lines of 1 Gbit/s" if lan else ""
    print(f"{options.peers} peers, {options.params:,} parameters, {options.rounds} rounds{where}")
    print(
        "                    seconds (low to high)   CPU s/GB (helpers)   peak MB  proportional MB"
    )
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in chosen:
            if time.monotonic() >= until:
                print(f"{name:18} left out: {options.minutes:g} minutes are over", flush=True)
                continue
            for attempt in range(TRIES if "hivemind" in name else 1):
                place = Path(folder) / str(attempt)
                place.mkdir(exist_ok=True)
                try:
                    results[name] = measure(options, name, place, lan)
                except RuntimeError as fault:
                    print(f"{name:18} failed: {fault}\n{words(place, name)}", flush=True)
                else:
                    print(row(options, name, results[name]), flush=True)
                    break
    return results


def measure(options: argparse.Namespace, name: str, folder: Path, lan: Lan | None) -> Measured:
    """One way to average, in processes of its own."""
    python = sys.executable
    if name == HIVEMIND_8BIT and options.hivemind_python:
        python = options.hivemind_python
    place = folder / name.replace(" ", "-")
    place.mkdir()
    command = [python, __file__, f"--role={name}", f"--folder={place}"]
    command += [f"--peers={options.peers}", f"--params={options.params}"]
    command += [f"--fragments={options.fragments or options.peers}"]
    if lan is not None:
        hosts = ",".join(lan.address(rank) for rank in range(options.peers))
        command += [f"--hosts={hosts}", f"--interface={lan.interface()}"]
    sparse = any(codec in name for codec in SPARSE)
    with Fleet(command, options.peers, log_of(folder, name), lan) as fleet:
        warm_up = WARM_UP if name.startswith("ours") else WARM_UP_OTHERS
        return fleet.measure(options.rounds, warm_up, sparse=sparse)


def log_of(folder: Path, name: str) -> Path:
    """Where the peers' own words go."""
    return folder / (name.replace(" ", "-") + ".log")


def words(folder: Path, name: str) -> str:
    """The last of them."""
    return log_of(folder, name).read_text(errors="replace")[-2000:]


def gigabytes(options: argparse.Namespace) -> float:
    """What a float32 ring would move."""
    return float(2 * (options.peers - 1) * options.params * 4) / 1e9


def row(options: argparse.Namespace, name: str, found: Measured) -> str:
    """A line of the table."""
    wrong = f"   {found.wrong:.2%} NOT AVERAGED" if found.wrong else ""
    if 0.0 < found.wrong <= CLIPPED_MAX.get(name, 0.0):
        wrong = f"   {found.wrong:.2%} clipped"
    per_gb = found.cpu_seconds / gigabytes(options)
    helpers = found.helper_cpu_seconds / gigabytes(options)
    return (
        f"{name:18} {found.seconds:7.3f} ({found.seconds_low:.3f} to {found.seconds_high:.3f})"
        f" {per_gb:10.2f} {helpers:9.2f} {found.peak_mb:9.0f} {found.proportional_mb:12.0f}{wrong}"
    )


def summary(options: argparse.Namespace, results: Results) -> Figures:
    """The figures of --json. What was not averaged in full does not compare."""
    figures: Figures = {
        "peers": options.peers,
        "params": options.params,
        "rounds": options.rounds,
        "gb": gigabytes(options),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "results": {name: asdict(found) for name, found in results.items()},
    }
    right = {
        name: found for name, found in results.items() if found.wrong <= CLIPPED_MAX.get(name, 0.0)
    }
    theirs = [right[name] for name in (*HIVEMIND, HIVEMIND_8BIT) if name in right]
    for name, tail in (("ours int8", ""), (ALONE, "_alone")):
        ours = right.get(name)
        if ours is None:
            continue
        figures[f"cpu_s_per_gb{tail}"] = ours.cpu_seconds / gigabytes(options)
        if theirs:
            fastest = min(theirs, key=lambda found: found.seconds)
            figures[f"speedup_vs_hivemind{tail}"] = fastest.seconds / ours.seconds
            memory = ours.proportional_mb / fastest.proportional_mb
            figures[f"memory_vs_hivemind{tail}"] = memory
        if HIVEMIND[0] in right:
            speedup = right[HIVEMIND[0]].seconds / ours.seconds
            figures[f"speedup_vs_hivemind_float32{tail}"] = speedup
        if GLOO in right:
            figures[f"ratio_vs_gloo{tail}"] = right[GLOO].seconds / ours.seconds
    return figures


def show(figures: Figures) -> None:
    """Print the ratios with their goals."""
    for key, value in figures.items():
        sign, goal = GOALS.get(key.removesuffix("_alone"), ("", 0.0))
        if sign:
            met = value >= goal if sign == ">=" else value <= goal
            print(f"{key} = {value:.2f}   goal {sign} {goal:g}: {'met' if met else 'NOT met'}")
        elif key.startswith("speedup"):
            print(f"{key} = {value:.2f}")


def be_peer(options: argparse.Namespace) -> None:
    """Be one of the peers until told to end."""
    with contextlib.suppress(BrokenPipeError):  # whoever measures has gone
        if options.role.startswith("ours"):
            import uvloop

            uvloop.run(serve(make_peer(options)))
        else:
            asyncio.run(serve(make_peer(options)))


def make_peer(options: argparse.Namespace) -> Peer:
    """The peer of a role. Each loads its own libraries: ours has no torch, theirs no substrate."""
    kind, codec, *way = options.role.split()
    hosts = options.hosts.split(",")
    host, folder = hosts[options.rank % len(hosts)], Path(options.folder)
    rank, peers, params = options.rank, options.peers, options.params
    peer: Peer
    if kind == "ours":
        peer = importlib.import_module("_ourpeer").OurPeer(
            folder,
            rank=rank,
            peers=peers,
            params=params,
            fragments=options.fragments,
            codec=codec,
            direct="p2pd" not in way,
            alone="alone" in way,
            host=host,
        )
        return peer
    if kind == "raw":
        raw = importlib.import_module("_rawpeers")
        if codec == "tcp":
            peer = raw.TcpPeer(rank, peers, params, host)
        else:
            peer = raw.StreamPeer(folder, rank, peers, params, codec, host)
        return peer
    others = importlib.import_module("_baselines")
    if kind == "gloo":
        peer = others.GlooPeer(rank, peers, params, options.folder, options.interface)
    else:
        peer = others.HivemindPeer(rank, peers, params, codec, host)
    return peer


if __name__ == "__main__":
    main()
