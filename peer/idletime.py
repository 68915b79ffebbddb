"""Since when nobody touched this machine, from whoever knows: the desktop, X, logind, macOS.

Each source is a short command and a parser of what it prints. The first that answers is believed.
Processor load is no source: our own load would look like somebody's work. When none answers, None:
"cannot tell on this machine".
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

COMMAND_S: Final = 2.0
"""A desktop that does not answer within this is not asked again before the next reading."""
REPLY_CHARS_MAX: Final = 1 << 20
FOREVER_S: Final = 1e9
"""Nobody is logged in at all."""

Parser = Callable[[str, float], float | None]


@dataclass(frozen=True, slots=True)
class Source:
    """Who knows: a command, and how to read its answer as seconds (None: no answer in it)."""

    name: str
    command: tuple[str, ...]
    parse: Parser
    needs: str = ""
    """A variable of the environment without which it is not worth asking."""
    system: str = ""
    """The `sys.platform` on which it is asked ('' everywhere)."""


def milliseconds(text: str, now_us: float) -> float | None:
    """The last whole number as milliseconds: `t 12345`, `(uint64 12345,)`, `12345`."""
    found = re.findall(r"\d+", text.replace("uint64", "").replace("uint32", ""))
    return int(found[-1]) / 1000 if found else None


def logind(text: str, now_us: float) -> float | None:
    """`b true` and `t <microseconds since 1970>`, the manager's IdleHint and IdleSinceHint."""
    hint = re.search(r"^b (true|false)$", text, re.MULTILINE)
    since = re.search(r"^t (\d+)$", text, re.MULTILINE)
    if hint is None or since is None:
        return None
    if hint[1] == "false":
        return 0.0
    began = int(since[1])
    return max(0.0, (now_us - began) / 1e6) if began else FOREVER_S


def ioreg(text: str, now_us: float) -> float | None:
    """`"HIDIdleTime" = <nanoseconds>` of the macOS registry; the least of several."""
    found = re.findall(r'"HIDIdleTime" = (\d+)', text)
    return min(map(int, found)) / 1e9 if found else None


_LOGIND: Final = "org.freedesktop.login1"
SOURCES: Final = (
    Source(
        "GNOME",
        (
            *("busctl", "--user", "call", "org.gnome.Mutter.IdleMonitor"),
            *("/org/gnome/Mutter/IdleMonitor/Core", "org.gnome.Mutter.IdleMonitor", "GetIdletime"),
        ),
        milliseconds,
        needs="DBUS_SESSION_BUS_ADDRESS",
    ),
    Source(
        "screen saver",
        (
            *("busctl", "--user", "call", "org.freedesktop.ScreenSaver"),
            *("/org/freedesktop/ScreenSaver", "org.freedesktop.ScreenSaver"),
            "GetSessionIdleTime",
        ),
        milliseconds,
        needs="DBUS_SESSION_BUS_ADDRESS",
    ),
    Source("X", ("xprintidle",), milliseconds, needs="DISPLAY"),
    Source(
        "logind",
        (
            *("busctl", "get-property", _LOGIND, "/org/freedesktop/login1"),
            *(f"{_LOGIND}.Manager", "IdleHint", "IdleSinceHint"),
        ),
        logind,
    ),
    Source("macOS", ("ioreg", "-c", "IOHIDSystem", "-d", "4"), ioreg, system="darwin"),
)
"""In the order in which they are asked: the nearest to keyboard and mouse first. A desktop that
never tells logind makes it say "in use" for ever, which errs on the owner's side."""


def idle_seconds(
    sources: Sequence[Source] = SOURCES, ask: Callable[[Sequence[str]], str | None] | None = None
) -> tuple[float | None, str]:
    """Seconds since somebody touched this machine, and who says so; (None, '') when nobody does."""
    for source in sources:
        if source.system and source.system != sys.platform:
            continue
        if source.needs and not os.environ.get(source.needs):
            continue
        answer = (ask or _ask)(source.command)
        found = None if answer is None else source.parse(answer, time.time() * 1e6)
        if found is not None:
            return found, source.name
    return None, ""


def _ask(command: Sequence[str]) -> str | None:
    """What a command prints; None when it is not there, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout[:REPLY_CHARS_MAX].decode(errors="replace") if done.returncode == 0 else None
