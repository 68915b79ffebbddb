"""Which names of a set are missing here: two peers compare ranges of hashes until they know.

One side asks, the other answers; both hold sets of 32-byte names (digests of commits). A range is
compared by the number of names in it and a fingerprint over them. Equal ranges are done, short
ones are listed, others are cut into sixteen. What is asked, kept and found is bounded, so that a
peer that answers nonsense costs a few messages. Nothing here judges what a name stands for.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

NAME_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 16
EDGE_BYTES: Final = 7
LAST: Final = (1 << 8 * EDGE_BYTES) - 1
"""Ranges are of the first 56 bits of a name (what the typed decoder can bound): names that share
them stand in one list."""
FAN_OUT: Final = 16
"""Parts of a range that differs: 100 000 names with a few differences take four rounds."""
LISTED_MAX: Final = 32
"""Names in one list. A list costs as much as two fingerprinted parts of sixteen."""
RANGES_MAX: Final = 64
"""Ranges in one request: the longest answer is then about 70 KB."""
ROUNDS_MAX: Final = 256
"""Requests of one reconciliation; what is not compared by then waits for the next one."""
MISSING_MAX: Final = 4096
"""Names found in one reconciliation: an hour of one merge a second."""
WAITING_MAX: Final = 4096
"""Ranges that wait to be compared."""

_Edge = Annotated[int, msgspec.Meta(ge=0, le=LAST)]


class Range(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The names whose first 56 bits are `first` to `last`, both included."""

    first: _Edge
    last: _Edge


class Summary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a set holds in a range. `names`, ascending, is empty where there are too many."""

    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=FINGERPRINT_BYTES)]
    names: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)], ...],
        msgspec.Meta(max_length=LISTED_MAX),
    ] = ()


WHOLE: Final = Range(0, LAST)


def within(names: Sequence[bytes], part: Range) -> Sequence[bytes]:
    """The names (ascending) that lie in a range."""
    low = part.first.to_bytes(EDGE_BYTES, "big")
    high = part.last.to_bytes(EDGE_BYTES, "big") + b"\xff" * (NAME_BYTES - EDGE_BYTES)
    return names[bisect_left(names, low) : bisect_right(names, high)]


def fingerprint(names: Sequence[bytes]) -> bytes:
    """Sixteen bytes of SHA-256 over the names, ascending."""
    return hashlib.sha256(b"".join(names)).digest()[:FINGERPRINT_BYTES]


def summarise(names: Sequence[bytes], part: Range) -> Summary:
    """What a set (ascending names) answers about a range."""
    held = within(names, part)
    listed = tuple(held) if len(held) <= LISTED_MAX else ()
    if part.first == part.last:
        listed = tuple(held[:LISTED_MAX])
    return Summary(len(held), fingerprint(held), listed)


class Reconciliation:
    """One side's search for the names that the other holds and it lacks.

    Repeat: send `request()`, give the summaries to `answer`; an empty request is the end. `missing`
    holds what was found, `complete` says whether every range was compared.
    """

    def __init__(self, own: Iterable[bytes]) -> None:
        self._own = sorted(set(own))
        self._waiting: deque[Range] = deque([WHOLE])
        self._asked: tuple[Range, ...] = ()
        self.missing: list[bytes] = []
        self.rounds = 0
        self.complete = True

    def request(self) -> tuple[Range, ...]:
        """The ranges to ask for next; none when all is compared or a bound is reached."""
        if self._waiting and (self.rounds >= ROUNDS_MAX or len(self.missing) >= MISSING_MAX):
            self.complete = False
            self._waiting.clear()
        count = min(RANGES_MAX, len(self._waiting))
        self._asked = tuple(self._waiting.popleft() for _ in range(count))
        self.rounds += bool(count)
        return self._asked

    def answer(self, summaries: Sequence[Summary]) -> str:
        """Take the summaries of the ranges asked for, in their order; why they cannot be, or ''.

        After a fault nothing of the answer is kept, and the search is over.
        """
        asked, self._asked = self._asked, ()
        fault = _fault(asked, summaries)
        if fault:
            self.complete = False
            self._waiting.clear()
            return fault
        for part, told in zip(asked, summaries, strict=True):
            self._compare(part, told)
        return ""

    def _compare(self, part: Range, told: Summary) -> None:
        own = within(self._own, part)
        if not told.count or (told.count, told.fingerprint) == (len(own), fingerprint(own)):
            return
        if told.names:
            lacking = set(told.names) - set(own)
            room = MISSING_MAX - len(self.missing)
            self.missing.extend(sorted(lacking)[:room])
            if len(lacking) > room or told.count > len(told.names):
                self.complete = False
            return
        for piece in _cut(part):
            if len(self._waiting) >= WAITING_MAX:
                self.complete = False
                return
            self._waiting.append(piece)


def _fault(asked: Sequence[Range], summaries: Sequence[Summary]) -> str:
    if len(asked) != len(summaries):
        return f"{len(summaries)} summaries of {len(asked)} ranges"
    for part, told in zip(asked, summaries, strict=True):
        names = told.names
        if list(names) != sorted(set(names)) or len(within(names, part)) != len(names):
            return "a list of names that is out of order or out of its range"
        if told.count <= LISTED_MAX and len(names) != told.count:
            return "a short range without the list of its names"
        if names and len(names) == told.count and fingerprint(names) != told.fingerprint:
            return "a list of names with another fingerprint"
        if not names and told.count and part.first == part.last:
            return "a range that cannot be cut without a list of its names"
    return ""


def _cut(part: Range) -> list[Range]:
    """A range in up to FAN_OUT parts of equal size, in order."""
    size = max(-(-(part.last - part.first + 1) // FAN_OUT), 1)
    starts = range(part.first, part.last + 1, size)
    return [Range(start, min(start + size - 1, part.last)) for start in starts]
