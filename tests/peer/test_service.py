"""The texts of the service, and where they belong."""

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from dugnad.peer.departure import LEAVE_S
from dugnad.peer.errors import UserError
from dugnad.peer.service import STOP_S, Service, launchd_agent, place, systemd_unit

SERVICE = Service(("/usr/bin/true", "join", "dugnad:x?peer=100%"), Path("/tmp/a b"), Path("/tmp"))


def test_the_unit_stops_gently_and_is_hardened() -> None:
    text = systemd_unit(SERVICE)
    assert f"TimeoutStopSec={STOP_S}" in text
    assert STOP_S > LEAVE_S + 10
    assert "100%%" in text  # a percent sign is a specifier otherwise
    assert '"DUGNAD_HOME=/tmp/a b"' in text
    assert "NoNewPrivileges=yes" in text
    assert "PrivateTmp" not in text  # it blinds the detection of idleness


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "dugnad.service"
    path.write_text(systemd_unit(SERVICE))
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "dugnad.service" not in done.stderr


def test_the_agent_is_a_property_list() -> None:
    found = plistlib.loads(launchd_agent(SERVICE))
    assert found["ProgramArguments"] == list(SERVICE.command)
    assert found["ExitTimeOut"] == STOP_S


def test_each_system_has_its_place_and_others_are_refused(tmp_path: Path) -> None:
    assert place("darwin", tmp_path).suffix == ".plist"
    assert place("linux", tmp_path).name == "dugnad.service"
    with pytest.raises(UserError, match="E036"):
        place("plan9", tmp_path)
