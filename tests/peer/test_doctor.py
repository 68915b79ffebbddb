"""What the doctor finds, and the fix it names."""

from dataclasses import replace
from pathlib import Path

import pytest

from dugnad.peer.config import Settings
from dugnad.peer.doctor import (
    check_clock,
    check_disk,
    check_duplicate,
    check_key,
    check_leftovers,
    check_memory,
    check_reach,
    examine,
)
from dugnad.peer.paths import DaemonFile, Home


@pytest.mark.parametrize(
    ("offset", "level"), [(None, "skip"), (1.0, "ok"), (-40.0, "warn"), (301.0, "bad")]
)
def test_clock(offset: float | None, level: str) -> None:
    assert check_clock(offset).level == level


def test_a_key_that_others_may_read_is_bad(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert check_key(key).level == "ok"
    key.touch(0o600)
    assert check_key(key).level == "ok"
    key.chmod(0o640)
    assert check_key(key).fix == f"chmod 600 {key}"


def test_disk_and_memory_name_need_and_have(tmp_path: Path) -> None:
    assert check_disk(10**9, 10**10, 2e9, True, tmp_path).level == "bad"
    assert check_disk(3 * 10**9, 10**10, 2e9, True, tmp_path).level == "ok"
    assert "needs 2 MB" in check_memory(10**6, {"run": 2 * 10**6}).text


@pytest.mark.parametrize(
    ("seen", "level"),
    [("direct", "ok"), ("relayed", "warn"), ("outbound", "warn"), ("unknown", "skip")],
)
def test_reachability(seen: str, level: str) -> None:
    status = {"reachable": seen, "addresses": ["/ip4/1.2.3.4/tcp/5"], "peers_live": 2}
    assert check_reach(status, Settings()).level == level
    assert check_reach(status, replace(Settings(), outbound_only=True)).level == "ok"
    assert check_reach(status | {"peers_live": 1}, Settings()).level == "skip"


def test_what_a_dead_daemon_left_is_told() -> None:
    assert check_leftovers(None, False, []).level == "ok"
    assert check_leftovers(DaemonFile(1, 2, 3), True, []).level == "ok"
    assert check_leftovers(DaemonFile(1, 2, 3), False, [Path("a.sock")]).level == "warn"


def test_a_second_daemon_with_this_identity_is_bad() -> None:
    assert check_duplicate(None).level == "skip"
    assert check_duplicate([]).level == "ok"
    assert check_duplicate([{"kind": "identity", "text": "two"}]).level == "bad"


def test_a_machine_without_a_daemon_can_be_examined(home: Home) -> None:
    levels = {one.check: one.level for one in examine(home, Settings(), devices=False)}
    assert levels["clock"] == "skip"
    assert levels["leftovers"] == "ok"
    wrong = examine(home, Settings(keep_free_gb=1e6), devices=False)
    assert [one.level for one in wrong if one.check == "settings"] == ["bad"]
