"""What a crash loses, in tokens, with a neighbour that keeps drafts and without one.

A swarm of real `dugnad` processes on this machine: two that stay, and two victims that are alike,
except that one brings drafts to a neighbour (`buddy_s`). At a random moment one is killed with
SIGKILL and two merges later the other, and they never come back. What each had trained (its own
count, asked just before) less what the survivors' board credits it with in the end is what the
crash lost. The model has one fragment, so a token is credited once at most, when its contribution
is listed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

T = TypeVar("T")
RUN_FILE = """
[run]
name = "buddy"
purpose = "to see what a crash loses"
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
unit_sequences = 8
learning_rate = 3e-3
[exchange]
fragments = 1
steps_per_merge = 10
merge_floor_s = {interval}
"""
WORDS = ["red", "green", "blue", "sun", "sea", "of", "and", "the", "hill", "rain"]
CPU_SHARE = "0.05"
APART_INTERVALS = 2.5
"""Between the two deaths: the first one's neighbour, or the home, may be the second."""
START_S = 180.0
SETTLE_INTERVALS = 4
"""A contribution is listed within two versions of its base, or never."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What one crash lost."""

    buddy: bool
    trained: int
    listed: int
    tokens_per_s: float

    @property
    def lost(self) -> int:
        return self.trained - self.listed

    @property
    def seconds(self) -> float:
        return self.lost / self.tokens_per_s


class Peer:
    """One `dugnad` process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.home = Home(folder / name)
        self.log = folder / f"{name}.log"
        self.name = name
        self.key = ""
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, *command: str) -> None:
        options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", CPU_SHARE]
        options += ["--set", "context_s=0"]
        options += ["--home", str(self.home.root)]
        program = [sys.executable, "-P", "-m", "dugnad.peer.cli"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen([*program, *command, *options], stdout=out, stderr=out)

    def ask(self, path: str) -> Any:  # Any: JSON
        try:
            return Client(self.home).get(path)
        except UserError:
            return {}

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Measure, print, and write the numbers to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between merges")
    parser.add_argument("--buddy", type=float, default=2.0, help="seconds between drafts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    losses: list[Loss] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            losses += one_round(Path(folder), options, options.seed + number)
        for loss in losses[-2:]:
            print(f"round {number + 1}, {'with' if loss.buddy else 'without'} a buddy: {loss}")
    figures: dict[str, object] = {"interval_s": options.interval, "buddy_s": options.buddy}
    for buddy in (False, True):
        found = [one for one in losses if one.buddy is buddy]
        name = "with" if buddy else "without"
        figures[f"lost_tokens_{name}"] = statistics.mean(one.lost for one in found)
        figures[f"lost_s_{name}"] = statistics.mean(one.seconds for one in found)
    figures["rounds"] = [asdict(one) for one in losses]
    print(
        f"a crash lost {figures['lost_tokens_without']:,.0f} tokens"
        f" ({figures['lost_s_without']:.1f} s) without and {figures['lost_tokens_with']:,.0f}"
        f" ({figures['lost_s_with']:.1f} s) with a neighbour that keeps drafts"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def one_round(folder: Path, options: argparse.Namespace, seed: int) -> list[Loss]:
    """Both victims of one swarm."""
    rng = random.Random(seed)
    (folder / "text").mkdir()
    lines = [" ".join(rng.choice(WORDS) for _ in range(9)) for _ in range(4000)]
    (folder / "text" / "a.txt").write_text("\n".join(lines))
    run = folder / "run.toml"
    run.write_text(RUN_FILE.format(seed=seed, interval=options.interval))
    first, second = Peer(folder, "first"), Peer(folder, "second")
    victims = {True: Peer(folder, "lent"), False: Peer(folder, "plain")}
    peers = [first, second, *victims.values()]
    try:
        first.launch("start", str(run))
        link = until(lambda: first.ask("/v1/status").get("link"), "the link")
        second.launch("join", link)
        victims[False].launch("join", link)
        victims[True].launch("join", link, "--set", f"buddy_s={options.buddy:g}")
        for peer in peers:
            until(lambda peer=peer: listed(first, peer) > 0, f"work of {peer.name}")  # type: ignore[misc]
        began, before = time.monotonic(), {b: tokens(victim) for b, victim in victims.items()}
        time.sleep(rng.uniform(1.0, 2.0) * options.interval)
        trained: dict[bool, tuple[int, float]] = {}
        for buddy, victim in victims.items():
            count = tokens(victim)
            victim.kill()
            rate = max(count - before[buddy], 1) / (time.monotonic() - began)
            trained[buddy] = count, rate
            time.sleep(APART_INTERVALS * options.interval)
        time.sleep(SETTLE_INTERVALS * options.interval)
        return [
            Loss(buddy, trained[buddy][0], listed(first, victim), trained[buddy][1])
            for buddy, victim in victims.items()
        ]
    finally:
        for peer in peers:
            peer.kill()


def tokens(peer: Peer) -> int:
    """What a peer has trained, by its own count."""
    count: int = peer.ask("/v1/status")["tokens"]
    return count


def listed(teller: Peer, peer: Peer) -> int:
    """Tokens that a peer is credited with, settled or not, on the board of another."""
    peer.key = peer.key or peer.ask("/v1/status").get("peer", "")
    rows = teller.ask("/v1/leaderboard").get("rows", [])
    return sum(row["tokens"] + row["provisional"] for row in rows if row["peer"] == peer.key)


def until(found: Callable[[], T], what: str) -> T:
    """Ask until there is something; SystemExit when it does not come."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if answer := found():
            return answer
        time.sleep(0.5)
    raise SystemExit(f"{what} did not come within {START_S:.0f} s")


if __name__ == "__main__":
    main()
