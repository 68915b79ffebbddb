"""The base of the credit fold as a record: what is kept on disk, and what a newcomer may be given.

It is bounded: epochs covered in full are a number, old days are dropped, and a fragment keeps at
most PEERS_MAX peers apart. Its root names it, so that members can be asked which one they hold.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from dugnad.averaging.board import FORMULA, RECENT_DAYS, Tally
from dugnad.averaging.coverage import UnitMask
from dugnad.averaging.formats import DIGEST_BYTES
from dugnad.dht.ids import KEY_BYTES, PeerId, RunId
from dugnad.dht.records import decode, encode, framed

PEERS_MAX: Final = 16_384
"""Peers that one fragment keeps apart in its base; later ones share a row. A peer costs about 100
bytes here and a merged contribution in the swarm."""
FOLD_BYTES_MAX: Final = 64 << 20
"""An encoded state: a hundred fragments of a few thousand peers, with masks of open epochs."""

EPOCHS_MAX: Final = 1 << 32
"""Epochs that a state may call finished: one a second for a century."""

_DOMAIN: Final = "fold/1"


class PeerTally(msgspec.Struct, frozen=True, array_like=True):
    """What a peer has earned in one fragment; ``days`` holds (day of commit time, tokens)."""

    peer: bytes
    tokens: int
    twice: int
    contributions: int
    units: int
    first_ms: int
    last_ms: int
    days: tuple[tuple[int, int], ...]
    claimed: int = 0
    span_ms: int = 0

    @classmethod
    def of(cls, peer: PeerId, tally: Tally) -> PeerTally:
        """The record of a tally."""
        return cls(
            peer,
            tally.tokens,
            tally.twice,
            tally.contributions,
            tally.units,
            tally.first_ms,
            tally.last_ms,
            tuple(sorted(tally.days.items())),
            tally.claimed,
            tally.span_ms,
        )

    def tally(self) -> Tally:
        """The tally of a record."""
        return Tally(
            tokens=self.tokens,
            twice=self.twice,
            contributions=self.contributions,
            units=self.units,
            first_ms=self.first_ms,
            last_ms=self.last_ms,
            claimed=self.claimed,
            span_ms=self.span_ms,
            days=dict(self.days),
        )


class FragmentState(msgspec.Struct, frozen=True, array_like=True):
    """One fragment's lineage, folded up to the commit ``digest`` (empty at version 0).

    ``waiting_tokens`` are those of ``waiting_home`` that only its own commits confirm so far.
    """

    fragment: int
    version: int
    digest: bytes
    time_ms: int
    receipts: int
    refused: int
    done: int
    masks: tuple[UnitMask, ...]
    tallies: tuple[PeerTally, ...]
    waiting_home: bytes
    waiting_tokens: int
    waiting_days: tuple[tuple[int, int], ...]


class FoldState(msgspec.Struct, frozen=True, array_like=True):
    """The base of the fold: one row per fragment, ascending."""

    formula: str
    run: bytes
    fragments: tuple[FragmentState, ...]


def fold_root(state: FoldState) -> bytes:
    """The name of a state: SHA-256 over its framed encoding."""
    return hashlib.sha256(framed(_DOMAIN, RunId(state.run), encode(state))).digest()


def decode_state(data: bytes) -> FoldState:
    """A state from foreign bytes; RecordError when they are none. Ranges: :func:`state_fault`."""
    return decode(data, FoldState, FOLD_BYTES_MAX)


def state_fault(state: FoldState, run: RunId, fragments: int) -> str:
    """Why a state is not one of this run (sizes and ranges, not truth), or ''."""
    if state.formula != FORMULA:
        return f"a state by another formula, this version computes {FORMULA}"
    if state.run != run:
        return "a state of another run"
    if [row.fragment for row in state.fragments] != list(range(fragments)):
        return "a state without one row for each fragment"
    faults = (_row_fault(row) for row in state.fragments)
    return next((fault for fault in faults if fault), "")


def _row_fault(row: FragmentState) -> str:
    counts = (row.version, row.time_ms, row.receipts, row.refused, row.done, row.waiting_tokens)
    if min(counts) < 0:
        return "a state with a negative number"
    if row.done > EPOCHS_MAX:
        return "a state with an impossible number of finished epochs"
    if len(row.digest) != (DIGEST_BYTES if row.version else 0):
        return "a state with a digest of the wrong length"
    peers = [tally.peer for tally in row.tallies]
    if peers != sorted(set(peers)) or any(len(peer) != KEY_BYTES for peer in peers):
        return "a state whose peers are malformed or out of order"
    if len(peers) > PEERS_MAX + 1:
        return "a state with too many peers"
    if len(row.waiting_home) != (KEY_BYTES if row.waiting_tokens else 0):
        return "a state whose waiting tokens have no home"
    days = (*(tally.days for tally in row.tallies), row.waiting_days)
    faults = [*map(_days_fault, days), *map(_tally_fault, row.tallies)]
    return next((fault for fault in faults if fault), "")


def _tally_fault(row: PeerTally) -> str:
    counts = (row.tokens, row.twice, row.contributions, row.units, row.first_ms, row.last_ms)
    lowest = min(*counts, row.claimed, row.span_ms)
    return "a state with a negative number" if lowest < 0 else ""


def _days_fault(days: tuple[tuple[int, int], ...]) -> str:
    numbers = [day for day, _ in days]
    if numbers != sorted(set(numbers)) or any(day < 0 or n <= 0 for day, n in days):
        return "a state whose days are malformed or out of order"
    if numbers and numbers[-1] - numbers[0] > RECENT_DAYS:
        return "a state with too many days"
    return ""
