"""A real daemon serves its page to anybody, and stops at once with readers that stay."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from dugnad.peer.client import Client
from dugnad.peer.demoswarm import living
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

from .processes import run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow


class Peer:
    """One daemon process with a page."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.home, self.log = folder / "home", folder / "log"
        folder.mkdir(exist_ok=True)
        options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", "0.15"]
        command = [sys.executable, "-m", "dugnad.peer.cli", *arguments, *options]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--home", str(self.home)], stdout=out, stderr=out
            )

    def line(self, start: str) -> str:
        """The rest of the first line of the log that starts so."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((one.removeprefix(start) for one in lines if one.startswith(start)), "")

    def status(self) -> Any:  # Any: JSON
        try:
            return Client(Home(self.home)).get("/v1/status")
        except UserError:
            return None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    """Processes that are killed at the end, whatever happened."""
    found: list[Peer] = []
    yield found
    for peer in found:
        peer.end()


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(address + path, timeout=10) as answer:
        assert answer.status == 200
        data: bytes = answer.read()
        return data


def snapshot(address: str) -> Any:  # Any: JSON
    return json.loads(get(address, "api/v1/snapshot"))


def loss_times(address: str) -> list[str]:
    """When the losses on the chart were measured, oldest first."""
    rows = get(address, "api/chart/loss.csv").decode().splitlines()[1:]
    return sorted(row.split(",")[1] for row in rows)


def kept_rows(peer: Peer) -> bool:
    """Whether its page's history is on the disk, losses and all."""
    (path,) = peer.home.glob("runs/*/state.sqlite")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        named = store.execute("SELECT 1 FROM sqlite_master WHERE name = 'page_rollups'").fetchone()
        kept = (
            named
            and store.execute(
                "SELECT 1 FROM page_rollups r, page_totals t"
                " WHERE r.series = 'train' AND t.name = 'tokens' AND t.amount > 0"
            ).fetchone()
        )
    return bool(kept)


def stream(address: str) -> socket.socket:
    """An event stream that is open and read no further."""
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    reader = socket.create_connection((host, int(port)), timeout=10)
    reader.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"text/event-stream" in reader.recv(4096)
    return reader


def test_a_daemon_serves_the_page_and_leaves_nothing_behind(
    tmp_path: Path, peers: list[Peer]
) -> None:
    path = run_file(tmp_path, "a <public> run")
    first = Peer(tmp_path / "one", "start", str(path), "--dashboard", "127.0.0.1:0")
    peers.append(first)
    address = wait_for(lambda: first.line("page: "), 40.0, "the address of the page")
    link = wait_for(lambda: first.line("dugnad:"), 40.0, "the link")
    second = Peer(tmp_path / "two", "join", f"dugnad:{link}")
    peers.append(second)
    wait_for(lambda: snapshot(address)["merges"] >= 4, 60.0, "merges on the page")
    wait_for(lambda: snapshot(address)["live"] == 2, 40.0, "the second peer on the page")
    wait_for(lambda: snapshot(address)["sample"], 20.0, "text of the model")

    front = get(address, "").decode()
    assert "a &lt;public&gt; run" in front
    assert "a <public> run" not in front
    assert f"dugnad:{link}" in front

    def ranked() -> Any:  # Any: JSON; the page computes the board every few seconds
        board = json.loads(get(address, "leaderboard.json"))
        return board if board and board["rows"] else None

    board = wait_for(ranked, 40.0, "a board with rows")
    assert board["formula"] == "credit/1"
    assert "Receipts" in get(address, f"peer/{board['rows'][0]['peer']}").decode()
    assert b"dugnad_" in get(address, "metrics")
    assert first.status()["dashboard"] == address
    assert second.status()["dashboard"] == ""
    for peer, code, said in ((first, 0, address), (second, 1, "")):
        asked = [sys.executable, "-m", "dugnad.peer.cli", "dashboard", "--where"]
        asked += ["--home", str(peer.home)]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        assert (answer.returncode, answer.stdout.strip()) == (code, said)
        assert ("--dashboard HOST:PORT" in answer.stderr) == (code == 1)

    os.kill(second.process.pid, signal.SIGKILL)
    wait_for(lambda: snapshot(address)["live"] == 1, 20.0, "the loss on the page")
    wait_for(lambda: kept_rows(first), 30.0, "the history on the disk")
    tokens, measured = snapshot(address)["tokens"], loss_times(address)
    family = psutil.Process(first.process.pid).children(recursive=True)
    first.process.kill()
    first.process.wait()

    first.log.unlink()
    again = Peer(tmp_path / "one", "start", str(path), "--dashboard", "127.0.0.1:0")
    peers.append(again)
    address = wait_for(lambda: again.line("page: "), 40.0, "the page of the next process")
    assert 0 < snapshot(address)["tokens"] <= tokens
    assert loss_times(address)[0] <= measured[-1], "the curve goes on where it was"
    family += psutil.Process(again.process.pid).children(recursive=True)
    with stream(address):
        began = time.monotonic()
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(30) == 0, again.log.read_text(errors="replace")
        assert time.monotonic() - began < 8.0
    assert not living(family)
    assert "Traceback" not in again.log.read_text(errors="replace")
