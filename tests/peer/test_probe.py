"""Measuring this machine, and remembering it."""

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from dugnad.peer import clock, probe
from dugnad.peer.contract import Contract, can_take
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.probe import (
    Device,
    ModelSpeed,
    ProbeError,
    Reply,
    Request,
    Speed,
    cpu_isa,
    cpu_name,
    describe,
    measure,
)

from .processes import wait_for  # noqa: TID252  the tests are no installed package

MODEL = ModelConfig(dim=16, layers=1, heads=2, hidden=32, context=16)
CPU = Device(
    kind="cpu",
    name="Test Chip",
    count=1,
    memory_bytes=8_000_000_000,
    isa=("avx2",),
    speeds=(Speed("float32", 8e10, 0.1), Speed("bfloat16", 1.1e9, 0.2)),
    copy_bytes_per_s=1e10,
)
CPUINFO = """processor\t: 0
model name\t: Some  Chip @ 3 GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni amx_tile
processor\t: 1
model name\t: Another
"""


class Child:
    """Stands in for the measuring process; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Reply:
        self.requests.append(request)
        await asyncio.sleep(0)
        return Reply(
            torch="9.9",
            threads=request.threads,
            devices=(CPU,) if request.devices else None,
            model=ModelSpeed(1234.0, "cpu", "float32") if request.model else None,
        )


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    fake = Child()
    monkeypatch.setattr(probe, "_ask_child", fake)
    return fake


async def test_a_machine_is_measured_once_and_then_remembered(child: Child, tmp_path: Path) -> None:
    first = await measure(tmp_path, 2)
    second = await measure(tmp_path, 2)
    assert len(child.requests) == 1
    assert second.devices == first.devices == (CPU,)
    assert second.flops == {"float32": 8e10, "bfloat16": 1.1e9}
    assert first.memory_bytes > 0
    assert first.disk_free > 0
    assert first.model is None


async def test_only_what_is_not_known_of_a_model_is_measured(child: Child, tmp_path: Path) -> None:
    await measure(tmp_path, 2)
    with_model = await measure(tmp_path, 2, MODEL)
    again = await measure(tmp_path, 2, MODEL)
    assert [(r.devices, r.model is not None) for r in child.requests] == [
        (True, False),
        (False, True),
    ]
    assert with_model.model == again.model == ModelSpeed(1234.0, "cpu", "float32")
    assert (await measure(tmp_path, 2)).model is None


async def test_other_threads_another_torch_or_a_week_make_it_measure_again(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await measure(tmp_path, 2)
    await measure(tmp_path, 1)
    assert len(child.requests) == 2
    monkeypatch.setattr(probe, "torch_version", lambda: "10.0")
    await measure(tmp_path, 1)
    assert len(child.requests) == 3
    now = clock.wall_ms()
    monkeypatch.setattr(clock, "wall_ms", lambda: now + 6 * 86_400_000)
    await measure(tmp_path, 1)
    assert len(child.requests) == 3
    monkeypatch.setattr(clock, "wall_ms", lambda: now + 8 * 86_400_000)
    await measure(tmp_path, 1)
    assert len(child.requests) == 4
    monkeypatch.setattr(clock, "wall_ms", lambda: now)  # the clock was set back
    await measure(tmp_path, 1)
    assert len(child.requests) == 5


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff\x00", b'{"key": 1', b"[" * 100_000])
async def test_a_broken_cache_is_no_cache(child: Child, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "probe.json").write_bytes(text)
    assert (await measure(tmp_path, 2)).devices == (CPU,)
    assert len(child.requests) == 1


async def test_a_bounded_number_of_models_is_remembered(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MODELS_MAX", 2)
    for layers in (1, 2, 3):
        await measure(tmp_path, 2, msgspec.structs.replace(MODEL, layers=layers))
    await measure(tmp_path, 2, msgspec.structs.replace(MODEL, layers=3))
    assert len(child.requests) == 3
    await measure(tmp_path, 2, MODEL)
    assert len(child.requests) == 4


async def test_two_callers_measure_one_after_the_other(child: Child, tmp_path: Path) -> None:
    await asyncio.gather(measure(tmp_path, 2), measure(tmp_path, 2))
    assert len(child.requests) == 1


async def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LOCK_SECONDS_MAX", 0.0)
    with (tmp_path / "probe.json.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert (await measure(tmp_path, 2)).devices == (CPU,)


async def test_a_folder_that_is_not_there_is_said_so(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="cannot be written"):
        await measure(tmp_path / "absent", 2)


async def test_a_probe_answers_a_contract(child: Child, tmp_path: Path) -> None:
    contract = Contract(1000, ("bfloat16", "float32"), 8e10, splittable=True, attempts=3)
    assert can_take(contract, await measure(tmp_path, 2)) == (
        True,
        "about 1 s a unit in float32",
    )


async def test_people_read_it_in_lines(child: Child, tmp_path: Path) -> None:
    text = describe(await measure(tmp_path, 2, MODEL))
    assert "1 × cpu Test Chip (avx2): memory 8.0 GB, copies 10.0 GB/s" in text
    assert "float32        80.0 GFLOP/s, spread 10%" in text
    assert "this run's model: 1,234 tokens/s on cpu in float32" in text


def test_the_processor_is_named_by_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    assert cpu_name(path) == "Some Chip @ 3 GHz"
    assert cpu_isa(path) == ("amx", "avx2", "avx512", "vnni")
    path.write_text("Features\t: fp asimd sve\nModel\t\t: Raspberry Pi 5\n")
    assert cpu_name(path) == "Raspberry Pi 5"
    assert cpu_isa(path) == ("neon", "sve")
    assert cpu_name(tmp_path / "none")


@pytest.mark.slow
async def test_this_machine_is_measured_by_a_process_of_its_own(tmp_path: Path) -> None:
    result = await measure(tmp_path, 1, MODEL)
    (cpu,) = [device for device in result.devices if device.kind == "cpu"]
    assert {speed.dtype for speed in cpu.speeds} >= {"float32"}
    assert all(speed.flops_per_s > 1e6 for speed in cpu.speeds)
    assert cpu.copy_bytes_per_s > 1e6
    assert result.threads == 1
    assert result.model is not None
    assert result.model.tokens_per_s > 0.0
    assert (await measure(tmp_path, 1, MODEL)).at_ms == result.at_ms


@pytest.mark.slow
async def test_a_measurement_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CHILD_SECONDS_MAX", 0.05)
    with pytest.raises(ProbeError, match="more than"):
        await measure(tmp_path, 1)
    assert not (tmp_path / "probe.json").exists()


@pytest.mark.slow
async def test_a_measuring_process_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ProbeError, match="ended with 1"):
        await measure(tmp_path, 1)


@pytest.mark.slow
def test_asking_does_not_load_torch() -> None:
    code = "import sys, dugnad.peer.probe; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.slow
def test_a_measurement_ends_with_the_daemon_that_asked_for_it(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, sys\nfrom dugnad.peer.probe import measure\n"
        "asyncio.run(measure(pathlib.Path(sys.argv[1]), 1))\n"
    )
    daemon = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        (child,) = wait_for(psutil.Process(daemon.pid).children, 20.0, "the measuring process")
    finally:
        daemon.kill()
        daemon.wait()

    def gone() -> bool:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    wait_for(gone, 3.0, "its end")
