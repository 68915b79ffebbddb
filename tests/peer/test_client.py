"""The client of the short commands: what it says when there is no daemon, or not a good one."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dugnad.peer.client import Client, process_alive
from dugnad.peer.errors import UserError
from dugnad.peer.paths import DaemonFile, Home, write_private


def dead_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def refused(home: Home) -> UserError:
    """The error that asking the daemon of `home` gives."""
    with pytest.raises(UserError) as caught:
        Client(home, timeout_s=2.0).get("/v1/status")
    return caught.value


@contextmanager
def answering(home: Home, status: int, body: bytes) -> Iterator[None]:
    """A server in a thread that answers everything with `status` and `body`, named by `home`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silence."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    DaemonFile(os.getpid(), server.server_port, 1).write(home)
    write_private(home.control_token, b"token")
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_empty_data_folder_has_no_daemon(home: Home) -> None:
    error = refused(home)
    assert (error.number, error.exit_code) == ("E030", 4)
    assert str(home.root) in error.sentence


@pytest.mark.slow
def test_the_traces_of_a_dead_daemon_are_recognised(home: Home) -> None:
    pid = dead_pid()
    assert not process_alive(pid)
    DaemonFile(pid, 1, 1).write(home)
    write_private(home.control_token, b"token")
    error = refused(home)
    assert error.number == "E030"
    assert f"process {pid} ended without leaving" in error.sentence


def test_processes_of_others_are_alive_and_impossible_ones_are_not() -> None:
    assert process_alive(1)
    assert process_alive(os.getpid())
    assert not process_alive(1 << 62)


@pytest.mark.slow
def test_a_reused_process_id_is_not_taken_for_the_daemon(home: Home) -> None:
    with answering(home, 200, b"{}"):
        pass  # nobody listens on that port any more, and the process id is this test's
    assert refused(home).number == "E030"


def test_a_daemon_without_a_token_just_stopped(home: Home) -> None:
    DaemonFile(os.getpid(), 1, 1).write(home)
    assert refused(home).number == "E030"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": "wrong or missing token"}', "wrong or missing token"),
        (200, b"<html>", "not JSON"),
        (500, b"[1]", "(500)"),
    ],
)
def test_a_daemon_that_answers_badly_is_reported(
    home: Home, status: int, body: bytes, said: str
) -> None:
    with answering(home, status, body):
        error = refused(home)
    assert error.number == "E031"
    assert said in error.sentence


@pytest.mark.slow
def test_what_the_daemon_answers_comes_back(home: Home) -> None:
    with answering(home, 200, b'{"state": "training"}'):
        assert Client(home).get("/v1/status") == {"state": "training"}


@pytest.mark.slow
def test_the_client_imports_nothing_heavy() -> None:
    """`dugnad status` must answer in half a second on a slow machine."""
    code = (
        "import sys, dugnad.peer.cli, dugnad.peer.client, dugnad.peer.render\n"
        "heavy = {'aiohttp', 'torch', 'numpy', 'hivemind', 'pydantic', 'psutil', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert out.stdout == "[]\n"
