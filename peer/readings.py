"""Reads the machine for the limits: what is cheap each time, what is dear only when asked for."""

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dugnad.peer import clock
from dugnad.peer.hours import DAY_MINUTES
from dugnad.peer.idletime import idle_seconds
from dugnad.peer.limits import Limits, Readings, Senses

CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz")
"""Kernel drivers of processor temperatures, the most exact first."""
DISK_WALK_S: Final = 300.0
"""The data folder is measured this often: it has thousands of files at most."""
PROGRAMS_MAX: Final = 100_000
NVIDIA_S: Final = 3.0


@dataclass(slots=True)
class Reader:
    """Reads for one daemon. `read` may take some milliseconds: call it in a thread."""

    root: Path
    limits: Limits
    _walked_at: float = -DISK_WALK_S
    _disk_used: int = 0

    def read(
        self, *, traffic: int = 0, leave_bytes: int = 0, trains_on_gpu: bool = False
    ) -> Readings:
        """The machine now."""
        import psutil  # only here: 25 ms that no other command needs

        now = clock.now()
        if now - self._walked_at >= DISK_WALK_S:
            self._walked_at, self._disk_used = now, folder_bytes(self.root)
        disk = _disk(self.root)
        limits = self.limits
        found = Readings(
            minute_of_week=minute_of_week(time.localtime()),
            now=now,
            cpu_c=cpu_temperature(psutil) if limits.cpu_temperature_max else None,
            memory_used=family_memory(psutil),
            memory_total=psutil.virtual_memory().total,
            disk_used=self._disk_used,
            disk_free=disk.free,
            disk_total=disk.total,
            traffic=traffic,
            leave_bytes=leave_bytes,
            trains_on_gpu=trains_on_gpu,
        )
        charge = battery(psutil)
        if charge is not None:
            found = replace(found, on_battery=charge[0], battery_percent=charge[1])
        if limits.only_when_idle or (trains_on_gpu and limits.gpu_only_when_idle != "false"):
            found = replace(found, idle_s=idle_seconds()[0])
        if limits.pause_while:
            found = replace(found, programs=programs(psutil, limits.pause_while))
        if trains_on_gpu and limits.gpu_temperature_max:
            found = replace(found, gpu_c=nvidia_temperature())
        return found


def senses(root: Path) -> Senses:
    """What can be told on this machine: asks everything once."""
    import psutil  # only here: 25 ms that no other command needs

    return Senses(
        idle=idle_seconds()[0] is not None,
        battery=battery(psutil) is not None,
        cpu_temperature=cpu_temperature(psutil) is not None,
        disk_total=_disk(root).total,
    )


def minute_of_week(at: time.struct_time) -> int:
    """Minutes since Monday 0:00 of a local time."""
    return at.tm_wday * DAY_MINUTES + at.tm_hour * 60 + at.tm_min


def battery(psutil: Any) -> tuple[bool, float] | None:  # Any: the module, which ships no types
    """Whether it runs on its battery, and the charge in percent; None where there is none."""
    with contextlib.suppress(OSError, AttributeError, psutil.Error, NotImplementedError):
        found = psutil.sensors_battery()
        if found is not None and found.power_plugged is not None:
            return not found.power_plugged, float(found.percent)
    return None


def cpu_temperature(psutil: Any) -> float | None:  # Any: as for battery
    """The hottest sensor of the processor, °C; None where none can be read."""
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        table = psutil.sensors_temperatures()
        for name in CPU_SENSORS:
            degrees = [row.current for row in table.get(name, ()) if 0.0 < row.current < 150.0]
            if degrees:
                return float(max(degrees))
    return None


def nvidia_temperature() -> float | None:
    """The hottest NVIDIA GPU, °C; None without one, or without its tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=NVIDIA_S, stdin=subprocess.DEVNULL, check=True
        )
        return max(float(word) for word in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def programs(psutil: Any, wanted: tuple[str, ...]) -> frozenset[str]:  # Any: as for battery
    """Which of `wanted` run, lower case. A program is known by its file's name, cut at 15 letters
    as the kernel does."""
    names = {name.lower() for name in wanted}
    found = set()
    for number, process in enumerate(psutil.process_iter(["name"])):
        if number >= PROGRAMS_MAX:
            break
        name = (process.info["name"] or "").lower()
        found |= {one for one in names if name in (one, one[:15], f"{one}.exe")}
    return frozenset(found)


def family_memory(psutil: Any) -> int:  # Any: as for battery
    """Resident bytes of this process and its children."""
    total = 0
    with contextlib.suppress(psutil.Error):
        me = psutil.Process(os.getpid())
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def folder_bytes(root: Path) -> int:
    """Bytes that the files under `root` occupy."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


@dataclass(frozen=True, slots=True)
class _Disk:
    total: int
    free: int


def _disk(root: Path) -> _Disk:
    folder = root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = shutil.disk_usage(folder)
    return _Disk(found.total, found.free)
