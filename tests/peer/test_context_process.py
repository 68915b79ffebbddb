"""kill -9 of the learner, then of the daemon: training goes on from the captured context."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

from .processes import run_file, wait_for  # noqa: TID252  the tests are no installed package

pytestmark = pytest.mark.slow


def launch(home: Home, run: Path, log: Path) -> subprocess.Popen[bytes]:
    options = ["--yes", "--listen", "127.0.0.1:0", "--threads", "1", "--cpu-share", "0.5"]
    command = [sys.executable, "-m", "dugnad.peer.cli", "start", str(run), *options]
    command += ["--set", "context_s=1", "--home", str(home.root)]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


def state(home: Home) -> Any:  # Any: JSON
    try:
        return Client(home).get("/v1/status")
    except UserError:
        return {"state": "", "step": 0}


def taken_up(log: Path, pattern: str) -> int:
    found = re.findall(pattern, log.read_text())
    return int(found[-1]) if found else 0


def test_a_killed_learner_and_a_killed_daemon_go_on_where_they_were(tmp_path: Path) -> None:
    home, run = Home(tmp_path / "home"), run_file(tmp_path)
    log = tmp_path / "log"
    process = launch(home, run, log)
    try:
        wait_for(lambda: list(home.root.glob("runs/*/context/learner-*")), 40.0, "a context")
        (learner,) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "dugnad.peer.learner" in child.cmdline()
        )
        learner.kill()
        wait_for(lambda: "goes on from its state" in log.read_text(), 30.0, "the next learner")
        kept = taken_up(log, r"its state after step (\d+) of")
        assert kept > 0
        assert process.poll() is None, "the daemon stayed"
        process.kill()
        process.wait()
        process = launch(home, run, log)
        wait_for(lambda: "taken up after step" in log.read_text(), 40.0, "the context")
        step = taken_up(log, r"taken up after step (\d+)")
        assert step >= kept
        wait_for(lambda: state(home)["step"] > step, 40.0, "a step after the daemon's death")
        assert not re.search("skipped|not written|given up", log.read_text())
        process.terminate()
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
