"""The data folder."""

import errno
import os
import stat
from pathlib import Path

import pytest

from dugnad.dht.ids import RunId
from dugnad.peer.errors import UserError
from dugnad.peer.paths import (
    PEERS_REMEMBERED_MAX,
    RUNS_REMEMBERED_MAX,
    RUNTIME_PATH_BYTES_MAX,
    DaemonFile,
    Home,
    disk_error,
    write_private,
)

RUN = RunId(bytes(range(32)))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_option_beats_the_variable_and_the_variable_the_usual_place() -> None:
    environment = {"DUGNAD_HOME": "/from/environment"}
    assert Home.locate(Path("/from/flag"), environment).root == Path("/from/flag")
    assert Home.locate(None, environment).root == Path("/from/environment")
    assert Home.locate(None, {}).root.name == "dugnad"


def test_a_relative_data_folder_is_made_absolute() -> None:
    assert Home.locate(Path("here"), {}).root == Path.cwd() / "here"


def test_folders_are_private_to_their_owner(home: Home) -> None:
    place = home.run(RUN)
    place.create()
    for folder in (home.root, place.root, place.anchors, place.shards):
        assert mode(folder) == 0o700
    assert home.known_runs() == [RUN]


def test_a_folder_that_others_could_enter_is_closed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    Home(tmp_path / "open").create()
    assert mode(tmp_path / "open") == 0o700


def test_a_file_where_the_data_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="E026"):
        Home(tmp_path / "file").create()


def test_private_files_appear_whole_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_private(path, b"first")
    write_private(path, b"second")
    assert path.read_bytes() == b"second"
    assert mode(path) == 0o600
    assert os.listdir(tmp_path) == ["token"]


def test_a_failed_write_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(UserError, match="E026"):
        write_private(tmp_path / "token", b"x")
    assert os.listdir(tmp_path) == ["token"]


def test_a_full_disk_is_called_a_full_disk() -> None:
    error = disk_error(OSError(errno.ENOSPC, "No space left on device"), Path("/x"))
    assert (error.number, error.exit_code) == ("E017", 17)


def test_a_full_disk_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_private(tmp_path / "token", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="E017"):
        write_private(tmp_path / "token", b"new")
    assert (tmp_path / "token").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["token"]


def test_sockets_get_a_short_private_folder_of_their_own(tmp_path: Path) -> None:
    deep = Home(tmp_path / ("very" * 20) / ("deep" * 20))
    folder = deep.runtime({"XDG_RUNTIME_DIR": str(tmp_path)})
    other = Home(tmp_path / "other").runtime({"XDG_RUNTIME_DIR": str(tmp_path)})
    try:
        assert folder != other
        assert folder == deep.runtime({"XDG_RUNTIME_DIR": str(tmp_path)})
        assert len(os.fsencode(folder)) <= RUNTIME_PATH_BYTES_MAX
        assert mode(folder) == 0o700
    finally:
        for one in (folder, other):
            one.rmdir()


def test_peers_are_remembered_latest_first_and_bounded(home: Home) -> None:
    home.remember(RUN, [f"/ip4/10.0.0.{i}/tcp/1" for i in range(PEERS_REMEMBERED_MAX)])
    home.remember(RUN, ["/ip4/10.0.0.5/tcp/1", "/ip4/10.9.9.9/tcp/1", "/" + "x" * 999])
    found = home.remembered(RUN)
    assert found[:2] == ["/ip4/10.0.0.5/tcp/1", "/ip4/10.9.9.9/tcp/1"]
    assert len(found) == PEERS_REMEMBERED_MAX == len(set(found))


def test_only_so_many_runs_are_remembered(home: Home) -> None:
    runs = [RunId(bytes([i]) * 32) for i in range(RUNS_REMEMBERED_MAX + 2)]
    for run in runs:
        home.remember(run, ["/ip4/10.0.0.1/tcp/1"])
    assert home.remembered(runs[0]) == []
    assert home.remembered(runs[-1]) != []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"x": 3}', '{"x": [1, {}]}', "[" * 9999])
def test_a_damaged_peers_file_is_as_good_as_none(home: Home, content: str) -> None:
    home.peers_file.write_text(content)
    assert home.remembered(RUN) == []
    home.remember(RUN, ["/ip4/10.0.0.1/tcp/1"])
    assert home.remembered(RUN) == ["/ip4/10.0.0.1/tcp/1"]


def test_the_daemon_file_comes_back_as_it_was(home: Home) -> None:
    written = DaemonFile(pid=12, port=3456, started_ms=789)
    written.write(home)
    assert DaemonFile.read(home) == written


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"pid": 1}',
        '{"pid": true, "port": 1, "started_ms": 1}',
        '{"pid": -1, "port": 1, "started_ms": 1}',
        '{"pid": 1, "port": 70000, "started_ms": 1}',
        '{"pid": "1", "port": 1, "started_ms": 1}',
    ],
)
def test_a_damaged_daemon_file_is_as_good_as_none(home: Home, content: str) -> None:
    home.daemon_file.write_text(content)
    assert DaemonFile.read(home) is None
