"""What one fragment's exchange keeps between its hand-ins, on disk: the residual, and the own
contributions that may still be listed.

Written after a contribution is made and before it is sent, so that a daemon that dies at any moment
finds every contribution again that somebody else may have: it is settled like always, by the chain
of the head. Where the newest number used is not the newest saved (a full disk), what was handed in
is somebody else's to list, and the residual, which went with it, is given up and said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dugnad.averaging.buffers import RETAINED_MAX, BuffersError, FragmentBuffers
from dugnad.averaging.contributor import Contributor, Own
from dugnad.averaging.formats import Contribution, UnitPiece
from dugnad.averaging.worker import FragmentWorker, Kept
from dugnad.dht.ids import peer_text, run_text
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.context import Owner, check_owner
from dugnad.peer.progress import ProgressLog, Sent
from dugnad.peer.savefile import Arrays, SaveFault

FORMAT: Final = "dugnad fragment 1"
RECORDS_BYTES_MAX: Final = 32 << 20
"""RETAINED_MAX contributions with as many pieces as a message allows take half of it."""
_FLOATS: Final = 2
_ANCHOR: Final = ("theta", "momentum", "ref")
"""Arrays of the buffers that lie elsewhere: anchors in their own files, the reference in the
context."""


class OwnRow(msgspec.Struct, frozen=True, array_like=True):
    """One own contribution and the work behind it."""

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]
    steps: int
    back: bool
    carried: bool


class Records(msgspec.Struct, frozen=True, array_like=True):
    """The part of a fragment's save that is no vector."""

    rows: tuple[OwnRow, ...]
    waiting_steps: int
    waiting: tuple[UnitPiece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A fragment's save as read."""

    seq: int
    made: int
    records: Records
    arrays: dict[str, npt.NDArray[Any]]


def file_bytes_max(size: int) -> int:
    """The most that the save of a fragment of `size` parameters can have."""
    return 4 * size * (_FLOATS + RETAINED_MAX) + RECORDS_BYTES_MAX + (2 << 20)


def packed(
    owner: Owner, p: int, worker: FragmentWorker, log: ProgressLog
) -> tuple[dict[str, str], Arrays]:
    """Metadata and arrays of fragment ``p``'s save. In the learner lane, right after a hand-in:
    the vectors are views."""
    buffers = worker.buffers
    metadata = {
        "format": FORMAT,
        "run": run_text(owner.run),
        "peer": peer_text(owner.peer),
        "fragment": str(p),
        "seq": str(buffers.last_seq),
        "made": str(buffers.made),
    }
    rows = []
    for seq in buffers.retained:
        kept, sent = worker.inbox.get((owner.peer, seq)), log.sent[p].get(seq)
        if kept is not None and sent is not None:
            row = OwnRow(kept.contribution, sent.pieces, sent.steps, sent.back, sent.carried)
            rows.append(row)
    records = encode(Records(tuple(rows), *log.waiting[p]))
    arrays = {key: one for key, one in buffers.export().items() if key not in _ANCHOR}
    return metadata, {**arrays, "records": np.frombuffer(records, np.uint8)}


def unpacked(metadata: dict[str, str], arrays: Arrays, owner: Owner, p: int) -> Saved:
    """Fragment ``p``'s save in a file; raises :class:`SaveFault` with the reason."""
    check_owner(metadata, owner, FORMAT)
    if metadata.get("fragment") != str(p):
        raise SaveFault("it is of another fragment")
    try:
        seq, made = int(metadata["seq"]), int(metadata["made"])
        records = decode(arrays["records"].tobytes(), Records, RECORDS_BYTES_MAX)
    except (KeyError, ValueError, RecordError) as error:
        raise SaveFault(f"it does not say what it holds: {error}") from error
    for row in records.rows:
        c = row.contribution
        if c.peer != owner.peer or c.fragment != p or c.seq > seq:
            raise SaveFault("a contribution in it is not this peer's")
    return Saved(seq, made, records, {key: one for key, one in arrays.items() if key != "records"})


def take_up(
    saved: Saved, worker: FragmentWorker, contributor: Contributor, log: ProgressLog, newest: int
) -> tuple[tuple[UnitPiece, ...], str]:
    """Put a save into a fragment that stands at its anchors, before anything happens there.

    ``newest`` is the newest number used for a contribution. Returns the pieces of units that need
    no training any more, and what had to be given up, or ''. Raises :class:`SaveFault`; then
    nothing has changed.
    """
    anchor, p = worker.buffers.anchor, worker.rules.fragment
    whole = {"theta": anchor.theta, "momentum": anchor.momentum, "ref": anchor.theta}
    try:
        buffers = FragmentBuffers.restore({**saved.arrays, **whole})
    except BuffersError as fault:
        raise SaveFault(fault.reason) from fault
    lost = ""
    if saved.seq != newest:
        buffers.residual[:] = 0.0
        lost = f"its residual went with contribution {newest}, which was not written down"
    buffers.anchor, buffers.ref, buffers.made = anchor, anchor.theta, saved.made
    worker.buffers = buffers
    records, pieces = saved.records, list(saved.records.waiting)
    log.waiting[p] = (records.waiting_steps, records.waiting)
    for row in records.rows:
        c = row.contribution
        kept = buffers.retained.get(c.seq)
        if kept is None:
            continue
        worker.inbox[(worker.me, c.seq)] = Kept(c, row.pieces, kept.payload)
        log.sent[p][c.seq] = Sent(row.steps, row.pieces, row.back, row.carried)
        contributor.adopt(Own(c, row.pieces, share=kept.returned))
        pieces += row.pieces
    buffers.retained = {s: k for s, k in buffers.retained.items() if s in contributor.own}
    return tuple(pieces), lost
