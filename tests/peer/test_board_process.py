"""Real daemons time each other and fold two machines into one owner's row, alike on every board."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

from .processes import run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow


class Peers:
    """Daemons of one test, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, *arguments: str) -> int:
        number = len(self.processes)
        options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", "0.3"]
        command = [sys.executable, "-m", "dugnad.peer.cli", *arguments, *options]
        with (self.folder / f"log{number}").open("wb") as out:
            self.processes.append(
                subprocess.Popen([*command, "--home", self.home(number)], stdout=out, stderr=out)
            )
        return number

    def home(self, number: int) -> str:
        return str(self.folder / f"home{number}")

    def link(self, number: int) -> str:
        lines = (self.folder / f"log{number}").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("dugnad:")), "")

    def ask(self, number: int, path: str) -> Any:  # Any: JSON
        try:
            return Client(Home(Path(self.home(number)))).get(path)
        except UserError:
            return None

    def rows(self, number: int) -> list[Any]:  # Any: JSON
        board = self.ask(number, "/v1/leaderboard")
        return board["rows"] if board else []

    def timed(self, number: int) -> Any:  # Any: JSON
        rows = self.rows(number)
        return rows if len(rows) == 2 and all(row["timed_per_s"] for row in rows) else None

    def owned(self, number: int) -> Any:  # Any: JSON
        return next((row for row in self.rows(number) if len(row["machines"]) == 2), None)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """Daemons that are killed at the end, whatever happened."""
    found = Peers(tmp_path)
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def dugnad(*arguments: str) -> str:
    command = [sys.executable, "-m", "dugnad.peer.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_two_daemons_time_each_other_and_become_one_row(peers: Peers) -> None:
    first = peers.launch("start", str(run_file(peers.folder)))
    link = wait_for(partial(peers.link, first), 40.0, "the link")
    second = peers.launch("join", link)
    for number in (first, second):
        for row in wait_for(partial(peers.timed, number), 90.0, "both are timed"):
            assert row["disputed"] == 0 or row["dispute"]

    dugnad("owner", "create", "--name", "Kari", "--home", str(peers.folder / "owner"))
    for number in (first, second):
        peer = peers.ask(number, "/v1/status")["peer"]
        offer = dugnad("owner", "sign", peer, "--home", str(peers.folder / "owner"))
        told = dugnad("owner", "accept", offer, "--home", peers.home(number))
        assert "the boards show it soon" in told
    for number in (first, second):
        row = wait_for(partial(peers.owned, number), 60.0, "one row for both")
        assert row["name"] == "Kari"
        assert row["tokens"] == sum(machine["tokens"] for machine in row["machines"])
