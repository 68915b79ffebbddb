"""Keeps the training context: captures it now and then, writes it in the background, and finds it
again after a death of the learner or of the daemon.

A capture happens while no fragment moves progress (`Averager.still`), so that parameters, marks and
work are those of one moment. It is copied into shared memory at a step boundary, which is all that
training waits for; the file is written from there by a thread. While it is written nothing is
captured, so a death at any moment leaves a whole one: in memory, or on the disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from dugnad.averaging.formats import UnitPiece
from dugnad.peer import clock, context, fragmentsave
from dugnad.peer.context import Context, Found, Mark, Owner, Work
from dugnad.peer.exchangeports import LearnerAway
from dugnad.peer.limits import Limits, keep_free
from dugnad.peer.readings import folder_bytes
from dugnad.peer.savefile import Arrays, SaveFault, SaveFolder, read_tensors
from dugnad.peer.store import StoreError
from dugnad.peer.trainer import Continuation

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

STALL_SHARE: Final = 0.005
"""Captures may take this share of the training time: half of what is promised."""
WRITE_BYTES_PER_S: Final = 2e6
"""Mean rate at which contexts may be written: 63 TB a year, a tenth to a fifth of what a usual
drive is sold to endure. Larger models are captured less often."""
T = TypeVar("T")

DRAFT_BYTES: Final = 8
"""Bytes a parameter of a fragment's save: the residual, and what is under way."""
LOOK_S: Final = 0.5
CAPTURE_S: Final = 120.0
"""For a learner to come to the end of a step: one that takes longer hangs, and the exchange must
not wait for it."""
WALK_S: Final = 60.0
"""The data folder is measured this often, and before a write it is only looked up."""
FIRST_SHARE: Final = 0.5
"""The first capture comes after this share of the usual interval."""


class ContextKeeper:
    """One daemon's context. Belongs to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.every_s = daemon.settings.context_s
        place = daemon.home.run(daemon.run_id).context
        self.owner = Owner(daemon.run_id, daemon.identity.peer, daemon.manifest.table)
        self.folder = SaveFolder(place, "learner")
        self.fragments = [
            SaveFolder(place, f"fragment-{p:04d}")
            for p in range(len(daemon.manifest.table.fragments))
        ]
        self.captured_at = clock.now()
        self.stall_s = 0.0
        """How long training stood still for the last capture."""
        self.written = 0
        """Contexts written by this daemon."""
        self._in_memory: Context | None = None
        self._bytes = 0
        self._refused = ""
        self._used: tuple[float, int] = (-WALK_S, 0)

    # -- capturing -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Capture and write when due, until cancelled."""
        if not self.every_s:
            return
        self.captured_at = clock.now() - (1.0 - FIRST_SHARE) * self.every_s
        while True:
            await asyncio.sleep(LOOK_S)
            if clock.now() - self.captured_at >= self.interval() and self._fresh():
                await self.once()

    def interval(self) -> float:
        """Seconds between two captures."""
        return interval(self.every_s, self.stall_s, self._bytes)

    def _fresh(self) -> bool:
        """Whether there was a step since the last capture."""
        training, known = self.daemon.training, self._in_memory
        if training.ready is None or training.trainer.step == 0:
            return False
        return known is None or training.trainer.step != known.step

    async def once(self) -> bool:
        """Capture, and write what was captured; whether both went well."""
        self.captured_at = clock.now()
        try:
            async with asyncio.timeout(CAPTURE_S):
                captured = await self._capture()
        except (LearnerAway, TimeoutError, asyncio.QueueFull):
            return False
        metadata, arrays = context.packed(captured, self.owner)
        self._bytes = sum(array.nbytes for array in arrays.values())
        if await self._write(self.folder, metadata, arrays):
            self.written += 1
            return True
        return False

    async def _capture(self) -> Context:
        daemon = self.daemon
        training, log = daemon.training, daemon.training.log
        async with daemon.averager.still():
            marks = await self._marks()
            answer = await training.capture()
            vectors = training.trainer.captured()
            if vectors is None:
                raise LearnerAway
            shells = daemon.averager.fragments
            theta, *moments = vectors
            captured = Context(
                step=answer.step,
                at_ms=clock.wall_ms(),
                inner=answer.inner,
                marks=marks,
                work=Work(
                    tuple(one for one in log.steps if one.step <= answer.step), tuple(log.place)
                ),
                refs=tuple(shell.worker.buffers.ref for shell in shells),
                theta=theta,
                moments=(moments[0], moments[1]),
            )
        self.stall_s = answer.seconds
        self._in_memory = captured
        return captured

    async def _seqs(self) -> tuple[int, ...]:
        fragments = range(len(self.fragments))
        return await self.daemon.store.call(
            lambda store: tuple(store.last_seq(p) for p in fragments)
        )

    async def _marks(self) -> tuple[Mark, ...]:
        """Where the exchange stands, while nothing moves."""
        buffers = [shell.worker.buffers for shell in self.daemon.averager.fragments]
        return tuple(
            Mark(seq, one.made, one.anchor.theta_root)
            for seq, one in zip(await self._seqs(), buffers, strict=True)
        )

    # -- writing -------------------------------------------------------------------------------

    async def handed_in(self, p: int) -> bool:
        """Fragment ``p`` has made a contribution or a draft, which is not sent yet; whether it may
        be: what was written of a draft once must not be older than what a neighbour has."""
        if not self.every_s:
            return True
        shell, log = self.daemon.averager.fragments[p], self.daemon.training.log
        worker = shell.worker
        if shell.draft is not None and not drafts_written(
            self.owner.table.total, self.daemon.settings.buddy_s
        ):
            return True
        return await self._write(
            self.fragments[p], *fragmentsave.packed(self.owner, p, worker, log)
        )

    async def _write(self, folder: SaveFolder, metadata: Mapping[str, str], arrays: Arrays) -> bool:
        """Write where the owner's limits leave room; why not is said once."""
        size = sum(array.nbytes for array in arrays.values())
        reason = await asyncio.to_thread(self._no_room, size)
        if not reason:
            try:
                await asyncio.to_thread(folder.save, metadata, arrays)
            except StoreError as error:
                reason = f"{error.reason}; {error.fix}"
        if reason and reason != self._refused:
            self.daemon.note("disk", f"the training context is not written: {reason}")
        self._refused = reason
        return not reason

    def _no_room(self, size: int) -> str:
        """Why nothing more may be written, or ''. In a thread."""
        root, now = self.daemon.home.root, clock.now()
        if now - self._used[0] >= WALK_S:
            self._used = (now, folder_bytes(root))
        disk = shutil.disk_usage(root)
        limits = self.daemon.steward.limits
        return no_room(limits, size, self._used[1], disk.free, disk.total)

    # -- finding it again ----------------------------------------------------------------------

    async def restore(self) -> None:
        """Before the exchange starts: take up what each fragment has under way."""
        if not self.every_s:
            return
        daemon, seqs = self.daemon, await self._seqs()
        pieces: list[UnitPiece] = []
        for p, shell in enumerate(daemon.averager.fragments):
            saved = await self._newest(self.fragments[p], self._fragment_reader(p))
            if saved is None:
                continue
            try:
                found, lost = fragmentsave.take_up(
                    saved, shell.worker, shell.core.contributor, daemon.training.log, seqs[p]
                )
            except SaveFault as fault:
                daemon.note("given up", f"fragment {p}: what was under way: {fault}")
                continue
            pieces += found
            if lost:
                daemon.note("given up", f"fragment {p}: {lost}")
        daemon.training.trained_before(pieces)

    async def find(self) -> Found:
        """While nothing moves: what a new learner begins with."""
        daemon = self.daemon
        known, going_on = self._in_memory, None
        if known is not None and daemon.training.trainer.captured() is not None:
            going_on = Continuation(known.inner)
        elif self.every_s:
            self._in_memory = None
            known = await self._newest(self.folder, self._read_context)
            if known is not None:
                going_on = Continuation(known.inner, known.moments)
        marks = await self._marks()
        if known is not None:
            self._take_refs(known, marks)
        refs = tuple(shell.worker.buffers.ref for shell in daemon.averager.fragments)
        return Found(known, going_on, refs, marks)

    def _take_refs(self, known: Context, marks: tuple[Mark, ...]) -> None:
        """Where a fragment stands just as it did, its reference is the captured one."""
        for p, shell in enumerate(self.daemon.averager.fragments):
            buffers = shell.worker.buffers
            if known.marks[p] == marks[p] and buffers.ref is not known.refs[p]:
                buffers.ref = known.refs[p].copy()

    def _read_context(self, path: Path) -> Context:
        limit = context.file_bytes_max(self.owner.table)
        return context.unpacked(*read_tensors(path, limit), self.owner)

    def _fragment_reader(self, p: int) -> Callable[[Path], fragmentsave.Saved]:
        limit = fragmentsave.file_bytes_max(self.owner.table.sizes[p])
        return lambda path: fragmentsave.unpacked(*read_tensors(path, limit), self.owner, p)

    async def _newest(self, folder: SaveFolder, read: Callable[[Path], T]) -> T | None:
        """The newest file of a folder that holds what it should; what is wrong with newer ones is
        said."""
        found, faults = await asyncio.to_thread(newest, folder, read)
        for fault in faults:
            self.daemon.note("context", fault)
        return found


def interval(every_s: float, stall_s: float, size: int) -> float:
    """Seconds between two captures: `every_s`, or more where a capture stops training for
    `stall_s`, or its `size` bytes would wear out the disk."""
    return max(every_s, stall_s / STALL_SHARE, size / WRITE_BYTES_PER_S)


def newest(folder: SaveFolder, read: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    """The newest generation that ``read`` accepts (it raises SaveFault), and what was wrong with
    those passed over. Removes what an interrupted save left."""
    faults: list[str] = []
    try:
        folder.sweep()
        files = folder.files()
    except OSError as error:
        return None, [f"{folder.folder} cannot be read: {error.strerror}"]
    for _, path in reversed(files):
        try:
            return read(path), faults
        except SaveFault as fault:
            faults.append(f"{path.name} is skipped: {fault}")
    return None, faults


def drafts_written(parameters: int, every_s: float) -> bool:
    """Whether drafts of a model, one each `every_s`, are written: all of them or none.

    What was not written and is listed through a neighbour is not taken up again, so both are safe;
    but written drafts are exact even if no neighbour had them. Larger models would wear out the
    disk.
    """
    return DRAFT_BYTES * parameters <= WRITE_BYTES_PER_S * every_s


def no_room(limits: Limits, size: int, used: int, free: int, total: int) -> str:
    """Why `size` bytes more may not be written beside the `used` ones, on a disk with `free` of
    `total` bytes; or ''."""
    cap = limits.disk_gb * 1e9
    if cap and used + size > cap:
        return f"disk_gb = {limits.disk_gb:g}: {used / 1e9:,.1f} GB are used"
    keep = keep_free(limits, total)
    if free - size < keep:
        return f"{free / 1e9:,.1f} GB are free, {keep / 1e9:,.1f} GB are to stay free"
    return ""
