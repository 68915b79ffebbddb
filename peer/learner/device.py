"""Where and how to train, decided by a stopwatch: device, number format and micro-batch.

Nothing is looked up in a list of known hardware. Whatever torch offers on this machine is tried on
the run's own model, and the fastest that fits is taken.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.stepper import OutOfMemory, Stepper, is_out_of_memory, release_memory

PROBE_SECONDS_MIN: Final = 0.1
"""Time spent on each micro-batch size: ten runs of a small model, one of a large one."""
PROBE_SECONDS_MAX: Final = 3.0
"""Time for all sizes on a device: a volunteer waits for it, so the search ends there."""
WORSE: Final = 0.9
"""A size this much slower than the best ends the search: larger ones only use more memory."""
BFLOAT16_GAIN: Final = 1.15
"""Below this gain bfloat16 is not worth its rounding. It was 60 times slower on some CPUs."""
MATMUL_SIZE: Final = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured to be fastest; `tokens_per_s` of forward and backward passes."""

    stepper: Stepper
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the daemon left open (`auto`, 0) and what it fixed. See protocol.Start."""

    device: str
    dtype: str
    micro_batch: int
    micro_batch_max: int = 0

    def sizes(self, device: torch.device, batch_sequences: int) -> list[int]:
        """Micro-batches to try. The owner's memory bounds them on a CPU (0: not at all); elsewhere
        the device says itself what fits."""
        if self.micro_batch:
            return [self.micro_batch]
        sizes = micro_batches(batch_sequences)
        limit = self.micro_batch_max if device.type == "cpu" and self.micro_batch_max else sizes[-1]
        return [size for size in sizes if size <= max(limit, 1)]


class Timed(Protocol):
    """What the stopwatch needs of a stepper, or of the anchors."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        ...

    def time_micro_batch(self, size: int) -> None:
        """Do the work of one micro-batch and forget it."""
        ...


def choose(
    wishes: Wishes, batch_sequences: int, make: Callable[[torch.device, torch.dtype], Stepper]
) -> Choice:
    """The fastest stepper among the devices and formats that `wishes` allows.

    `make` builds a stepper with loaded parameters. OutOfMemory when the model fits nowhere,
    ValueError when the wished device does not exist.
    """
    best: Choice | None = None
    lack: Exception | None = None
    for device in candidates(wishes.device):
        try:
            choice = _on_device(device, wishes, batch_sequences, make)
        except OutOfMemory as error:
            lack = error
            continue
        if best is None or choice.tokens_per_s > best.tokens_per_s:
            best = choice
    if best is None:
        raise OutOfMemory("the model fits on no device of this machine") from lack
    return best


def candidates(wish: str) -> list[torch.device]:
    """Devices to try; ValueError when the one wished for is unknown or absent."""
    present = list(_present())
    if wish == "auto":
        return present
    try:
        wished = torch.device(wish)
    except RuntimeError as error:
        raise ValueError(f"unknown device {wish!r}") from error
    if wished.type not in {device.type for device in present}:
        raise ValueError(
            f"device {wish!r} is not available: there is {', '.join(map(str, present))}"
        )
    return [wished]


def _present() -> Iterator[torch.device]:
    if torch.cuda.is_available():
        yield from (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    if torch.xpu.is_available():
        yield from (torch.device("xpu", number) for number in range(torch.xpu.device_count()))
    if torch.backends.mps.is_available():
        yield torch.device("mps")
    yield torch.device("cpu")


def _on_device(
    device: torch.device,
    wishes: Wishes,
    batch_sequences: int,
    make: Callable[[torch.device, torch.dtype], Stepper],
) -> Choice:
    first = torch.bfloat16 if wishes.dtype == "bfloat16" else torch.float32
    try:
        stepper = make(device, first)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"the model does not fit into the memory of {device}") from error
        raise
    stepper.micro_batch, rate = _fastest(stepper, wishes.sizes(device, batch_sequences))
    if wishes.dtype == "auto" and _bfloat16_products_gain(device):
        stepper.dtype = torch.bfloat16
        halved_rate = _rate(stepper, stepper.micro_batch)
        if halved_rate > BFLOAT16_GAIN * rate:
            return Choice(stepper, halved_rate)
        stepper.dtype = torch.float32
    return Choice(stepper, rate)


def choose_forward(
    wishes: Wishes, batch_sequences: int, make: Callable[[torch.device], Anchors]
) -> tuple[Anchors, int, float]:
    """The fastest device for forward passes, its micro-batch, and tokens/s. See `choose`."""
    best: tuple[Anchors, int, float] | None = None
    lack: Exception | None = None
    for device in candidates(wishes.device):
        try:
            made = make(device)
            size, rate = _fastest(made, wishes.sizes(device, batch_sequences))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            lack = error
            continue
        except OutOfMemory as error:
            lack = error
            continue
        if best is None or rate > best[2]:
            best = (made, size, rate)
    if best is None:
        raise OutOfMemory("the model fits on no device of this machine") from lack
    return best


def micro_batches(batch_sequences: int) -> list[int]:
    """Sizes to try: powers of two below the batch, and the whole batch."""
    powers = itertools.takewhile(lambda size: size < batch_sequences, (1 << n for n in range(32)))
    return [*powers, batch_sequences]


def _fastest(stepper: Timed, sizes: list[int]) -> tuple[int, float]:
    """The best size and its tokens/s. Sizes that do not fit, or come after the time is up, are left
    out.
    """
    best_size, best_rate = 0, 0.0
    deadline = time.perf_counter() + PROBE_SECONDS_MAX
    for size in sizes:
        try:
            rate = _rate(stepper, size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            release_memory(stepper.device)
            break
        if rate > best_rate:
            best_size, best_rate = size, rate
        elif rate < WORSE * best_rate:
            break
        if time.perf_counter() > deadline:
            break
    if not best_size:
        raise OutOfMemory(f"{sizes[0]} sequences do not fit into the memory of {stepper.device}")
    return best_size, best_rate


def _rate(stepper: Timed, size: int) -> float:
    """Tokens/s of micro-batches of `size`, the first of which (compiling, allocating) is not
    timed.
    """
    stepper.time_micro_batch(size)
    best_s = math.inf  # the least disturbed run: others may be busy on this machine
    end = time.perf_counter() + PROBE_SECONDS_MIN
    while (begin := time.perf_counter()) < end:
        stepper.time_micro_batch(size)
        best_s = min(best_s, time.perf_counter() - begin)
    return size * stepper.context / best_s


def _bfloat16_products_gain(device: torch.device) -> bool:
    """Whether a bfloat16 matrix product is faster here at all: a millisecond's test before a long
    one.
    """
    return _product_seconds(device, torch.bfloat16) < _product_seconds(device, torch.float32)


def _product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    x = torch.ones((MATMUL_SIZE, MATMUL_SIZE), device=device, dtype=dtype)
    (x @ x).sum().item()
    start = time.perf_counter()
    (x @ x).sum().item()
    return time.perf_counter() - start
