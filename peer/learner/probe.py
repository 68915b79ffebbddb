"""The measuring process: `python -m dugnad.peer.learner.probe`, started by `dugnad.peer.probe`
only.

Reads a request (JSON) from standard input, measures, and writes the reply to standard output. Every
measurement ends by the clock, and the process ends itself when its parent has lost interest.
"""

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import numpy as np
import psutil
import torch

from dugnad.averaging.fragments import build_table
from dugnad.peer.corpus import TokenFile
from dugnad.peer.learner.device import Wishes, candidates, choose
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.learner.stepper import OutOfMemory, Stepper, is_out_of_memory
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.probe import (
    CHILD_SECONDS_MAX,
    DEVICES_MAX,
    Device,
    ModelSpeed,
    Reply,
    Request,
    Speed,
    cpu_isa,
    cpu_name,
)

NICE: Final = 10  # as the learner
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
RUNS: Final = 5
"""Timed runs of each product: enough for a median that one interruption does not move."""
RUN_SECONDS: Final = 0.06
"""One run; five of three dtypes are 0.9 s a device."""
SECONDS_MAX: Final = 1.0
"""For one dtype with all its runs: a slow format must not use up the time of the others."""
SIZE_MIN: Final = 64
SIZE_MAX: Final = 4096
"""Products grow from the one to the other until a single one takes PRODUCT_SECONDS: one that fits a
board's cache says nothing of a large card."""
PRODUCT_SECONDS: Final = 0.004
COPY_BYTES: Final = 64 << 20
"""Larger than any processor's cache, small enough for a board with 512 MB."""
COPY_SHARE_MAX: Final = 8
"""A buffer takes at most this part of the free memory."""


def main() -> int:
    """Answer one request. Ends by SIGALRM if that takes longer than anybody waits."""
    signal.alarm(int(CHILD_SECONDS_MAX))
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    torch.set_num_threads(request.threads)
    torch.set_flush_denormal(True)  # as in training
    reply = Reply(
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        devices=measure_devices() if request.devices else None,
        model=None if request.model is None else measure_model(request.model),
    )
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    return 0


def measure_devices() -> tuple[Device, ...]:
    """Every kind of device that torch offers; equal ones are measured once and counted."""
    found: dict[tuple[str, str], Device] = {}
    for device in candidates("auto"):
        key = (_kind(device), _name(device))
        if key in found:
            found[key] = msgspec.structs.replace(found[key], count=found[key].count + 1)
        elif len(found) < DEVICES_MAX:
            found[key] = _measured(device)
    return tuple(found.values())


def measure_model(config: ModelConfig) -> ModelSpeed:
    """Tokens/s of training on this model, found as the learner finds it: the same number it will
    say when it starts."""
    table = build_table(config.tensor_specs(), 1)
    settings = OptimiserSettings(total_tokens=1)
    tokens = TokenFile(np.zeros(config.context + 1, np.uint8))

    def make(device: torch.device, dtype: torch.dtype) -> Stepper:
        model = FlatModel(config, table, device)
        model.flat.normal_(0.0, 0.02)
        return Stepper(model, settings, tokens, dtype)

    try:
        choice = choose(Wishes("auto", "auto", 0), settings.batch_sequences, make)
    except OutOfMemory as error:
        return ModelSpeed(0.0, trouble=str(error))
    return ModelSpeed(
        choice.tokens_per_s, str(choice.stepper.model.device), _word(choice.stepper.dtype)
    )


def product_speed(device: torch.device, dtype: torch.dtype) -> Speed | None:
    """Speed of n × n products, n as large as PRODUCT_SECONDS allows; None where the device
    cannot."""
    deadline = time.perf_counter() + SECONDS_MAX
    size = SIZE_MIN
    try:
        while True:
            a, b = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
            _seconds(device, partial(torch.matmul, a, b), 1)  # loads kernels, fills caches
            once = _seconds(device, partial(torch.matmul, a, b), 1)
            if once >= PRODUCT_SECONDS or size >= SIZE_MAX or time.perf_counter() > deadline:
                break
            size *= 2
        count = max(1, int(RUN_SECONDS / once))
        rates: list[float] = []
        while len(rates) < RUNS and (not rates or time.perf_counter() < deadline):
            seconds = _seconds(device, partial(torch.matmul, a, b), count)
            rates.append(count * 2.0 * size**3 / seconds)
    except RuntimeError:  # torch's word for a format that a device lacks, and for too little memory
        return None
    median = statistics.median(rates)
    return Speed(_word(dtype), median, (max(rates) - min(rates)) / median)


def copy_speed(device: torch.device) -> float:
    """Bytes a second copied from one buffer of the device to another; 0 if they do not fit."""
    size = COPY_BYTES
    if device.type == "cpu":
        size = min(size, psutil.virtual_memory().available // COPY_SHARE_MAX)
    try:
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        rates = [
            source.nbytes / _seconds(device, lambda: target.copy_(source), 1)
            for _ in range(RUNS + 1)
        ]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 0.0
    return statistics.median(rates[1:])  # the first touches fresh pages


def _measured(device: torch.device) -> Device:
    speeds = (product_speed(device, dtype) for dtype in DTYPES)
    return Device(
        kind=_kind(device),
        name=_name(device),
        count=1,
        memory_bytes=_memory(device),
        isa=cpu_isa() if device.type == "cpu" else (),
        speeds=tuple(speed for speed in speeds if speed is not None),
        copy_bytes_per_s=copy_speed(device),
    )


def _seconds(device: torch.device, work: Callable[[], object], count: int) -> float:
    """Time of `count` calls, the device's own work included."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return max(time.perf_counter() - start, 1e-9)


def _wait(device: torch.device) -> None:
    match device.type:
        case "cuda":
            torch.cuda.synchronize(device)
        case "xpu":
            torch.xpu.synchronize(device)
        case "mps":
            torch.mps.synchronize()


def _kind(device: torch.device) -> str:
    """ROCm shows itself as CUDA."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def _name(device: torch.device) -> str:
    match device.type:
        case "cuda":
            return torch.cuda.get_device_name(device)
        case "xpu":
            return torch.xpu.get_device_name(device)
        case _:
            return cpu_name()  # on MPS the chip is processor and accelerator in one


def _memory(device: torch.device) -> int:
    match device.type:
        case "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory)
        case "xpu":
            return int(torch.xpu.get_device_properties(device).total_memory)
        case "mps":
            return int(torch.mps.recommended_max_memory())
        case _:
            return int(psutil.virtual_memory().total)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
