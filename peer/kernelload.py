"""Bringing the compiled kernels into a process: from the cache, or by compiling them for it.

numba, the compiler, runs in a process of its own (:mod:`~dugnad.peer.kernelbuild`) at low
priority: it would hold the interpreter, and so the event loop, for seconds and memory for good.
What it makes lies in the user's cache folder under a name that binds the sources, the versions and
the processor, so it is made once for all peers of a machine; whoever comes meanwhile waits for it.
Here llvmlite alone links that file, a few tens of milliseconds. Everything in this module blocks:
call it in a thread, and go on with numpy until it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dugnad.averaging import kernelcheck, kernels

COMPILE_S: Final = 120.0
"""Compiling takes four seconds of a processor; one that is crowded may need many times that."""

FILES_KEPT: Final = 8
"""Object files of other versions or processors that stay: homes are shared between machines."""

_POLL_S: Final = 0.2
_OBJECT_BYTES_MAX: Final = 1 << 22
"""Of one object file: it has 30 kB."""

_WORDS_MAX: Final = 300


class KernelError(Exception):
    """Why there are no kernels; numpy serves."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Brought:
    """Kernels that work, and what it took: for people."""

    kernels: kernels.Kernels
    compiled_s: float
    """Seconds that compiling took; 0 when they were in the cache."""


def missing() -> str:
    """Return which of the packages are not installed, or '': quick, nothing is loaded."""
    lacking = [name for name in ("numba", "llvmlite") if importlib.util.find_spec(name) is None]
    return " and ".join(lacking)


def cache_folder() -> Path:
    """Return where object files are kept: one place for all peers of this user."""
    import platformdirs  # only here: 20 ms

    return platformdirs.user_cache_path("dugnad") / "kernels"


def serve(folder: Path | None = None) -> str:
    """Bring the kernels and let this process use them; returns what serves from now on, in words.

    Without a ``folder`` it is the user's.
    """
    try:
        brought = bring(cache_folder() if folder is None else folder)
    except KernelError as fault:
        return f"numpy: {fault.reason}"
    kernels.use(brought.kernels)
    made = f" in {brought.compiled_s:.1f} s" if brought.compiled_s else " before"
    return f"compiled kernels, made{made}"


def bring(folder: Path) -> Brought:
    """Return the kernels, from ``folder`` or compiled; raises :class:`KernelError`."""
    if lacking := missing():
        raise KernelError(f"{lacking} is not installed")
    with _translated():
        try:
            data, seconds = _kept_or_compiled(folder)
            made = link(data)
        finally:
            _forget_pages()
    if fault := kernelcheck.fault_of(made):
        raise KernelError(fault)
    return Brought(made, seconds)


def _kept_or_compiled(folder: Path) -> tuple[bytes, float]:
    """Return an object file and the seconds that compiling it took."""
    started = time.monotonic()
    if not _own_folder(folder):
        return _compiled(), time.monotonic() - started
    path = folder / cache_key()
    if kept := _read(path):
        return kept, 0.0
    with _only_one(folder):
        if kept := _read(path):
            return kept, 0.0
        started = time.monotonic()
        data = _compiled()
        _write(path, data)
    return data, time.monotonic() - started


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Whatever the system or llvmlite has against it is a reason to go on with numpy."""
    try:
        yield
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as fault:
        raise KernelError(f"{type(fault).__name__}: {fault}"[:_WORDS_MAX]) from fault


def machine() -> Any:
    """Return llvmlite's target machine for this very processor. Any: llvmlite has no types."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="default",
        codemodel="jitdefault",
    )


def cache_key() -> str:
    """Return the name of the file that holds what would be compiled here."""
    import llvmlite.binding as llvm

    folders = Path(kernels.__file__).parent, Path(__file__).parent
    sources = [one for folder in folders for one in sorted(folder.glob("kernel*.py"))]
    parts = [one.read_bytes() for one in sources]
    parts += [repr(kernels.SIGNATURES).encode(), str(kernels.LANES).encode()]
    parts += [importlib.metadata.version(name).encode() for name in ("numba", "llvmlite")]
    target = (llvm.get_default_triple(), llvm.get_host_cpu_name())
    parts += [*(one.encode() for one in target), llvm.get_host_cpu_features().flatten().encode()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def link(data: bytes) -> kernels.Kernels:
    """Return the kernels of an object file, ready to be called."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    functions = {}
    for name in kernels.SIGNATURES:
        address = engine.get_function_address(name)
        if not address:
            raise RuntimeError(f"the object file has no {name}")
        functions[name] = kernels.prototype(name)(address)
    return kernels.Kernels(functions, engine)


def _compiled() -> bytes:
    """Return what a process of its own compiles. It ends when this one does: its input does."""
    command = [sys.executable, "-P", "-m", "dugnad.peer.kernelbuild"]
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words
        ) as child,
    ):
        assert child.stdout is not None, "it was asked for"
        deadline = time.monotonic() + COMPILE_S
        try:
            data = _read_until(child.stdout.fileno(), deadline)
            status = child.wait(max(0.1, deadline - time.monotonic()))
        finally:
            child.kill()
        if status or not data:
            words.seek(0)
            said = " ".join(words.read().decode(errors="replace").split())[-_WORDS_MAX:]
            raise KernelError(f"they could not be compiled: {said or f'exit status {status}'}")
    return data


def _read_until(source: int, deadline: float) -> bytes:
    """Return all that comes from a pipe; KernelError when it takes too long or is too much."""
    import select

    data = bytearray()
    while len(data) <= _OBJECT_BYTES_MAX:
        ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise KernelError(f"compiling them took more than {COMPILE_S:.0f} s")
        part = os.read(source, 1 << 16)
        if not part:
            return bytes(data)
        data += part
    raise KernelError("what was compiled is too large")


def _own_folder(folder: Path) -> bool:
    """Make the folder; return whether nobody but its owner, who runs this, can write there.

    What lies in it is run, so it must be nobody else's.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private


def _read(path: Path) -> bytes | None:
    """Return an object file that is whole and ours, else None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            data = file.read(_OBJECT_BYTES_MAX)
    except OSError:
        return None
    digest, body = data[:32], data[32:]
    return body if body and hashlib.sha256(body).digest() == digest else None


def _write(path: Path, body: bytes) -> None:
    """Keep an object file for the next one; a disk that is full or read-only is no harm."""
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(body).digest() + body)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
        others = [one for one in path.parent.iterdir() if len(one.name) == len(path.name)]
        others.sort(key=lambda one: one.stat().st_mtime)
        for one in others[:-FILES_KEPT]:
            one.unlink()


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one process of this user compile; after COMPILE_S whoever waits goes on all the same, and
    so does everybody where there can be no lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        handle = os.open(folder / "lock", flags, 0o600)
    except OSError:  # such as a file system that is read-only
        yield
        return
    try:
        deadline = time.monotonic() + COMPILE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
            else:
                break
        yield
    finally:
        os.close(handle)


_MADV_DONTNEED: Final = 4


def _forget_pages() -> None:
    """Unmap the pages of LLVM's own code, 80 MB of which were touched, where Linux lets us.

    They are the file's, unchanged and read-only: whoever needs one again gets it again.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, *_, path = line.split(maxsplit=5)
        if rights == "r-xp" and "llvmlite" in path:
            start, stop = (int(one, 16) for one in bounds.split("-"))
            madvise(start, stop - start, _MADV_DONTNEED)
