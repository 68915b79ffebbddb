"""`dugnad doctor`: what stands between this machine and a good peer, each with the exact fix.

Every check is a function of what was found to a `Finding`; the shell below gathers. Nothing is
changed, and nothing is asked of anybody but the own daemon.
"""

import os
import shutil
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dugnad.peer.config import Settings
from dugnad.peer.limits import faults, hours_a_week, warnings
from dugnad.peer.paths import DaemonFile, Home

CLOCK_WARN_S: Final = 30.0
"""Peers correct for each other's clocks; beyond this, records live noticeably too long or short."""
CLOCK_BAD_S: Final = 300.0
STRAYS_SHOWN: Final = 5
Level = Literal["ok", "warn", "bad", "skip"]
Status = Mapping[str, Any]
"""JSON of the daemon's status; Any: its values are whatever JSON holds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: `level` bad makes the exit status 1; `fix` is what to do."""

    check: str
    level: Level
    text: str
    fix: str = ""


def check_python(version: tuple[int, int], needed: tuple[int, int] = (3, 11)) -> Finding:
    """Is Python new enough?"""
    text = f"Python {version[0]}.{version[1]}"
    if version < needed:
        return Finding("python", "bad", text, f"install Python {needed[0]}.{needed[1]} or newer")
    return Finding("python", "ok", text)


def check_key(path: Path) -> Finding:
    """May only its owner read the key?"""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return Finding("identity", "ok", "none yet; the first run makes one")
    except OSError as error:
        return Finding("identity", "bad", f"{path}: {error.strerror}", f"check {path}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        return Finding("identity", "bad", f"others may read {path}", f"chmod 600 {path}")
    return Finding("identity", "ok", f"{path}, readable by its owner only")


def check_disk(free: int, total: int, keep: float, writable: bool, root: Path) -> Finding:
    """Is there room?"""
    text = f"{free / 1e9:,.1f} of {total / 1e9:,.1f} GB free in {root}"
    if not writable:
        return Finding(
            "disk", "bad", f"{root} cannot be written to", "own it, or choose another --home"
        )
    if free < keep:
        fix = f"free {(keep - free) / 1e9:,.1f} GB, or set keep_free_gb lower"
        return Finding("disk", "bad", f"{text}; {keep / 1e9:,.1f} GB are to stay free", fix)
    return Finding("disk", "ok", text)


def check_memory(have: int, needs: Mapping[str, int]) -> Finding:
    """Is there memory for the runs that this data folder knows?"""
    short = {name: need for name, need in needs.items() if need > have}
    if short:
        name, need = max(short.items(), key=lambda item: item[1])
        text = f"run {name!r} needs {need / 1e6:,.0f} MB, {have / 1e6:,.0f} MB are free"
        return Finding("memory", "bad", text, "close other programs, or join a smaller run")
    known = ", ".join(f"{name!r} needs {need / 1e6:,.0f} MB" for name, need in needs.items())
    return Finding("memory", "ok", f"{have / 1e6:,.0f} MB free" + (f"; {known}" if known else ""))


def check_clock(offset_s: float | None) -> Finding:
    """Does the clock agree with the peers'?"""
    if offset_s is None:
        return Finding("clock", "skip", "no daemon runs to compare with peers")
    text = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the peers' clocks"
    fix = "switch on time synchronisation: `timedatectl set-ntp true`"
    if abs(offset_s) >= CLOCK_BAD_S:
        return Finding("clock", "bad", text, fix)
    return Finding("clock", "warn" if abs(offset_s) >= CLOCK_WARN_S else "ok", text, fix)


def check_reach(status: Status | None, settings: Settings) -> Finding:
    """Can others reach this peer?"""
    if status is None:
        return Finding("reachability", "skip", "no daemon runs; only a running one can be reached")
    if settings.outbound_only:
        return Finding("reachability", "ok", "outbound only, as set: it merges for nobody")
    seen, addresses = status.get("reachable", "unknown"), list(status["addresses"])
    if status["peers_live"] <= 1:
        return Finding("reachability", "skip", "no other peer is here to try it")
    port = settings.listen.port or "the same port each time (set listen)"
    fix = f"forward TCP port {port} to this machine, then set announce; or set outbound_only"
    said = str(status.get("reach", ""))
    if seen == "direct":
        return Finding("reachability", "ok", f"direct: {said or ', '.join(addresses[:2])}")
    if seen == "relayed":
        return Finding("reachability", "warn", "others reach it through a relay only: slow", fix)
    if seen == "outbound":
        text = f"outbound only, others cannot reach it: {said}"
        return Finding("reachability", "warn", text, fix)
    return Finding("reachability", "skip", "no peer has tried to reach it yet")


def check_leftovers(daemon: DaemonFile | None, alive: bool, sockets: Sequence[Path]) -> Finding:
    """Has a dead daemon left something behind?"""
    if daemon is not None and alive:
        return Finding("leftovers", "ok", f"daemon {daemon.pid} runs")
    left = [f"daemon.json of process {daemon.pid}, which is gone"] if daemon is not None else []
    left += [str(one) for one in sockets]
    if left:
        fix = "none needed: the next start sweeps them"
        return Finding("leftovers", "warn", "; ".join(left[:5]), fix)
    return Finding("leftovers", "ok", "none")


def check_strays(strays: Sequence[tuple[int, str]]) -> Finding:
    """Does a child of a dead daemon still run? Each is given with its process number and name."""
    if not strays:
        return Finding("processes", "ok", "none is left over")
    text = ", ".join(f"{name} ({pid})" for pid, name in strays[:STRAYS_SHOWN])
    fix = f"kill {' '.join(str(pid) for pid, _ in strays[:STRAYS_SHOWN])}"
    return Finding("processes", "bad", f"still running without a daemon: {text}", fix)


def check_duplicate(events: Sequence[Status] | None) -> Finding:
    """Has another daemon with this identity been seen?"""
    if events is None:
        return Finding("duplicate", "skip", "no daemon runs to notice another with this identity")
    seen = [row for row in events if row["kind"] == "identity"]
    if seen:
        fix = "stop one of them, or give one a data folder of its own (--home)"
        return Finding("duplicate", "bad", str(seen[-1]["text"]), fix)
    return Finding("duplicate", "ok", "no other daemon uses this identity")


def check_settings(wrong: Sequence[str], notes: Sequence[str], hours: float) -> list[Finding]:
    """Do the limits contradict each other, or this machine?"""
    if wrong:
        fix = "change them in config.toml; `dugnad config` shows where each comes from"
        return [Finding("settings", "bad", one, fix) for one in wrong]
    text = f"at most {hours:.0f} hours a week"
    return [Finding("settings", "ok", text), *(Finding("settings", "warn", one) for one in notes)]


def check_devices(described: str, trouble: str) -> Finding:
    """Do the devices compute?"""
    if trouble:
        return Finding("devices", "bad", trouble, "reinstall torch for this machine")
    return Finding("devices", "ok", described)


def check_port(host: str, port: int, daemon: bool) -> Finding:
    """Is the port that others are to reach free?"""
    if not port or daemon:
        return Finding("port", "ok", f"{port or 'any free one'}")
    try:
        with socket.create_server((host if host != "0.0.0.0" else "", port)):
            return Finding("port", "ok", f"{port} is free")
    except OSError as error:
        fix = "choose another with listen, or stop what uses it"
        return Finding("port", "bad", f"{host}:{port}: {error.strerror or error}", fix)


def versions() -> Finding:
    """What is installed, without loading it."""
    import importlib.metadata as metadata

    found = []
    for name in ("dugnad", "torch", "hivemind", "numpy", "protobuf"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name != "dugnad":
                return Finding("versions", "bad", f"{name} is missing", "reinstall dugnad")
    return Finding("versions", "ok", ", ".join(found))


def check_kernels(setting: str, lacking: str, status: Status | None) -> Finding:
    """What computes the exchange's numbers? `lacking` are packages that are not installed."""
    if setting == "numpy":
        return Finding("kernels", "ok", "numpy, as set")
    if lacking:
        fix = "pip install 'dugnad[fast]', if it can be had for this machine"
        return Finding("kernels", "ok", f"numpy: {lacking} is not installed; {fix}")
    said = "" if status is None else str(status.get("kernels", ""))
    if said.startswith("numpy"):
        return Finding("kernels", "warn", said, "report it; numpy gives the same results, slower")
    return Finding("kernels", "ok", said or "compiled ones can be had; a daemon brings them")


def examine(home: Home, settings: Settings, *, devices: bool) -> list[Finding]:
    """All checks. With `devices` torch is tried in a child, which takes some seconds."""
    from dugnad.peer import kernelload
    from dugnad.peer.client import process_alive
    from dugnad.peer.consent import memory_available
    from dugnad.peer.limits import keep_free
    from dugnad.peer.readings import senses

    status, events = _daemon(home)
    known, limits = senses(home.root), settings.limits()
    folder = home.root if home.root.exists() else home.root.parent
    disk = shutil.disk_usage(folder if folder.exists() else Path("/"))
    found = DaemonFile.read(home)
    alive = found is not None and process_alive(found.pid)
    found_sockets = [] if alive else sorted(home.runtime().glob("*.sock"))
    writable = os.access(folder, os.W_OK) or not folder.exists()
    return [
        check_python(sys.version_info[:2]),
        versions(),
        check_kernels(settings.kernels, kernelload.missing(), status),
        check_key(home.identity_key),
        check_disk(disk.free, disk.total, keep_free(limits, disk.total), writable, home.root),
        check_memory(memory_available(), {} if alive else _needs(home)),
        check_port(settings.listen.host, settings.listen.port, alive),
        check_clock(None if status is None else float(status.get("clock_offset_s", 0.0))),
        check_reach(status, settings),
        check_leftovers(found, alive, found_sockets),
        check_strays(strays(home, found.pid if found is not None and alive else None)),
        check_duplicate(events),
        *check_settings(
            faults(limits, known), warnings(limits, known), hours_a_week(limits, known)
        ),
        *([_devices(home, settings)] if devices else []),
    ]


def strays(home: Home, daemon: int | None) -> list[tuple[int, str]]:
    """Processes that name this data folder's sockets or files on their command line, and belong
    neither to the daemon of that process number nor to us."""
    import psutil

    places = (str(home.runtime()), str(home.root))
    spared = {os.getpid(), os.getppid()} | ({daemon} if daemon else set())
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline"]):
        info = process.info
        words = " ".join(info["cmdline"] or ())
        ours = any(place in words for place in places) and "p2pd" in (info["name"] or "")
        if ours and not {info["pid"], info["ppid"]} & spared:
            found.append((int(info["pid"]), str(info["name"])))
    return found


def _daemon(home: Home) -> tuple[Status | None, list[Status] | None]:
    from dugnad.peer.client import Client
    from dugnad.peer.errors import UserError

    try:
        client = Client(home)
        return client.get("/v1/status"), client.get("/v1/events")
    except UserError:
        return None, None


def _needs(home: Home) -> dict[str, int]:
    from dugnad.peer.errors import UserError
    from dugnad.peer.manifest import memory_need
    from dugnad.peer.starting import stored_manifest

    needs = {}
    for run in home.known_runs():
        try:
            manifest = stored_manifest(run, home)
        except UserError:  # of another version
            continue
        if manifest is not None:
            needs[manifest.name] = memory_need(manifest).total
    return needs


def _devices(home: Home, settings: Settings) -> Finding:
    import asyncio

    from dugnad.peer.config import usable_cores
    from dugnad.peer.probe import ProbeError, measure

    try:
        home.create()
        probe = asyncio.run(measure(home.root, usable_cores()))
    except ProbeError as error:
        return check_devices("", str(error))
    kept = settings.gpu == "none"
    words = [
        f"{one.count} × {one.kind} {one.name}"
        + (" (unused: gpu = none)" if kept and one.kind != "cpu" else "")
        for one in probe.devices
    ]
    return check_devices(", ".join(words), "")
