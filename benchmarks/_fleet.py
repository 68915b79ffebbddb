"""N peer processes that average together, commanded line by line (JSON) over their pipes.

Both ends: :class:`Fleet` for the measuring process, :func:`serve` for a peer. What a peer does
between its commands is a :class:`Peer`. One round: everybody gets a fresh vector, then a moment to
begin is named (the monotonic clock is the machine's), and each says when it was done. The round's
time runs from that moment to the last peer's end; CPU is that of all processes of all peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import psutil
from _gigabit import Lan

SAMPLES: Final = 4096
"""Elements compared after each round, spread over all: also a part of 64 KiB lost shows."""
SPREAD: Final = 0.01
"""Standard deviation of every element."""
WRONG_BEYOND: Final = 0.25 * SPREAD
"""An element this far from the mean of all was not averaged: 8 bits err by a tenth of it."""
WARM_UP: Final = 5
"""Rounds that do not count. Ours keeps the rounding of its last five merges."""
WARM_UP_OTHERS: Final = 2
"""Of those that keep nothing from round to round; each costs hivemind 3 s of matchmaking."""
HEAD_START_S: Final = 0.1
"""From the command to begin until all begin."""
ROUND_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 10.0


class Peer(Protocol):
    """One way to average, as one peer does it."""

    async def start(self) -> dict[str, Any]:
        """Get up; what the others must know."""
        ...

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Connect; ``others`` are all peers' words by rank, one's own among them."""
        ...

    async def prepare(self, number: int) -> None:
        """A fresh vector for round ``number``, and all that comes before averaging."""
        ...

    async def run(self) -> None:
        """Average, until the result is here."""
        ...

    def sample(self, before: bool) -> list[float]:
        """Elements of one's own vector, or of the result."""
        ...

    async def close(self) -> None:
        """Stop everything."""
        ...


def vector_of(
    rank: int, number: int, count: int, out: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """What peer ``rank`` has to average in round ``number``, in ``out`` if given."""
    rng = np.random.default_rng([rank, number])
    vector = rng.standard_normal(count, np.float32, out)
    return np.multiply(vector, np.float32(SPREAD), out=vector)


def sampled(vector: npt.NDArray[np.float32]) -> list[float]:
    """The elements that are compared."""
    found: list[float] = vector[sampled_at(vector.size)].tolist()
    return found


def sampled_at(size: int) -> npt.NDArray[np.int64]:
    """Where they are, rising."""
    return np.linspace(0, size - 1, min(SAMPLES, size)).astype(np.int64)


async def serve(peer: Peer) -> None:
    """Do what the measuring process says until it says no more."""
    loop = asyncio.get_running_loop()

    async def command() -> dict[str, Any]:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        return dict(json.loads(line)) if line else {"do": "end"}

    try:
        await _say(await peer.start())
        await peer.meet((await command())["others"])
        await _say({})
        while (heard := await command())["do"] == "round":
            await peer.prepare(heard["number"])
            await _say({"sample": peer.sample(before=True)})
            begin = (await command())["at"]
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            await peer.run()
            await _say({"end": time.monotonic()})
            await command()  # so that no sample is taken while others still average
            await _say({"sample": peer.sample(before=False)})
    finally:
        await peer.close()


async def _say(what: dict[str, Any]) -> None:
    """In a thread: a pipe holds 64 KiB, and others still draw from this peer meanwhile."""
    await asyncio.to_thread(print, json.dumps(what), flush=True)


@dataclass(frozen=True, slots=True)
class Round:
    """One round as measured. ``wrong`` is the share of elements that are not the mean of all."""

    seconds: float
    cpu_seconds: float
    helper_cpu_seconds: float
    wrong: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over the rounds; memory is the largest peer's, all of its processes.

    ``helper_cpu_seconds`` is the share of the processes that peers started (p2pd and others).
    ``peak_mb`` sums the peaks of its processes, in which what forked processes share counts
    several times; ``proportional_mb`` shares that out, after the last round.
    """

    seconds: float
    seconds_low: float
    seconds_high: float
    cpu_seconds: float
    helper_cpu_seconds: float
    wrong: float
    peak_mb: float
    proportional_mb: float


class Fleet:
    """``count`` processes of one command, each told its rank by an argument at the end."""

    def __init__(self, command: list[str], count: int, log: Path, lan: Lan | None = None) -> None:
        """In the namespaces of `lan`, if one is given."""
        self._log = log.open("ab")
        # With threads of its own in each of our threads, numpy's dot made a round 5 times as long.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [*(lan.enter(rank) if lan else ()), *command, f"--rank={rank}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                text=True,
                start_new_session=True,
            )
            for rank in range(count)
        ]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        """End all peers and whatever they started: some leave their children behind."""
        trees = [one for process in self._processes for one in _tree(process.pid)]
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
            _kill_all(process.pid)
            process.wait()
        for one in trees:  # psutil knows a process by its start time, too: never a stranger
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._log.close()

    def measure(self, rounds: int, warm_up: int = WARM_UP, *, sparse: bool = False) -> Measured:
        """Let all meet and average; the medians of ``rounds`` after ``warm_up`` that do not count.

        Where hand-ins are ``sparse`` by design only that all have the same result is looked at.
        RuntimeError when a peer ends early; its words are in the log.
        """
        others = self._hear_all()
        self._tell({"others": others})
        self._hear_all()
        found = [self._round(number, sparse) for number in range(warm_up + rounds)][warm_up:]
        seconds = [one.seconds for one in found]
        memory = [_memory(process.pid) for process in self._processes]
        return Measured(
            seconds=statistics.median(seconds),
            seconds_low=min(seconds),
            seconds_high=max(seconds),
            cpu_seconds=statistics.median(one.cpu_seconds for one in found),
            helper_cpu_seconds=statistics.median(one.helper_cpu_seconds for one in found),
            wrong=max(one.wrong for one in found),
            peak_mb=max(peak for peak, _ in memory),
            proportional_mb=max(proportional for _, proportional in memory),
        )

    def _round(self, number: int, sparse: bool) -> Round:
        self._tell({"do": "round", "number": number})
        mean = np.mean([heard["sample"] for heard in self._hear_all()], axis=0)
        before = self._cpu()
        begin = time.monotonic() + HEAD_START_S
        self._tell({"at": begin})
        heard = self._hear_all()
        used = [after - earlier for after, earlier in zip(self._cpu(), before, strict=True)]
        self._tell({})
        results = np.array([one["sample"] for one in self._hear_all()])
        errors = np.abs(results - (results[0] if sparse else mean))
        wrong = float(np.mean(errors > (0.0 if sparse else WRONG_BEYOND)))
        return Round(max(one["end"] for one in heard) - begin, sum(used), used[1], wrong)

    def _tell(self, what: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()

    def _hear_all(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + ROUND_TIMEOUT_S
        return [self._hear(process, deadline) for process in self._processes]

    def _hear(self, process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
        assert process.stdout is not None
        watchdog = _Watchdog(process, deadline)
        with watchdog:
            line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended or fell silent; see {self._log.name}")
        return dict(json.loads(line))

    def _cpu(self) -> tuple[float, float]:
        """Seconds of the peers themselves and of what they started."""
        found = [_cpu(process.pid) for process in self._processes]
        return sum(own for own, _ in found), sum(helpers for _, helpers in found)


class _Watchdog:
    """Kills a peer that says nothing in time, which ends the wait for its line.

    With all that it started: they hold the other end of the pipe, too.
    """

    def __init__(self, process: subprocess.Popen[str], deadline: float) -> None:
        seconds = max(0.0, deadline - time.monotonic())
        self._timer = threading.Timer(seconds, _kill_all, (process.pid,))

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _kill_all(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cpu(pid: int) -> tuple[float, float]:
    own = helpers = 0.0
    for one in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            if one.pid == pid:
                own += times.user + times.system
            else:
                helpers += times.user + times.system
    return own, helpers


def _memory(pid: int) -> tuple[float, float]:
    """Peak and proportional megabytes of a process and all that it started."""
    peak = proportional = 0
    for one in _tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            status = Path(f"/proc/{one.pid}/status").read_text()
            found = [line for line in status.splitlines() if line.startswith("VmHWM:")]
            peak += int(found[0].split()[1]) * 1024 if found else 0
            proportional += one.memory_full_info().pss
    return peak / 1e6, proportional / 1e6
