"""The daemon's handle on its learner: one process at a time, its work, and the memory shared with
it.

Loads no torch. What the learner reports without being asked goes to one callback, in order: when
`copy_out` returns step t, the callback has already seen every Step up to t.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.fragments import FragmentTable
from dugnad.averaging.pages import PAGES
from dugnad.peer.learner.memory import Region
from dugnad.peer.learner.process import (
    STOP_SECONDS,
    Answer,
    AnswerType,
    Exited,
    LearnerEvent,
    LearnerGone,
    LearnerProcess,
    Question,
    answer,
)
from dugnad.peer.learner.protocol import (
    QUEUED_SEQUENCES_MAX,
    VECTORS_CAPTURED,
    Added,
    AddIn,
    Capture,
    Captured,
    Copied,
    CopyOut,
    DtypeChoice,
    Evaluate,
    Evaluated,
    Failed,
    Idle,
    InnerState,
    Pause,
    Piece,
    Prove,
    Proved,
    Ready,
    RegionFds,
    Resume,
    Sample,
    Sampled,
    SetCpuShare,
    SetMicroBatch,
    Start,
    Step,
    ToLearner,
    Work,
)
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig

__all__ = [
    "CopyResult",
    "Exited",
    "Failed",
    "Idle",
    "LearnerEvent",
    "LearnerGone",
    "LearnerPlan",
    "Piece",
    "Ready",
    "Step",
    "Trainer",
    "Work",
]

START_SECONDS_MAX: Final = 300.0
"""Loading torch from a slow card and probing a large model takes minutes; more means that it hangs.
"""
INLINE_COPY_MAX: Final = 1 << 18
"""Floats copied on the event loop, in under a millisecond; more go through a thread."""

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LearnerPlan:
    """All that a learner is started with. `tokens` is the assembled text; see protocol.Start."""

    config: ModelConfig
    table: FragmentTable
    optimiser: OptimiserSettings
    tokens: Path
    threads: int = 1
    device: str = "auto"
    dtype: DtypeChoice = "auto"
    micro_batch: int = 0
    micro_batch_max: int = 0
    """What its owner's memory has room for; 0: not known."""
    forward_only: bool = False
    cpu_share: float = 1.0
    gpu_share: float = 1.0
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] | None = None
    """GPUs that it may see, by number; None: all."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A fragment's parameters (our own copy) as they were after `step`; training stood still
    `stall_s`.
    """

    theta: Vector
    step: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a learner goes on: its small state, and Adam's moments as flat vectors in the table's
    order. None: the moments lie in the capture region already."""

    inner: InnerState
    moments: tuple[Vector, Vector] | None = None


@dataclass(frozen=True, slots=True)
class _Regions:
    out: Region
    inward: Region
    anchor: Region
    capture: Region

    def close(self) -> None:
        """Give their memory back."""
        for region in (self.out, self.inward, self.anchor, self.capture):
            region.close()


class _Turn:
    """Whose turn it is to write one part of shared memory: a lock that outlives a cancelled asker.

    A cancelled request still stands in the learner's queue and will still read or write the memory,
    so the next one waits for its answer, not only for the lock.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._pending: asyncio.Future[Answer] | None = None

    async def ours(self) -> None:
        """Inside `lock`: wait until the learner has answered the last request."""
        if self._pending is not None and not self._pending.done():
            await asyncio.wait([self._pending])

    async def ask(
        self, process: LearnerProcess, question: Question, kind: type[AnswerType]
    ) -> AnswerType:
        """Inside `lock`: send the question and wait for its answer."""
        self._pending = process.ask(question)
        return await answer(self._pending, kind)


class Trainer:
    """One learner process at a time. All methods belong to one event loop.

    `on_event` gets Step, Idle, Failed and, last of all, Exited; it must not block. Methods that ask
    the learner raise LearnerGone when there is none, or when it ends before it has answered.
    """

    def __init__(self, plan: LearnerPlan, on_event: Callable[[LearnerEvent], None]) -> None:
        self.plan = plan
        self.step = 0
        self.outstanding = 0
        self._on_event = on_event
        self._process: LearnerProcess | None = None
        self._regions: _Regions | None = None
        self._ticket = 0
        self._copying = [_Turn() for _ in plan.table.fragments]
        self._adding = [_Turn() for _ in plan.table.fragments]
        self._anchoring = _Turn()
        self._capturing = _Turn()
        self._whole = False
        """Whether the capture region holds a whole capture: a learner may die half-way."""

    @property
    def pid(self) -> int | None:
        """Process id of the learner; None when none runs."""
        return self._process.pid if self._process is not None else None

    async def start(self, theta: Vector, resume: Continuation | None = None) -> Ready:
        """Start the process with the flat parameters `theta`; returns what it chose by measurement.

        With `resume` it goes on with those moments; without, they are fresh. LearnerGone when it
        ends instead (its reason in the text), TimeoutError after START_SECONDS_MAX, OSError when
        memory or a process cannot be had. After a failure nothing is left running.
        """
        assert self.pid is None, "the learner runs already"
        if self._regions is None:
            self._regions = _made(self.plan.table.total)
        regions = self._regions
        _fill(regions.anchor.array, theta)
        if resume is not None and resume.moments is not None:
            self._whole = False
            _, *places = self._captured()
            for place, moment in zip(places, resume.moments, strict=True):
                _fill(place, moment)
        process = LearnerProcess(self._heard)
        self.outstanding = 0
        fds = RegionFds(regions.out.fd, regions.inward.fd, regions.anchor.fd, regions.capture.fd)
        with self.plan.tokens.open("rb") as tokens:
            inherited = (tokens.fileno(), fds.out, fds.inward, fds.anchor, fds.capture)
            plan = self.plan
            await process.launch(inherited, plan.threads, plan.cores, plan.gpus)
            self._process = process
            started = False
            try:
                inner = resume.inner if resume is not None else None
                asked = process.ask(self._start_message(tokens.fileno(), fds, inner))
                ready = await asyncio.wait_for(answer(asked, Ready), START_SECONDS_MAX)
                started = True
            finally:
                if not started:
                    await process.stop(0.0)
        return ready

    async def restart(
        self, theta: Vector, micro_batch: int = 0, resume: Continuation | None = None
    ) -> Ready:
        """End the process if it runs and start anew from `theta`; the queue is gone, and without
        `resume` Adam's moments are.

        Steps are counted on. `micro_batch` 0 probes again.
        """
        await self.stop()
        self.plan = replace(self.plan, micro_batch=micro_batch)
        return await self.start(theta, resume)

    def give(self, work: Work) -> None:
        """Queue sequences. OverflowError when more than QUEUED_SEQUENCES_MAX would be
        `outstanding`.

        `outstanding` counts the sequences given to this process and not yet reported in a Step.
        """
        if self.outstanding + len(work.sequences) > QUEUED_SEQUENCES_MAX:
            raise OverflowError(f"more than {QUEUED_SEQUENCES_MAX} sequences outstanding")
        self._send(work)
        self.outstanding += len(work.sequences)

    async def copy_out(self, fragment: int) -> CopyResult:
        """A fragment's parameters at the next step boundary."""
        turn = self._copying[fragment]
        async with turn.lock:
            await turn.ours()
            question = CopyOut(self._next_ticket(), fragment)
            copied = await turn.ask(self._running(), question, Copied)
            theta = await _copied(self._part(self._shared().out, fragment))
        return CopyResult(theta, copied.step, copied.seconds)

    async def add_in(self, fragment: int, delta: Vector) -> int:
        """Add `delta` to a fragment's parameters at the next step boundary; returns the step before
        it.

        The addition happens also when the caller is cancelled after it was sent.
        """
        turn = self._adding[fragment]
        async with turn.lock:
            await turn.ours()
            process = self._running()
            part = self._part(self._shared().inward, fragment)
            await _filled(part, delta)
            question = AddIn(self._next_ticket(), fragment)
            return (await turn.ask(process, question, Added)).step

    async def capture(self) -> Captured:
        """Copy the whole training state to shared memory at the next step boundary; the vectors
        are `captured`."""
        turn = self._capturing
        async with turn.lock:
            await turn.ours()
            self._shared()
            self._whole = False
            found = await turn.ask(self._running(), Capture(self._next_ticket()), Captured)
            self._whole = True
        return found

    def captured(self) -> tuple[Vector, Vector, Vector] | None:
        """Parameters and both moments of the last capture, flat in the table's order: shared
        memory, valid until the next `capture`. None when there is none, or half of one."""
        return self._captured() if self._whole else None

    async def evaluate(self, anchor: Vector | None, sequences: list[int]) -> float:
        """Mean loss in nats a token of the flat parameters `anchor` (None: those used last)."""
        async with self._anchoring.lock:
            process = await self._with_anchor(anchor)
            question = Evaluate(self._next_ticket(), sequences)
            return (await self._anchoring.ask(process, question, Evaluated)).loss

    async def sample(self, anchor: Vector | None, prompt: bytes, length: int, seed: int) -> bytes:
        """`length` bytes that the flat parameters `anchor` (None: those used last) write after
        `prompt`.
        """
        async with self._anchoring.lock:
            process = await self._with_anchor(anchor)
            question = Sample(self._next_ticket(), prompt, length, seed)
            return (await self._anchoring.ask(process, question, Sampled)).text

    async def prove(
        self, anchor: Vector, chains: Sequence[Sequence[int]], steps: int
    ) -> tuple[tuple[float, float], ...]:
        """Train each chain from the flat parameters `anchor` with fresh moments, beside the
        training; its last loss and gradient norm. None of them where memory does not suffice.
        """
        async with self._anchoring.lock:
            process = await self._with_anchor(anchor)
            question = Prove(self._next_ticket(), [list(chain) for chain in chains], steps)
            return (await self._anchoring.ask(process, question, Proved)).values

    def pause(self) -> None:
        """Train no further than the step under way; copying, adding and evaluating go on."""
        self._send(Pause())

    def resume(self) -> None:
        """Undo `pause`."""
        self._send(Resume())

    def set_micro_batch(self, sequences: int) -> None:
        """Use this many sequences at a time from the next step on."""
        self._send(SetMicroBatch(sequences))

    def shrink(self, sequences: int) -> None:
        """Use so many sequences at a time, from now on and for every later learner."""
        self.plan = replace(self.plan, micro_batch=sequences)
        self.set_micro_batch(sequences)

    def set_cpu_share(self, share: float) -> None:
        """Cap the learner at this share of its threads' time, above 0 and at most 1."""
        self._send(SetCpuShare(share))

    async def stop(self, timeout_s: float = STOP_SECONDS) -> Exited | None:
        """End the process: Stop, and SIGKILL after `timeout_s`. None when none was ever started."""
        return await self._process.stop(timeout_s) if self._process is not None else None

    def close(self) -> None:
        """Give the shared memory back: after `stop`, when no other learner will be started."""
        assert self.pid is None, "stop the learner first"
        if self._regions is not None:
            self._regions.close()
        self._regions, self._whole = None, False

    def _heard(self, event: LearnerEvent) -> None:
        if isinstance(event, Step):
            self.step = event.step
            self.outstanding -= sum(piece.stop - piece.start for piece in event.pieces)
        elif isinstance(event, Exited):
            self.outstanding = 0
        self._on_event(event)

    def _start_message(
        self, tokens_fd: int, regions: RegionFds, resume: InnerState | None
    ) -> Start:
        plan = self.plan
        return Start(
            config=plan.config,
            table=plan.table,
            optimiser=plan.optimiser,
            regions=regions,
            tokens_fd=tokens_fd,
            threads=plan.threads,
            device=plan.device,
            dtype=plan.dtype,
            micro_batch=plan.micro_batch,
            micro_batch_max=plan.micro_batch_max,
            forward_only=plan.forward_only,
            cpu_share=plan.cpu_share,
            gpu_share=plan.gpu_share,
            seed=plan.seed,
            first_step=self.step,
            resume=resume,
        )

    def _running(self) -> LearnerProcess:
        if self._process is None:
            raise LearnerGone("no learner was started")
        return self._process

    def _send(self, message: ToLearner) -> None:
        self._running().send(message)

    def _next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _shared(self) -> _Regions:
        if self._regions is None:
            raise LearnerGone("no learner was started")
        return self._regions

    def _captured(self) -> tuple[Vector, Vector, Vector]:
        theta, first, second = np.split(self._shared().capture.array, VECTORS_CAPTURED)
        return theta, first, second

    def _part(self, region: Region, fragment: int) -> Vector:
        offset = self.plan.table.offsets[fragment]
        return region.array[offset : offset + self.plan.table.sizes[fragment]]

    async def _with_anchor(self, anchor: Vector | None) -> LearnerProcess:
        """The process to ask, once the anchor region holds what the question is about."""
        await self._anchoring.ours()
        process = self._running()
        if anchor is not None:
            await _filled(self._shared().anchor.array, anchor)
        return process


def _made(count: int) -> _Regions:
    sizes = {"out": count, "in": count, "anchor": count, "capture": VECTORS_CAPTURED * count}
    return _Regions(*(Region.create(name, size) for name, size in sizes.items()))


def _fill(target: Vector, source: Vector) -> None:
    """Copy; ValueError unless shape and type are exactly those of shared memory."""
    if source.shape != target.shape or source.dtype != np.float32:
        raise ValueError(
            f"expected {target.size} float32, not {source.dtype} of shape {source.shape}"
        )
    np.copyto(target, source)


async def _filled(target: Vector, source: Vector) -> None:
    """As `_fill`; a thread that copies is waited for by who is cancelled, too: the next to have
    this memory writes to it."""
    if source.size <= INLINE_COPY_MAX:
        _fill(target, source)
        return
    job = asyncio.get_running_loop().run_in_executor(None, _fill, target, source)
    try:
        await asyncio.shield(job)
    finally:
        while not job.done():
            await asyncio.wait((job,))


async def _copied(source: Vector) -> Vector:
    """A copy that nobody can write to: the exchange keeps it as it is."""
    copy = PAGES.vector(source.size)
    if source.size > INLINE_COPY_MAX:
        await asyncio.to_thread(np.copyto, copy, source)
    else:
        np.copyto(copy, source)
    copy.flags.writeable = False
    return copy
