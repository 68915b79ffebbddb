"""The command line: commands, exit codes, and what goes to which stream."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dugnad.dht.identity import Identity
from dugnad.dht.ids import RunId, peer_text
from dugnad.dht.link import Link, format_link
from dugnad.dht.protocol import PROTOCOL
from dugnad.peer import cli
from dugnad.peer.config import Endpoint, Settings
from dugnad.peer.control import ControlServer
from dugnad.peer.manifest import Manifest
from dugnad.peer.paths import DaemonFile, Home
from dugnad.peer.runfile import EXAMPLE_RUN, parse_run_file
from dugnad.peer.views import DaemonView

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("DUGNAD_HOME", str(home.root))

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run_command


@pytest.fixture
def daemon(view: DaemonView, home: Home) -> Iterator[DaemonView]:
    """A control server in a thread with a loop of its own, as a daemon would have."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        control = ControlServer(view, home)
        await control.start()
        ready.set()
        try:
            await stop.wait()
        finally:
            await control.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    yield view
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the daemon; the list holds the arguments of each start. Any: of all types."""
    calls: list[dict[str, Any]] = []

    def become_daemon(home: Home, settings: Settings, **rest: Any) -> int:
        calls.append({"home": home, "settings": settings, **rest})
        return 0

    module = ModuleType("dugnad.peer.launch")
    module.become_daemon = become_daemon  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "dugnad.peer.launch", module)
    return calls


def small_run(folder: Path) -> Path:
    """A run file of a small model, with a folder of text beside it."""
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("Fellow citizens. " * 400)
    text = EXAMPLE_RUN.replace('"sotu"', '"texts"', 1).replace("dim = 128 ", "dim = 16 ")
    path = folder / "run.toml"
    path.write_text(text.replace("context = 128", "context = 32"))
    return path


def test_the_example_is_printed_and_is_a_run_file(run: Run) -> None:
    code, out, _ = run("start", "--example")
    assert code == 0
    parse_run_file(out)


def test_a_run_file_is_needed(run: Run) -> None:
    code, out, err = run("start")
    assert (code, out) == (2, "")
    assert err.startswith("error E001: ")
    assert "\n  fix: " in err


def test_an_unknown_option_is_bad_input(run: Run) -> None:
    assert run("start", "--what")[0] == 2


def test_start_gives_the_daemon_all_it_needs(
    run: Run, home: Home, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    path = small_run(tmp_path)
    code, out, _ = run(
        "start",
        str(path),
        "--yes",
        "--listen",
        "127.0.0.1:0",
        "--threads",
        "1",
        "--cpu-share",
        "0.5",
    )
    assert code == 0
    assert "Taking part will use:" in out
    (call,) = started
    assert call["home"] == home
    assert isinstance(call["manifest"], Manifest)
    assert call["link"] is None
    assert call["settings"].listen.host == "127.0.0.1"
    assert (call["settings"].threads, call["settings"].cpu_share) == (1, 0.5)


def test_join_gives_the_daemon_the_link(run: Run, started: list[dict[str, Any]]) -> None:
    seed = peer_text(Identity.ephemeral(b"s" * 32).peer)
    link = Link(RunId(b"r" * 32), (f"/ip4/127.0.0.1/tcp/9/p2p/{seed}",))
    assert run("join", format_link(link.run, link.peers))[0] == 2  # asks, and there is no terminal
    assert started == []
    assert (
        run("join", format_link(link.run, link.peers), "--yes", "--outbound-only", "--name", "box")[
            0
        ]
        == 0
    )
    assert started[0]["settings"].dashboard is None
    text = format_link(link.run, link.peers)
    assert run("join", text, "--yes", "--dashboard", "127.0.0.1:8080")[0] == 0
    assert started[1]["settings"].dashboard == Endpoint("127.0.0.1", 8080)
    assert (started[0]["link"], started[0]["manifest"]) == (link, None)
    assert started[0]["settings"].outbound_only
    assert started[0]["settings"].name == "box"


def test_what_is_wrong_has_its_own_exit_code(run: Run, tmp_path: Path) -> None:
    assert run("start", str(tmp_path / "none.toml"))[0] == 10
    (tmp_path / "text.toml").write_text("not toml")
    assert run("start", str(tmp_path / "text.toml"))[0] == 11
    (tmp_path / "bad.toml").write_text(EXAMPLE_RUN.replace("heads = 4", "heads = 3"))
    code, _, err = run("start", str(tmp_path / "bad.toml"))
    assert code == 12
    assert "heads 3 does not divide dim 128" in err
    assert run("join", "dugnad:cut")[0] == 13
    assert run("start", str(tmp_path / "bad.toml"), "--threads", "-3")[0] == 2


def test_without_a_daemon_every_question_says_so(run: Run) -> None:
    for command in ("status", "peers", "leaderboard", "units", "leave"):
        code, out, err = run(command)
        assert (code, out) == (4, "")
        assert err.startswith("error E030: no daemon is running")


def test_the_identity_is_made_once_and_shown(run: Run, home: Home) -> None:
    code, _, err = run("identity", "show")
    assert code == 24
    assert "no identity" in err
    assert run("identity", "create")[0] == 0
    code, out, _ = run("identity", "show", "--json")
    assert json.loads(out)["peer"] == peer_text(Identity.load(home.identity_key).peer)
    assert run("identity", "create")[0] == 19
    home.identity_key.chmod(0o640)
    assert run("identity", "show")[0] == 19


def test_the_configuration_is_explained(run: Run, home: Home) -> None:
    home.config.write_text('name = "box"')
    _, out, _ = run("config", "--json")
    rows = {row["key"]: row for row in json.loads(out)}
    assert rows["name"] == {"key": "name", "value": "box", "source": str(home.config)}
    assert rows["yes"]["source"] == "default"
    home.config.write_text("nane = 1")
    assert run("config")[0] == 2


def test_the_version_names_the_protocol(run: Run) -> None:
    assert f"protocol {PROTOCOL}" in run("version")[1]


def test_another_data_folder_can_be_named(run: Run, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    assert run("identity", "create", "--home", str(other.root))[0] == 0
    assert other.identity_key.exists()


@pytest.mark.slow
def test_status_is_text_or_json_and_its_exit_code_says_paused(
    run: Run, daemon: DaemonView, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run("status")
    assert code == 0
    assert out.startswith("state")
    assert json.loads(run("status", "--json")[1])["state"] == "training"
    monkeypatch.setattr(daemon, "state", "paused")
    assert run("status")[0] == 3
    assert run("status", "--json")[0] == 3


@pytest.mark.slow
def test_peers_units_and_the_leaderboard_are_tables_or_json(run: Run, daemon: DaemonView) -> None:
    assert "ærlig" in run("peers")[1]
    assert json.loads(run("peers", "--json")[1])[0]["link"] == "direct"
    assert "4.10 k" in run("leaderboard")[1]
    assert json.loads(run("leaderboard", "--json")[1])["rows"][0]["tokens"] == 4096
    text = run("units")[1]
    assert "1, 25.0 % of 400 sequences listed" in text
    assert "3  in the window and not listed in full, 1 of them for this peer" in text
    assert "0/7" in text
    assert json.loads(run("units", "--json")[1])["open"] == 3
    assert "evaluated tokens" in run("evaluation")[1]
    assert "prepared tokens" in run("evaluation")[1]
    assert "2,048" in run("evaluation")[1]
    assert json.loads(run("evaluation", "--json")[1])["curve"][0]["loss"] == 2.5


@pytest.mark.slow
def test_leaving_waits_for_everything_only_when_asked_to_drain(
    run: Run, daemon: DaemonView, view: Any
) -> None:
    """Any: the fixture's class is in conftest, which cannot be imported."""
    assert "leaving" in run("leave")[1]
    assert "all that was learned" in run("leave", "--drain")[1]
    assert view.left == [False, True]


@pytest.mark.slow
def test_a_command_in_a_process_of_its_own_is_quick_and_exits_as_documented(
    daemon: DaemonView, home: Home, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "DUGNAD_HOME": str(home.root),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "dugnad.peer.cli", "status", "--json"]
    seconds = []  # of processor time: on an idle machine the wall clock says the same
    for _ in range(3):
        begun = os.times()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        ended = os.times()
        seconds.append(sum(ended[2:4]) - sum(begun[2:4]))
    assert json.loads(done.stdout)["pid"] == 4242
    assert min(seconds) < 0.5  # DESIGN.md section 12
    DaemonFile(1 << 22, 9, 1).write(Home(tmp_path))  # above every process id of this system
    gone = subprocess.run([*command, "--home", str(tmp_path)], env=environment, capture_output=True)
    assert gone.returncode == 4
    assert gone.stderr.startswith(b"error E030: ")


@pytest.mark.slow
def test_a_daemon_without_a_page_says_how_to_get_one(run: Run, daemon: DaemonView) -> None:
    code, out, err = run("dashboard", "--where")
    assert (code, out) == (1, "")
    assert "--dashboard HOST:PORT" in err


@pytest.mark.slow
def test_an_owner_steers_a_daemon_and_hears_what_came_of_it(
    run: Run, daemon: DaemonView, view: Any
) -> None:
    for verb in ("pause", "resume", "finish"):
        code, out, _ = run(verb)
        assert (code, out) == (0, f"{verb} it is (training)\n")
    assert run("snooze", "2h")[0] == 0
    assert [given.value for given, _ in view.steered] == ["pause", "resume", "finish", "snooze"]
    assert view.steered[3][1] > view.steered[0][1] == 0
    assert "ærlig" in run("top", "--once")[1]
    assert run("snooze", "soon")[0] == 2


def test_any_setting_can_be_given_on_the_command_line(
    run: Run, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    path = small_run(tmp_path)
    assert run("start", str(path), "--yes", "--set", "hours=sat 0-24", "--set", "gpu=none")[0] == 0
    assert started[0]["settings"].hours == "sat 0-24"
    assert started[0]["settings"].gpus() == ()
    code, _, err = run("start", str(path), "--yes", "--set", "hour=1")
    assert code == 2
    assert "did you mean 'hours'?" in err


def test_a_configuration_file_is_written_once(run: Run, home: Home) -> None:
    assert run("config", "init")[0] == 0
    assert home.config.exists()
    assert run("config", "init")[0] == 34
