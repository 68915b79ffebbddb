"""Hosts in namespaces: they reach each other over the emulated lines, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from _nethosts import Hosts, missing
from _wan import Line

from ..peer.processes import wait_for  # noqa: TID252  the tests are no installed package

pytestmark = [pytest.mark.net, pytest.mark.slow]
PORT = 4001
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := missing(nat=True):
        pytest.skip(reason)
    lines = {"a": Line(20, 20, 30), "b": Line(20, 20, 20), "in": Line(20, 20, 20)}
    with Hosts(lines, behind_nat={"in"}) as found:
        yield found


def serve(hosts: Hosts, name: str) -> socket.socket:
    return hosts[name].call(lambda: socket.create_server(("0.0.0.0", PORT)))


def dial(hosts: Hosts, name: str, to: str, timeout_s: float = 3.0) -> socket.socket:
    address = (hosts[to].address, PORT)
    return hosts[name].call(partial(socket.create_connection, address, timeout_s))


def test_a_handshake_takes_the_round_trip_of_the_lines_and_a_partition_stops_it(
    hosts: Hosts,
) -> None:
    with serve(hosts, "b"):
        began = time.monotonic()
        dial(hosts, "a", "b").close()
        assert 0.095 < time.monotonic() - began < 0.8
        hosts.split(["a"], ["b", "in"])
        with pytest.raises(OSError, match="timed out"):
            dial(hosts, "a", "b", 0.5)
        dial(hosts, "in", "b").close()
        hosts.split()
        dial(hosts, "a", "b").close()
    assert hosts.counts()["a"]["parted"] > 0


def test_behind_nat_one_dials_out_from_the_routers_address_and_nobody_dials_in(
    hosts: Hosts,
) -> None:
    with serve(hosts, "b") as server, serve(hosts, "in"):
        with dial(hosts, "in", "b"):
            accepted, (address, _) = server.accept()
            accepted.close()
        assert address == hosts["in"].address
        with pytest.raises(OSError, match="timed out"):
            dial(hosts, "b", "in", 1.0)


def test_the_rate_of_a_line_is_kept_and_can_change(hosts: Hosts) -> None:
    hosts.change("a", Line(2, 2, 5))
    with serve(hosts, "b") as server, dial(hosts, "a", "b") as sender:
        accepted, _ = server.accept()
        began = time.monotonic()
        with accepted, ThreadPoolExecutor(1) as pool:
            accepted.settimeout(10.0)
            sending = pool.submit(_send_all, sender, bytes(250_000))
            got = 0
            while data := accepted.recv(1 << 16):
                got += len(data)
            sending.result()
        assert got == 250_000
        assert 0.9 < time.monotonic() - began < 4.0


def _send_all(sender: socket.socket, data: bytes) -> None:
    sender.sendall(data)
    sender.shutdown(socket.SHUT_WR)


def test_a_program_that_is_killed_leaves_no_emulator_and_no_process_of_a_host(
    tmp_path: Path,
) -> None:
    if reason := missing():
        pytest.skip(reason)
    out = tmp_path / "pids"
    program = (
        "import time\nfrom pathlib import Path\n"
        "from _nethosts import Hosts\nfrom _wan import Line\n"
        "with Hosts({'a': Line()}) as hosts:\n"
        "    child = hosts['a'].popen(['sleep', '600'])\n"
        f"    Path({str(out)!r}).write_text(f'{{hosts._emulator.pid}} {{child.pid}}\\n')\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        text = wait_for(lambda: out.exists() and out.read_text().endswith("\n"), 20.0, "the pids")
        assert text
        started = [psutil.Process(int(pid)) for pid in out.read_text().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    def gone() -> bool:
        return not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    wait_for(gone, 5.0, "the end of what it started")
