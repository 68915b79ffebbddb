"""A real daemon is paused, restarted, resumed and finished by its owner."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

from .processes import run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow


def launch(home: Home, run: Path, log: Path) -> subprocess.Popen[bytes]:
    options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", "0.2"]
    command = [sys.executable, "-m", "dugnad.peer.cli", "start", str(run), *options]
    with log.open("wb") as out:
        return subprocess.Popen([*command, "--home", str(home.root)], stdout=out, stderr=out)


def state(home: Home) -> Any:  # Any: JSON
    try:
        return Client(home).get("/v1/status")
    except UserError:
        return {"state": "", "reason": "", "step": 0}


def test_a_pause_survives_a_restart_and_finishing_ends_the_process(tmp_path: Path) -> None:
    home, run, log = Home(tmp_path / "home"), run_file(tmp_path), tmp_path / "log"
    process = launch(home, run, log)
    try:
        wait_for(lambda: state(home)["step"] > 5, 40.0, "training")
        answer = Client(home).post("/v1/steer", {"wish": "pause"})
        assert answer["state"] == "paused"
        assert answer["reason"].startswith("pause = on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert b"could not be sent" in log.read_bytes()
        process = launch(home, run, log)
        wait_for(lambda: state(home)["state"] == "paused", 30.0, "the pause")
        assert state(home)["step"] == 0  # and no learner was started
        Client(home).post("/v1/steer", {"wish": "resume"})
        wait_for(lambda: state(home)["step"] > 5, 40.0, "training")
        Client(home).post("/v1/steer", {"wish": "finish"})
        assert process.wait(40) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
