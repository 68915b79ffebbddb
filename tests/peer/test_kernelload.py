"""How compiled kernels come into a process: once for all, from nobody's file but ours, or not."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dugnad.averaging import kernelcheck, kernels
from dugnad.peer import arithmetic, kernelload
from dugnad.peer.config import Settings
from dugnad.peer.doctor import check_kernels
from dugnad.peer.kernelload import KernelError, bring, serve

OBJECT = b"an object file"


class Compiler:
    """Instead of a child with numba; `linked` is what was linked."""

    def __init__(self) -> None:
        self.ran = 0
        self.linked: list[bytes] = []
        self.fault = ""
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()

    def __call__(self) -> bytes:
        self.ran += 1
        self.begun.set()
        self.let_go.wait(30)
        if self.fault:
            raise KernelError(self.fault)
        return OBJECT

    def link(self, data: bytes) -> object:
        self.linked.append(data)
        return "kernels"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(kernelload, "missing", lambda: "")
    monkeypatch.setattr(kernelload, "cache_key", lambda: "a" * 32)
    monkeypatch.setattr(kernelload, "_compiled", made)
    monkeypatch.setattr(kernelload, "link", made.link)
    monkeypatch.setattr(kernelload, "_forget_pages", lambda: None)
    monkeypatch.setattr(kernelload, "_POLL_S", 0.001)
    monkeypatch.setattr(kernelcheck, "fault_of", lambda tried: "")
    monkeypatch.setattr(kernels, "_active", None)
    return made


def test_what_was_compiled_is_kept_for_the_next_process(compiler: Compiler, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    assert bring(folder).compiled_s > 0.0
    assert bring(folder).compiled_s == 0.0
    assert (compiler.ran, compiler.linked) == (1, [OBJECT, OBJECT])
    assert folder.stat().st_mode & 0o777 == 0o700


def test_of_many_that_start_at_once_one_compiles(compiler: Compiler, tmp_path: Path) -> None:
    compiler.let_go.clear()
    with ThreadPoolExecutor(8) as pool:
        begun = [pool.submit(bring, tmp_path / "cache") for _ in range(8)]
        compiler.let_go.set()
        took = [one.result().compiled_s for one in begun]
    assert compiler.ran == 1
    assert sum(one > 0.0 for one in took) == 1


@pytest.mark.parametrize("spoilt", [b"", b"x", b"y" * 40, b"\0" * 32])
def test_a_spoilt_file_is_compiled_again(compiler: Compiler, tmp_path: Path, spoilt: bytes) -> None:
    bring(tmp_path / "cache")
    (tmp_path / "cache" / ("a" * 32)).write_bytes(spoilt)
    bring(tmp_path / "cache")
    bring(tmp_path / "cache")
    assert (compiler.ran, set(compiler.linked)) == (2, {OBJECT})


def test_what_others_could_have_written_is_not_run(compiler: Compiler, tmp_path: Path) -> None:
    bring(tmp_path / "cache")
    (tmp_path / "cache" / ("a" * 32)).chmod(0o666)
    bring(tmp_path / "cache")
    assert compiler.ran == 2
    (tmp_path / "cache").chmod(0o777)
    bring(tmp_path / "cache")
    bring(tmp_path / "cache")
    assert compiler.ran == 4
    (tmp_path / "link").symlink_to(tmp_path / "other", target_is_directory=True)
    (tmp_path / "other").mkdir()
    bring(tmp_path / "link")
    assert not list((tmp_path / "other").iterdir())


def test_where_nothing_can_be_written_it_is_compiled_each_time(
    compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert bring(tmp_path / "file" / "cache").compiled_s > 0.0
    assert bring(tmp_path / "file" / "cache").compiled_s > 0.0


def test_where_there_can_be_no_lock_it_is_compiled_all_the_same(
    compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "lock").mkdir()
    assert bring(tmp_path).compiled_s > 0.0


def test_old_files_go(compiler: Compiler, tmp_path: Path) -> None:
    bring(tmp_path)
    for number in range(20):
        path = tmp_path / f"{number:032}"
        path.write_bytes(b"old")
        os.utime(path, (number, number))
    (tmp_path / ("a" * 32)).unlink()
    bring(tmp_path)
    kept = {one.name for one in tmp_path.iterdir()}
    assert kept == {"a" * 32, "lock", *(f"{number:032}" for number in range(13, 20))}


def test_numpy_serves_where_there_is_no_compiler_or_it_fails(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.fault = "no such processor"
    assert serve(tmp_path) == "numpy: no such processor"
    monkeypatch.setattr(kernelload, "missing", lambda: "numba")
    assert serve(tmp_path) == "numpy: numba is not installed"
    assert kernels.current() is None


def test_kernels_that_differ_from_numpy_are_not_used(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelcheck, "fault_of", lambda tried: "compiled step gave other bits")
    assert serve(tmp_path) == "numpy: compiled step gave other bits"
    assert kernels.current() is None
    monkeypatch.setattr(kernelcheck, "fault_of", lambda tried: "")
    assert serve(tmp_path) == "compiled kernels, made before"
    assert kernels.current() is not None


class Host:
    """What of a daemon the kernels see."""

    def __init__(self, setting: str, memory_mb: float) -> None:
        self.settings = Settings(kernels=setting, memory_mb=memory_mb)
        self.kernels = ""
        self.notes: list[str] = []

    def note(self, kind: str, text: str) -> None:
        self.notes.append(f"{kind}: {text}")


async def brought(setting: str, memory_mb: float = 4000.0) -> Host:
    host: Any = Host(setting, memory_mb)
    await asyncio.wait_for(arithmetic.bring_kernels(host), 30)
    found: Host = host
    return found


async def compiling(compiler: Compiler) -> asyncio.Task[Host]:
    """A daemon whose kernels are being compiled, until the compiler is let go."""
    compiler.let_go.clear()
    bringing = asyncio.create_task(brought("auto"))
    assert await asyncio.to_thread(compiler.begun.wait, 30)
    return bringing


async def test_a_daemon_goes_on_while_they_are_compiled(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelload, "cache_folder", lambda: tmp_path)
    bringing = await compiling(compiler)
    assert kernels.current() is None
    compiler.let_go.set()
    host = await bringing
    assert host.kernels.startswith("compiled kernels, made in")
    assert host.notes == [f"kernels: {host.kernels}"]


async def test_a_daemon_that_leaves_waits_for_no_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelload, "cache_folder", lambda: tmp_path)
    bringing = await compiling(compiler)
    bringing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bringing
    compiler.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join(30)


async def test_numpy_serves_where_it_is_set_or_memory_is_scarce(
    compiler: Compiler,
) -> None:
    assert (await brought("numpy")).kernels == "numpy: as set"
    assert (await brought("auto", 500.0)).kernels.endswith("500 MB are allowed")
    assert compiler.ran == 0


def test_the_doctor_says_what_computes() -> None:
    assert check_kernels("numpy", "", None).text == "numpy, as set"
    assert "dugnad[fast]" in check_kernels("auto", "numba", None).text
    assert check_kernels("auto", "", {"kernels": "compiled kernels, made before"}).level == "ok"
    failed = check_kernels("auto", "", {"kernels": "numpy: they could not be compiled"})
    assert (failed.level, failed.text) == ("warn", "numpy: they could not be compiled")
    assert check_kernels("auto", "", None).level == "ok"


@pytest.mark.slow
@pytest.mark.skipif(bool(kernelload.missing()), reason="numba is not installed")
def test_the_compiler_ends_with_whoever_started_it() -> None:
    command = [sys.executable, "-P", "-m", "dugnad.peer.kernelbuild"]
    started = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 1
    assert time.monotonic() - started < 60.0


@pytest.mark.slow
@pytest.mark.skipif(bool(kernelload.missing()), reason="numba is not installed")
def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # then there is nothing to look into
    monkeypatch.setattr(kernelload, "cache_key", lambda: "b" * 32)
    with pytest.raises(KernelError, match=r"could not be compiled: .*int8_rest"):
        bring(tmp_path)
