"""dugnad as a service of its owner's session: a systemd user unit, or a launchd agent on macOS.

Nothing needs root. The text of both is a pure function of the command and the settings.
"""

import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dugnad.peer.departure import LEAVE_S
from dugnad.peer.errors import EXIT_BAD_INPUT, UserError
from dugnad.peer.paths import Home

STOP_S: Final = 4 * round(LEAVE_S)
"""Handing in takes up to LEAVE_S, the learner's last step up to ten seconds, then the rest."""
LABEL: Final = "org.dugnad.peer"
COMMAND_S: Final = 20.0
UNIT: Final = "dugnad.service"
KEEPS_STOPPED: Final = (EXIT_BAD_INPUT, *range(10, 40))
"""Exit codes that a restart does not put right: wrong input, a used-up quota, a foreign key."""


@dataclass(frozen=True, slots=True)
class Service:
    """What is to run: the command line of `dugnad join LINK` or `start RUN.toml`, and its home."""

    command: tuple[str, ...]
    home: Path
    runtime: Path

    @property
    def environment(self) -> dict[str, str]:
        """Where its data is."""
        return {"DUGNAD_HOME": str(self.home)}


def systemd_unit(service: Service) -> str:
    """The text of a user unit. `%` and `$` in words are doubled, as systemd wants them."""
    words = " ".join(_word(one) for one in service.command)
    codes = " ".join(map(str, KEEPS_STOPPED))
    return f"""\
[Unit]
Description=dugnad: this machine trains a model together with its neighbours
Documentation=man:dugnad
After=network-online.target

[Service]
ExecStart={words}
Environment={_word("DUGNAD_HOME=" + str(service.home))}
Restart=on-failure
RestartSec=30
RestartPreventExitStatus={codes}
KillMode=mixed
TimeoutStopSec={STOP_S}
Nice=5
IOSchedulingClass=idle
CPUWeight=20
OOMScoreAdjust=500
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={_word("-" + str(service.home))} {_word("-" + str(service.runtime))} -/tmp
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=default.target
"""


def launchd_agent(service: Service) -> bytes:
    """The property list of an agent."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(service.command),
            "EnvironmentVariables": service.environment,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ExitTimeOut": STOP_S,
            "ProcessType": "Background",
            "LowPriorityIO": True,
            "Nice": 5,
            "Umask": 0o077,
        }
    )


def place(system: str = sys.platform, user: Path | None = None) -> Path:
    """Where the file belongs. UserError E036 on another system."""
    user = user or Path.home()
    if system == "darwin":
        return user / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    if system.startswith("linux"):
        base = os.environ.get("XDG_CONFIG_HOME")
        return (Path(base) if base else user / ".config") / "systemd" / "user" / UNIT
    raise UserError("E036", f"there is no service for {system}", "run `dugnad join` yourself")


def install(what: Sequence[str], home: Home, *, start: bool) -> tuple[Path, list[str]]:
    """Write the file and have it started now and at each login; the file, and what is left to do
    by hand. UserError E036."""
    program = (sys.executable, "-P", "-m", "dugnad.peer.cli")
    service = Service((*program, *what, "--yes"), home.root, home.runtime().parent)
    path = place()
    text = launchd_agent(service) if sys.platform == "darwin" else systemd_unit(service).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        path.chmod(0o600)  # the link in it may be of a closed run
    except OSError as error:
        raise UserError("E036", f"cannot write {path}: {error.strerror}", "check it") from error
    return path, _commands(_starting(path, start)) if start else _as_text(_starting(path, start))


def remove() -> tuple[Path, bool]:
    """Stop it and take the file away; whether there was one. UserError E036."""
    path = place()
    if not path.exists():
        return path, False
    if sys.platform == "darwin":
        _commands([["launchctl", "unload", "-w", str(path)]])
    else:
        _commands([["systemctl", "--user", "disable", "--now", UNIT]])
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError("E036", f"cannot remove {path}: {error.strerror}", "check it") from error
    if sys.platform != "darwin":
        _commands([["systemctl", "--user", "daemon-reload"]])
    return path, True


def _starting(path: Path, start: bool) -> list[list[str]]:
    if sys.platform == "darwin":
        return [["launchctl", "load", "-w", str(path)]]
    return [
        ["systemctl", "--user", "daemon-reload"],
        ["systemctl", "--user", "enable", "--now", UNIT],
    ]


def _as_text(commands: Sequence[Sequence[str]]) -> list[str]:
    return [shlex.join(command) for command in commands]


def _commands(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run them; those that did not work, with the reason, for the person to run."""
    failed = []
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMMAND_S, check=False
            )
            why = done.stderr.strip()[:200] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            failed.append(f"{shlex.join(command)}   # failed: {why}")
    return failed


def _word(text: str) -> str:
    """One word of a unit file."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{quoted}"' if any(c.isspace() or c in "\"'\\;#" for c in text) or not text else quoted
