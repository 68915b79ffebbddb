"""The training context of one peer, and what of it still counts when it is taken up again.

A context is the learner's whole state after one step: parameters, Adam's moments, random generator,
place in the schedule, and beside it where the exchange stood at that moment (*marks*) and which
work is in the parameters and not handed in yet. It may be taken up by a new learner of the same
daemon, or by the next daemon.

What a fragment's exchange did since the capture decides (DESIGN.md sections 8.13 and 10):

* nothing was handed in: the captured progress ``ref - theta`` counts. Where the reference is still
  the captured one, the parameters are the captured ones bit for bit; where it moved (a merge was
  adopted), the progress is put on top of the new one.
* something was handed in: the captured progress went with it, and counts there, listed or returned.
  The parameters start at the reference; nothing is counted twice.

Moments, generator and schedule are taken up in either case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dugnad.averaging.fragments import FragmentTable
from dugnad.averaging.tree import Vector
from dugnad.dht.ids import PeerId, RunId, peer_text, run_text
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.learner.protocol import InnerState
from dugnad.peer.progress import STEPS_MAX, DoneStep
from dugnad.peer.savefile import Arrays, SaveFault, require
from dugnad.peer.trainer import Continuation

FORMAT: Final = "dugnad context 1"
LOG_BYTES_MAX: Final = 16 << 20
"""STEPS_MAX steps with some pieces each, 20 to 40 bytes a piece."""
ROOT_BYTES: Final = 32
_ARRAYS: Final = 4
_OVERHEAD_BYTES: Final = LOG_BYTES_MAX + (2 << 20)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose contexts are taken up: those of this run (which names model, data and optimiser) and of
    this identity, whose numbers they speak of."""

    run: RunId
    peer: PeerId
    table: FragmentTable


@dataclass(frozen=True, slots=True)
class Mark:
    """Where one fragment's exchange stood: the newest number used for a contribution, how many were
    made (drafts, too, which share a number), and the root of the anchors that were adopted."""

    seq: int
    made: int
    root: bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Steps that some fragment has not handed in, and the step up to which each fragment has."""

    steps: tuple[DoneStep, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A captured state. Vectors are flat float32 in the fragment table's order."""

    step: int
    at_ms: int
    inner: InnerState
    marks: tuple[Mark, ...]
    work: Work
    refs: tuple[Vector, ...]
    theta: Vector
    moments: tuple[Vector, Vector]


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """Where a learner is to begin: its parameters, and for which fragments captured progress is in
    them."""

    theta: Vector
    counts: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a new learner begins with: a context and how to go on from it, if there is one, and
    where the exchange stands: each fragment's reference and mark."""

    context: Context | None
    going_on: Continuation | None
    refs: tuple[Vector, ...]
    marks: tuple[Mark, ...]


def begin(
    context: Context, table: FragmentTable, refs: Sequence[Vector], marks: Sequence[Mark]
) -> Beginning:
    """What of ``context`` counts where the fragments' references are ``refs`` now, and the exchange
    stands at ``marks``."""
    theta = np.concatenate(list(refs))
    counts = []
    for p, (ref, now, mark) in enumerate(zip(refs, marks, context.marks, strict=True)):
        counts.append((now.seq, now.made) == (mark.seq, mark.made))
        if not counts[-1]:
            continue
        part = slice(table.offsets[p], table.offsets[p] + table.sizes[p])
        before, captured = context.refs[p], context.theta[part]
        if ref is before or np.array_equal(ref, before):
            theta[part] = captured
        else:
            theta[part] = ref - (before - captured)
    return Beginning(theta, tuple(counts))


def file_bytes_max(table: FragmentTable) -> int:
    """The most that a context's file can have."""
    return _ARRAYS * table.total * 4 + _OVERHEAD_BYTES


def packed(context: Context, owner: Owner) -> tuple[dict[str, str], Arrays]:
    """Metadata and arrays of a context's file; no vector is copied but the references."""
    metadata = {
        "format": FORMAT,
        "run": run_text(owner.run),
        "peer": peer_text(owner.peer),
        "step": str(context.step),
        "at_ms": str(context.at_ms),
        "inner": msgspec.json.encode(context.inner).decode(),
    }
    log = encode((context.marks, context.work))
    arrays: dict[str, npt.NDArray[Any]] = {
        "theta": context.theta,
        "ref": np.concatenate(context.refs),
        "first_moment": context.moments[0],
        "second_moment": context.moments[1],
        "log": np.frombuffer(log, np.uint8),
    }
    return metadata, arrays


def check_owner(metadata: Mapping[str, str], owner: Owner, format_: str) -> None:
    """Raise :class:`SaveFault` unless a file is of this format, run and identity."""
    if metadata.get("format") != format_:
        raise SaveFault(f"it is {metadata.get('format', 'no')[:40]!r}, not {format_!r}")
    if metadata.get("run") != run_text(owner.run):
        raise SaveFault("it belongs to another run")
    if metadata.get("peer") != peer_text(owner.peer):
        raise SaveFault("it was made by another identity")


def unpacked(metadata: Mapping[str, str], arrays: Arrays, owner: Owner) -> Context:
    """The context in a file; raises :class:`SaveFault` with the reason for which it is refused."""
    check_owner(metadata, owner, FORMAT)
    table = owner.table
    require(arrays, ("theta", "ref", "first_moment", "second_moment"), table.total)
    try:
        inner = msgspec.json.decode(metadata["inner"], type=InnerState)
        step, at_ms = int(metadata["step"]), int(metadata["at_ms"])
        log = arrays["log"].tobytes()
        marks, work = decode(log, tuple[tuple[Mark, ...], Work], LOG_BYTES_MAX)
    except (KeyError, ValueError, RecordError) as error:  # msgspec's errors are ValueErrors
        raise SaveFault(f"it does not say where it stood: {error}") from error
    _check_log(step, marks, work, len(table.fragments))
    bounds = zip(table.offsets, table.sizes, strict=True)
    return Context(
        step=step,
        at_ms=at_ms,
        inner=inner,
        marks=marks,
        work=work,
        refs=tuple(arrays["ref"][start : start + size] for start, size in bounds),
        theta=arrays["theta"],
        moments=(arrays["first_moment"], arrays["second_moment"]),
    )


def _check_log(step: int, marks: tuple[Mark, ...], work: Work, fragments: int) -> None:
    if len(marks) != fragments or len(work.places) != fragments:
        raise SaveFault(f"it does not speak of {fragments} fragments")
    if any(len(mark.root) != ROOT_BYTES or min(mark.seq, mark.made) < 0 for mark in marks):
        raise SaveFault("a mark of it is malformed")
    numbers = [one.step for one in work.steps]
    if len(numbers) > STEPS_MAX or numbers != sorted(set(numbers)):
        raise SaveFault("its steps do not rise")
    if step < 0 or any(not 0 <= number <= step for number in (*numbers, *work.places)):
        raise SaveFault("it names a step beyond its own")
