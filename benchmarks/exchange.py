"""Averaging among N processes on loopback: ours beside hivemind's averager and gloo.

Ours is measured from hand-in to adopted anchors at all peers, hashes, signatures, encryption and
the outer step included; hivemind's is its all-reduce after matchmaking; gloo is a plain sum without
encryption. GB are those that a ring in float32 would move: 2 (N-1) d 4 bytes.

hivemind's 8-bit codec fails silently with numpy 2.4 or later, so it runs under `--hivemind-python`,
an environment with hivemind and an older numpy, and is left out otherwise. To make one beside an
existing .venv:

    python -m venv --without-pip build/bench-venv
    .venv/bin/python -m pip install --no-deps 'numpy==2.3.5' \\
        --target build/bench-venv/lib/python3.11/site-packages
    echo "$PWD/.venv/lib/python3.11/site-packages" \\
        > build/bench-venv/lib/python3.11/site-packages/rest.pth
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _fleet import Fleet, Measured, Peer, serve

OURS = ("ours int8", "ours float16", "ours float32")
THROUGH_P2PD = "ours int8 p2pd"
"""All through libp2p, as between peers that do not reach each other directly."""
HIVEMIND = ("hivemind float32", "hivemind float16")
HIVEMIND_8BIT = "hivemind 8bit"
GLOO = "gloo float32"
ROLES = (*OURS, THROUGH_P2PD, *HIVEMIND, HIVEMIND_8BIT, GLOO)


def main() -> None:
    """Measure, print, and write the numbers to --json; or be one of the peers."""
    options = parse()
    if options.role:
        be_peer(options)
        return
    chosen = options.only or [*OURS, THROUGH_P2PD, *HIVEMIND, GLOO]
    if options.hivemind_python and not options.only:
        chosen.append(HIVEMIND_8BIT)
    results: dict[str, Measured] = {}
    print(f"{options.peers} peers, {options.params:,} parameters, {options.rounds} rounds")
    print(
        "                    seconds (low to high)   CPU s/GB (helpers)   peak MB  proportional MB"
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for name in chosen:
            try:
                results[name] = measure(options, name, Path(folder))
            except RuntimeError as fault:
                print(f"{name:18} failed: {fault}\n{words(Path(folder), name)}", flush=True)
                continue
            print(row(options, name, results[name]), flush=True)
    if options.hivemind_python is None:
        print(f"{HIVEMIND_8BIT:18} left out: it needs --hivemind-python with numpy below 2.4")
    figures = summary(options, results)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fragments", type=int, help="of our exchange; as many as peers")
    parser.add_argument("--only", nargs="+", choices=ROLES)
    parser.add_argument("--hivemind-python", help="an interpreter with numpy below 2.4")
    parser.add_argument("--role", choices=ROLES)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace, name: str, folder: Path) -> Measured:
    """One way to average, in processes of its own."""
    python = sys.executable
    if name == HIVEMIND_8BIT and options.hivemind_python:
        python = options.hivemind_python
    place = folder / name.replace(" ", "-")
    place.mkdir()
    command = [python, __file__, f"--role={name}", f"--folder={place}"]
    command += [f"--peers={options.peers}", f"--params={options.params}"]
    command += [f"--fragments={options.fragments or options.peers}"]
    with Fleet(command, options.peers, log_of(folder, name)) as fleet:
        return fleet.measure(options.rounds)


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
    wrong = f"   {found.wrong:.1%} NOT AVERAGED" if found.wrong else ""
    per_gb = found.cpu_seconds / gigabytes(options)
    helpers = found.helper_cpu_seconds / gigabytes(options)
    return (
        f"{name:18} {found.seconds:7.3f} ({found.seconds_low:.3f} to {found.seconds_high:.3f})"
        f" {per_gb:10.2f} {helpers:9.2f} {found.peak_mb:9.0f} {found.proportional_mb:12.0f}{wrong}"
    )


def summary(options: argparse.Namespace, results: dict[str, Measured]) -> dict[str, Any]:
    """The figures of --json; prints the ratios. What was not averaged in full does not compare."""
    figures: dict[str, Any] = {
        "peers": options.peers,
        "params": options.params,
        "rounds": options.rounds,
        "gb": gigabytes(options),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "results": {name: asdict(found) for name, found in results.items()},
    }
    right = {name: found for name, found in results.items() if not found.wrong}
    ours = right.get("ours int8")
    theirs = [right[name] for name in (*HIVEMIND, HIVEMIND_8BIT) if name in right]
    if ours:
        figures["cpu_s_per_gb"] = ours.cpu_seconds / gigabytes(options)
        print(f"ours int8: {figures['cpu_s_per_gb']:.2f} CPU s/GB")
    if ours and theirs:
        fastest = min(theirs, key=lambda found: found.seconds)
        figures["speedup_vs_hivemind"] = fastest.seconds / ours.seconds
        figures["memory_vs_hivemind"] = ours.proportional_mb / fastest.proportional_mb
        print(
            f"speedup against hivemind's fastest: {figures['speedup_vs_hivemind']:.2f} (goal ≥ 3)"
        )
    if ours and GLOO in right:
        figures["ratio_vs_gloo"] = right[GLOO].seconds / ours.seconds
        print(f"gloo float32 / ours int8: {figures['ratio_vs_gloo']:.2f}")
    return figures


def be_peer(options: argparse.Namespace) -> None:
    """Be one of the peers until told to end."""
    if options.role.startswith("ours"):
        import uvloop

        uvloop.run(serve(make_peer(options)))
    else:
        asyncio.run(serve(make_peer(options)))


def make_peer(options: argparse.Namespace) -> Peer:
    """The peer of a role. Each loads its own libraries: ours has no torch, theirs no substrate."""
    kind, codec, *way = options.role.split()
    peer: Peer
    if kind == "ours":
        peer = importlib.import_module("_ourpeer").OurPeer(
            Path(options.folder),
            rank=options.rank,
            peers=options.peers,
            params=options.params,
            fragments=options.fragments,
            codec=codec,
            direct=not way,
        )
        return peer
    others = importlib.import_module("_baselines")
    if kind == "gloo":
        peer = others.GlooPeer(options.rank, options.peers, options.params, options.folder)
    else:
        peer = others.HivemindPeer(options.rank, options.peers, options.params, codec)
    return peer


if __name__ == "__main__":
    main()
