"""The compose file: accepted by a compose program, and each command runs as it is written there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml  # type: ignore[import-untyped]

from dugnad.peer.client import Client
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

from .processes import wait_for  # noqa: TID252  the tests are no installed package

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def services() -> Any:  # Any: YAML
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_every_service_is_locked_down_and_has_a_volume_and_grace() -> None:
    found = services()
    assert set(found) == {"bootstrap", "peer", "dashboard"}
    for name, service in found.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["stop_grace_period"] == "20s", name
        assert any(str(one).rpartition(":")[2] == "/data" for one in service["volumes"]), name
    assert found["peer"]["deploy"]["replicas"] == 3
    assert "/data" in found["peer"]["volumes"], "a named volume would be shared by its replicas"
    assert [s["ports"] for s in found.values() if "ports" in s] == [["8080:8080"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not here")
def test_docker_compose_accepts_the_file() -> None:
    done = subprocess.run(
        ["docker-compose", "-f", str(COMPOSE), "config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"].keys() == services().keys()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose daemons are ended, whatever happened."""
    yield tmp_path
    for home in tmp_path.glob("home-*"):
        try:
            Client(Home(home)).post("/v1/leave", {"drain": False})
        except UserError:
            continue


def launch(name: str, folder: Path, number: int) -> subprocess.Popen[bytes]:
    """A service's command as it is written, with its mount points and ports in a test's place."""
    places = {"/link/run": str(folder / "run"), ":31400": ":0", "0.0.0.0": "127.0.0.1"}
    places |= {":8080": ":0"}
    words = [str(word) for word in services()[name]["command"]]
    for inside, outside in places.items():
        words = [word.replace(inside, outside) for word in words]
    home = folder / f"home-{name}{number}"
    with (folder / f"{name}{number}.log").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "dugnad.peer.cli", *words],
            stdout=out,
            stderr=out,
            cwd=ROOT / "containers",
            env={**os.environ, "DUGNAD_HOME": str(home)},
        )


@pytest.mark.slow
def test_each_service_runs_as_written_and_they_become_one_swarm(folder: Path) -> None:
    started = [launch("peer", folder, 1), launch("dashboard", folder, 1)]  # they wait for the link
    started.append(launch("bootstrap", folder, 1))
    try:

        def together() -> bool:
            for name in ("bootstrap", "peer", "dashboard"):
                status = status_of(folder, name)
                if status is None or status["peers_live"] != 2 or min(status["versions"]) < 1:
                    return False
            return True

        wait_for(together, 90.0, "one swarm of two, watched")
        watcher = status_of(folder, "dashboard")
        assert watcher["state"] == "observing"
        assert read(watcher["dashboard"]).count("State of the Union, in containers")
        wait_for(lambda: json.loads(read(watcher["dashboard"] + "leaderboard.json")), 30.0, "board")
        assert " of 2 peers" in read(watcher["dashboard"] + "leaderboard")
        opened = {one.path for one in psutil.Process(watcher["pid"]).memory_maps()}
        assert not [path for path in opened if "torch" in path]
        command = [sys.executable, "-m", "dugnad.peer.cli", "status", "--quiet"]
        home = ["--home", str(folder / "home-peer1")]
        healthy = subprocess.run([*command, *home], capture_output=True, timeout=30, check=False)
        assert (healthy.returncode, healthy.stdout) == (0, b"")
        for process in started:
            process.terminate()
        wait_for(partial(all_ended, started), 20.0, "their end within the grace of a stop")
        assert [process.returncode for process in started] == [0, 0, 0]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def status_of(folder: Path, name: str) -> Any:  # Any: JSON
    """What a service says of itself; None before it can."""
    try:
        return Client(Home(folder / f"home-{name}1")).get("/v1/status")
    except UserError:
        return None


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as page:
        text: bytes = page.read()
        return text.decode()


def all_ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    return all(process.poll() is not None for process in processes)
