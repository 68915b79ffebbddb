"""What tests with real daemons share: a run that trains in seconds, and waiting."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

pytestmark = pytest.mark.slow

RUN_FILE = """
[run]
name = "a test"
purpose = "to see a swarm of processes train"
licence = "CC0-1.0"
token_budget = 10_000_000
admission = "open"
seed = 1
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
fragments = 2
steps_per_merge = 40
merge_floor_s = 0.8
"""


def run_file(folder: Path, name: str = "a test") -> Path:
    """Write a small text and a run file that trains on it into ``folder``."""
    rng = random.Random(1)
    words = [" ".join(rng.choice(["red", "green", "blue", "sun"]) for _ in range(9))]
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n".join(words * 900))
    path = folder / "run.toml"
    path.write_text(RUN_FILE.replace("a test", name, 1))
    return path


def wait_for(what: Callable[[], Any], timeout_s: float, name: str) -> Any:  # Any: what it gives
    """Poll until ``what`` gives something true."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{name} did not come within {timeout_s} s")


class Daemons:
    """Daemons of one test, in one folder."""

    cpu_share = "0.2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, *arguments: str) -> int:
        number = len(self.processes)
        options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1"]
        options += ["--cpu-share", self.cpu_share]
        with (self.folder / f"log{number}").open("wb") as out:
            command = [sys.executable, "-m", "dugnad.peer.cli", *arguments, *options]
            home = ["--home", str(self.folder / f"home{number}")]
            self.processes.append(subprocess.Popen([*command, *home], stdout=out, stderr=out))
        return number

    def log(self, number: int) -> str:
        return (self.folder / f"log{number}").read_text(errors="replace")

    def link(self, number: int) -> str:
        lines = self.log(number).splitlines()
        return next((line for line in lines if line.startswith("dugnad:")), "")

    def ask(self, number: int, what: str) -> Any:  # Any: JSON
        try:
            return Client(Home(self.folder / f"home{number}")).get(f"/v1/{what}")
        except UserError:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill them, whatever happened."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
