"""What this machine can do, measured on it and remembered: `dugnad probe`, and the advert's
figures.

Nothing is looked up in a list of known hardware, and "supported" is not believed: bfloat16 products
are 60 times slower than float32 on some processors that support both. A child process
(`learner.probe`) measures with torch; this process never loads it. The result is kept as JSON in
the data folder until it is a week old or something that it depends on has changed.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from dugnad.peer import clock
from dugnad.peer.errors import UserError
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.paths import Home

SCHEMA: Final = 1
"""Of the cached file and of how things are measured; another number is measured anew."""
FRESH_DAYS: Final = 7
"""Machines change without a new name: dust, a driver, a second memory module (volunteers.md
4.3)."""
CHILD_SECONDS_MAX: Final = 60.0
"""A measurement takes 5 to 10 s; loading torch on a busy two-core board took 17 s once."""
LOCK_SECONDS_MAX: Final = 2 * CHILD_SECONDS_MAX
"""How long to wait for another process that measures for the same data folder."""
REPLY_BYTES_MAX: Final = 1 << 16
"""Eight devices with three speeds each have 4 KB."""
MODELS_MAX: Final = 16
"""Models whose tokens/s are remembered: more runs than one machine joins in a week."""
DEVICES_MAX: Final = 8
"""Kinds of devices told apart in one machine, as in an advert."""
ISA_FLAGS: Final = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "vnni",
    "avx_vnni": "vnni",
    "amx_tile": "amx",
    "asimd": "neon",
    "sve": "sve",
}
"""Processor flags that matter to matrix products: the kernel's word, and ours."""

_CACHE_NAME: Final = "probe.json"
_CACHE_BYTES_MAX: Final = 1 << 18
_CPUINFO: Final = Path("/proc/cpuinfo")
_CPUINFO_BYTES: Final = 1 << 16  # the first core's lines are enough
_LOCK_PAUSE_S: Final = 0.1
_MS_PER_DAY: Final = 86_400_000
_STDERR_BYTES_SHOWN: Final = 400


class ProbeError(Exception):
    """The machine could not be measured; the text says why."""


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Matrix products in one number format: operations a second, the median of several runs, and
    their spread, (largest - smallest) / median."""

    dtype: str
    flops_per_s: float
    spread: float


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` equal devices. `kind`: cpu, cuda, rocm, xpu, mps. A dtype without a row cannot be
    used.

    `copy_bytes_per_s` are bytes copied within the device's memory, read and written once each.
    """

    kind: str
    name: str
    count: int
    memory_bytes: int
    isa: tuple[str, ...]
    speeds: tuple[Speed, ...]
    copy_bytes_per_s: float


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the child is asked to measure."""

    threads: int
    devices: bool
    model: ModelConfig | None


class ModelSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training on one model: the fastest device and format. 0 tokens/s with a reason in
    `trouble`."""

    tokens_per_s: float
    device: str = ""
    dtype: str = ""
    trouble: str = ""


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the child measured; None for what it was not asked."""

    torch: str
    threads: int
    devices: tuple[Device, ...] | None
    model: ModelSpeed | None


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A machine, as measured at `at_ms` (Unix time). Memory and disk are those of the last call.

    It answers what a unit's contract asks (`contract.Capabilities`).
    """

    schema: int
    at_ms: int
    torch: str
    threads: int
    system: str
    machine: str
    devices: tuple[Device, ...]
    memory_total: int
    memory_available: int
    disk_free: int
    model: ModelSpeed | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory that can be used now, in bytes."""
        return self.memory_available

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of its devices."""
        return frozenset(device.kind for device in self.devices)

    @property
    def flops(self) -> dict[str, float]:
        """The best measured speed per dtype, over all devices."""
        best: dict[str, float] = {}
        for device in self.devices:
            for speed in device.speeds:
                best[speed.dtype] = max(best.get(speed.dtype, 0.0), speed.flops_per_s)
        return best


class _Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cached file. `key` names everything that the figures depend on."""

    key: str
    probe: Probe
    models: dict[str, ModelSpeed]

    def holds(self, key: str, now_ms: int) -> bool:
        age = now_ms - self.probe.at_ms
        return self.key == key and 0 <= age < FRESH_DAYS * _MS_PER_DAY


def cached(cache_dir: Path, threads: int) -> Probe | None:
    """What `measure` would return without measuring anything; None when it would have to."""
    cache = _load(cache_dir / _CACHE_NAME)
    if cache is None or not cache.holds(cache_key(threads), clock.wall_ms()):
        return None
    return _refreshed(cache.probe, cache_dir, None)


async def measure(cache_dir: Path, threads: int, model: ModelConfig | None = None) -> Probe:
    """What this machine can do with `threads` threads, and how fast it trains `model`.

    Measures what `cache_dir` does not remember: at most about ten seconds and the loading of torch.
    One process measures for a folder at a time. ProbeError when it cannot be measured.
    """
    key = cache_key(threads)
    wanted = "" if model is None else _model_key(model)
    async with _only_one(cache_dir):
        cache = _load(cache_dir / _CACHE_NAME)
        if cache is not None and not cache.holds(key, clock.wall_ms()):
            cache = None
        if cache is None or (model is not None and wanted not in cache.models):
            request = Request(threads, cache is None, model)
            cache = _merged(cache, key, await _ask_child(request), wanted)
            _save(cache_dir / _CACHE_NAME, cache)
    return _refreshed(cache.probe, cache_dir, cache.models.get(wanted))


def main(home: Home, *, as_json: bool) -> int:
    """`dugnad probe`: measure and print. UserError when the machine cannot be measured."""
    from dugnad.peer.config import usable_cores

    try:
        home.create()
        probe = asyncio.run(measure(home.root, usable_cores()))
    except ProbeError as error:
        raise UserError(
            "E006", f"this machine could not be measured: {error}", "reinstall dugnad with torch"
        ) from error
    print(msgspec.json.encode(probe).decode() if as_json else describe(probe))
    return 0


def describe(probe: Probe) -> str:
    """A probe in lines for people."""
    lines = [
        f"{probe.system} on {probe.machine}, torch {probe.torch}, {probe.threads} threads",
        f"memory {_giga(probe.memory_available)} GB free of {_giga(probe.memory_total)} GB,"
        f" disk {_giga(probe.disk_free)} GB free",
    ]
    for device in probe.devices:
        isa = f" ({', '.join(device.isa)})" if device.isa else ""
        lines.append(
            f"{device.count} × {device.kind} {device.name}{isa}: memory"
            f" {_giga(device.memory_bytes)} GB, copies {_giga(device.copy_bytes_per_s)} GB/s"
        )
        lines += [
            f"  {speed.dtype:<9}{speed.flops_per_s / 1e9:10,.1f} GFLOP/s, spread {speed.spread:.0%}"
            for speed in device.speeds
        ]
    if probe.model is not None:
        speed = probe.model
        lines.append(
            f"this run's model: {speed.trouble}"
            if speed.trouble
            else f"this run's model: {speed.tokens_per_s:,.0f} tokens/s on {speed.device}"
            f" in {speed.dtype}"
        )
    return "\n".join(lines)


def cache_key(threads: int) -> str:
    """Everything that the figures depend on, as far as it can be seen without torch."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    parts = [str(SCHEMA), torch_version(), cpu_name(), *_accelerators(), f"{cores}c", f"{threads}t"]
    return "|".join(parts)


def torch_version() -> str:
    """The version of the torch that is installed, '' without one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return ""


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """What the processor calls itself."""
    for word in ("model name", "Model", "Hardware", "cpu model"):
        if name := _cpuinfo(cpuinfo).get(word):
            return " ".join(name.split())
    return platform.processor() or platform.machine() or "unknown"


def cpu_isa(cpuinfo: Path = _CPUINFO) -> tuple[str, ...]:
    """The instruction sets of ISA_FLAGS that the processor has, ascending."""
    lines = _cpuinfo(cpuinfo)
    flags = set((lines.get("flags") or lines.get("Features") or "").split())
    found = {name for flag, name in ISA_FLAGS.items() if flag in flags}
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found.add("neon")  # part of every AArch64 processor; macOS has no /proc
    return tuple(sorted(found))


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first value of each line of /proc/cpuinfo; empty where there is none."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        for line in file.read(_CPUINFO_BYTES).splitlines():
            word, colon, value = line.partition(":")
            if colon:
                found.setdefault(word.strip(), value.strip())
    return found


def _accelerators() -> list[str]:
    """Traces that accelerators leave in the system, to notice that one came or went."""
    names = [path.name for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    names += [path.name for path in sorted(Path("/dev/dri").glob("renderD*"))]
    return names[:DEVICES_MAX]


def _model_key(model: ModelConfig) -> str:
    return hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:32]


def _merged(cache: _Cache | None, key: str, reply: Reply, wanted: str) -> _Cache:
    if cache is None:
        assert reply.devices is not None, "the child was asked for devices"
        probe = Probe(
            schema=SCHEMA,
            at_ms=clock.wall_ms(),
            torch=reply.torch,
            threads=reply.threads,
            system=platform.system(),
            machine=platform.machine(),
            devices=reply.devices,
            memory_total=0,
            memory_available=0,
            disk_free=0,
        )
        cache = _Cache(key, probe, {})
    models = dict(cache.models)
    if reply.model is not None:
        while len(models) >= MODELS_MAX:
            del models[next(iter(models))]
        models[wanted] = reply.model
    return msgspec.structs.replace(cache, models=models)


def _refreshed(probe: Probe, folder: Path, model: ModelSpeed | None) -> Probe:
    import psutil  # only here: 25 ms that no other command needs

    memory = psutil.virtual_memory()
    return msgspec.structs.replace(
        probe,
        memory_total=memory.total,
        memory_available=memory.available,
        disk_free=shutil.disk_usage(folder).free,
        model=model,
    )


def _load(path: Path) -> _Cache | None:
    """The cached file; None when there is none or it is not what we wrote."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_CACHE_BYTES_MAX), type=_Cache)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _save(path: Path, cache: _Cache) -> None:
    """Write the file whole or not at all. A full disk costs the next start a few seconds, no
    more."""
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_bytes(msgspec.json.format(msgspec.json.encode(cache)))
        new.replace(path)


@contextlib.asynccontextmanager
async def _only_one(folder: Path) -> AsyncIterator[None]:
    """Hold the folder's lock. After LOCK_SECONDS_MAX go on without: two measurements at a time are
    inaccurate, but none at all is worse."""
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context((folder / (_CACHE_NAME + ".lock")).open("wb"))
        except OSError as error:
            raise ProbeError(f"{folder} cannot be written: {error.strerror}") from error
        # Another process holds the lock: there is no event to wait for.
        while not _locked(lock.fileno()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOCK_PAUSE_S)
        yield


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# The leash comes before torch, which takes seconds to load: a probe outlived a killed daemon.
_CHILD = """
import sys
from dugnad.peer.learner.leash import die_with_parent
die_with_parent(int(sys.argv[1]))
from dugnad.peer.learner.probe import main
sys.exit(main())
"""


async def _ask_child(request: Request) -> Reply:
    """Let a child of our own Python measure; it does not outlive this call."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _CHILD,
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CHILD_SECONDS_MAX):
            out, err = await child.communicate(msgspec.json.encode(request))
    except TimeoutError:
        raise ProbeError(f"measuring took more than {CHILD_SECONDS_MAX:.0f} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        text = err[-_STDERR_BYTES_SHOWN:].decode(errors="replace").strip()
        raise ProbeError(f"the measuring process ended with {child.returncode}: {text}")
    try:
        return msgspec.json.decode(out[:REPLY_BYTES_MAX], type=Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProbeError(f"the measuring process said nonsense: {error}") from None


def _giga(size: float) -> str:
    return f"{size / 1e9:,.1f}"
