"""Which sequences of which work units one fragment's lineage has covered.

Every unit belongs to one fragment, by hash, so that a token counts once although its contribution
is handed in for every fragment (DESIGN.md section 11). The masks of one fragment therefore follow
from that fragment's lineage alone, and lineages may be folded in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from dugnad.averaging.formats import FRAGMENTS_MAX, UnitPiece
from dugnad.dht.ids import RunId
from dugnad.dht.records import framed

UNIT_SEQUENCES_MAX: Final = 65_536
"""Sequences of one unit: a mask is then at most 8 KB. A unit is a second to a minute of work."""
EPOCHS_AHEAD_MAX: Final = 64
"""Epochs beyond the oldest unfinished one in which a piece is credited: bounds the masks kept.
Honest peers work in a window of one or two; a data set so small that it is passed 64 times while
one unit stands open is not worth a network."""
SHARES_CACHED_MAX: Final = 256
"""Epochs whose unit counts are remembered: all open ones, twice over."""

_UNIT_DOMAIN: Final = "unit-fragment/1"


@dataclass(frozen=True, slots=True)
class CreditRules:
    """What a run fixes about units and credit: all of it stands in the manifest."""

    run: RunId
    fragments: int
    sequence_tokens: int
    unit_sequences: int
    """Sequences of a unit; the last unit of an epoch may have fewer."""
    epoch_sequences: int
    horizon: int = 4
    """F: a commit this many versions below its head is settled."""
    token_budget: int = 0
    """A head whose token total reaches it is the last: everything below it and itself is settled.
    0: no end."""

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= FRAGMENTS_MAX:
            raise ValueError(f"{self.fragments} fragments; 1 to {FRAGMENTS_MAX} are possible")
        if not 1 <= self.unit_sequences <= UNIT_SEQUENCES_MAX:
            raise ValueError(f"units of {self.unit_sequences} sequences are not possible")
        if min(self.sequence_tokens, self.epoch_sequences, self.horizon) < 1:
            raise ValueError("tokens, sequences and horizon must be at least 1")

    @property
    def units(self) -> int:
        """Units of one epoch."""
        return -(-self.epoch_sequences // self.unit_sequences)

    def unit_size(self, index: int) -> int:
        """Sequences of unit ``index`` of any epoch."""
        return min(self.unit_sequences, self.epoch_sequences - index * self.unit_sequences)


def unit_fragment(run: RunId, epoch: int, index: int, fragments: int) -> int:
    """The fragment in which unit (epoch, index) is credited: SHA-256, the same for every peer."""
    return _unit_hash(framed(_UNIT_DOMAIN, run, b""), epoch, index) % fragments


def _unit_hash(frame: bytes, epoch: int, index: int) -> int:
    body = epoch.to_bytes(8, "big") + index.to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(frame + body).digest()[:8], "big")


class UnitShares:
    """How many units of an epoch belong to each fragment; counted once an epoch and remembered."""

    def __init__(self, rules: CreditRules) -> None:
        self._rules = rules
        self._frame = framed(_UNIT_DOMAIN, rules.run, b"")
        self._counts: dict[int, list[int]] = {}

    def fragment(self, epoch: int, index: int) -> int:
        """:func:`unit_fragment` for this run."""
        return _unit_hash(self._frame, epoch, index) % self._rules.fragments

    def count(self, epoch: int, fragment: int) -> int:
        """Units of ``epoch`` that are credited in ``fragment``."""
        counts = self._counts.get(epoch)
        if counts is None:
            counts = [0] * self._rules.fragments
            for index in range(self._rules.units):
                counts[self.fragment(epoch, index)] += 1
            while len(self._counts) >= SHARES_CACHED_MAX:
                del self._counts[next(iter(self._counts))]
            self._counts[epoch] = counts
        return counts[fragment]


@dataclass(frozen=True, slots=True)
class Covering:
    """What one piece did: the runs it newly covered, sequences covered before, unit now full."""

    new: tuple[UnitPiece, ...]
    twice: int
    completed: bool


NOTHING_COVERED: Final = Covering((), 0, False)


class UnitMask(msgspec.Struct, frozen=True, array_like=True):
    """Covered sequences of one unit: bit i (of the big-endian number) is sequence i."""

    epoch: int
    index: int
    mask: bytes


class Coverage:
    """The masks of one fragment. Epochs below ``done`` are covered in full and kept as a number."""

    def __init__(self, rules: CreditRules, fragment: int, shares: UnitShares) -> None:
        self._rules = rules
        self._fragment = fragment
        self._shares = shares
        self.done = 0
        self._masks: dict[int, dict[int, int]] = {}
        self._full: dict[int, int] = {}

    def cover(self, piece: UnitPiece) -> Covering:
        """Mark ``piece``; one of another fragment, outside its unit or far ahead does nothing."""
        if not self._belongs(piece):
            return NOTHING_COVERED
        wanted = _bits(piece)
        before = self.mask(piece.epoch, piece.index)
        new = wanted & ~before
        completed = False
        if new:
            completed = self._set(piece.epoch, piece.index, before | new)
        runs = tuple(mask_pieces(piece.epoch, piece.index, new))
        return Covering(runs, (wanted & before).bit_count(), completed)

    def uncover(self, piece: UnitPiece) -> None:
        """Take back a run that :meth:`cover` called new (newest first)."""
        before = self.mask(piece.epoch, piece.index)
        assert piece.epoch >= self.done, "a collapsed epoch is never uncovered"
        assert before & _bits(piece) == _bits(piece), "only what is covered can be uncovered"
        self._set(piece.epoch, piece.index, before & ~_bits(piece))

    def mask(self, epoch: int, index: int) -> int:
        """Covered sequences of a unit, as bits."""
        if epoch < self.done:
            return self._all(index)
        return self._masks.get(epoch, {}).get(index, 0)

    def full_units(self, epoch: int) -> int:
        """Units of ``epoch`` in this fragment that are covered in full."""
        if epoch < self.done:
            return self._shares.count(epoch, self._fragment)
        return self._full.get(epoch, 0)

    @property
    def newest_epoch(self) -> int:
        """The newest epoch of which anything is covered, -1 when nothing open is."""
        return max(self._masks, default=-1)

    def masks(self) -> Iterator[tuple[int, int, int]]:
        """(epoch, index, mask) of the units of open epochs, ascending."""
        for epoch in sorted(self._masks):
            for index, mask in sorted(self._masks[epoch].items()):
                yield epoch, index, mask

    def collapse(self, busy: Collection[int]) -> None:
        """Drop the masks of finished oldest epochs, except ``busy`` ones that may be undone."""
        for _ in range(EPOCHS_AHEAD_MAX):
            if self.done in busy or not self._complete(self.done):
                return
            self._masks.pop(self.done, None)
            self._full.pop(self.done, None)
            self.done += 1

    def state(self, without: Iterable[UnitPiece]) -> tuple[UnitMask, ...]:
        """The masks as they were before the runs ``without`` were covered."""
        masks = {(epoch, index): mask for epoch, index, mask in self.masks()}
        for piece in without:
            masks[piece.epoch, piece.index] &= ~_bits(piece)
        return tuple(
            UnitMask(epoch, index, mask.to_bytes((mask.bit_length() + 7) // 8, "big"))
            for (epoch, index), mask in masks.items()
            if mask
        )

    def restore(self, done: int, rows: Iterable[UnitMask]) -> str:
        """Take over a foreign state; why it is impossible, or '' when it was taken."""
        self.done = done
        for row in rows:
            mask = int.from_bytes(row.mask, "big")
            piece = UnitPiece(row.epoch, row.index, 0, max(mask.bit_length(), 1))
            if not mask or row.epoch < done or not self._belongs(piece):
                return "a mask of a unit that cannot be open in its fragment"
            if self.mask(row.epoch, row.index):
                return "two masks of one unit"
            self._set(row.epoch, row.index, mask)
        return ""

    def _belongs(self, piece: UnitPiece) -> bool:
        if piece.epoch < 0 or not 0 <= piece.index < self._rules.units:
            return False
        if not 0 <= piece.start < piece.stop <= self._rules.unit_size(piece.index):
            return False
        if piece.epoch >= self.done + EPOCHS_AHEAD_MAX and piece.epoch >= self._low() + (
            EPOCHS_AHEAD_MAX
        ):
            return False
        return self._shares.fragment(piece.epoch, piece.index) == self._fragment

    def _low(self) -> int:
        """The oldest epoch that is not covered in full; depends on the lineage alone."""
        for epoch in range(self.done, self.done + EPOCHS_AHEAD_MAX):
            if not self._complete(epoch):
                return epoch
        return self.done + EPOCHS_AHEAD_MAX

    def _complete(self, epoch: int) -> bool:
        return self._full.get(epoch, 0) == self._shares.count(epoch, self._fragment)

    def _all(self, index: int) -> int:
        return (1 << self._rules.unit_size(index)) - 1

    def _set(self, epoch: int, index: int, mask: int) -> bool:
        """Store a mask; whether the unit is covered in full by it."""
        whole = self._all(index)
        units = self._masks.setdefault(epoch, {})
        was_full, is_full = units.get(index, 0) == whole, mask == whole
        if mask:
            units[index] = mask
        else:
            units.pop(index, None)
        self._full[epoch] = self._full.get(epoch, 0) + is_full - was_full
        if not units:
            del self._masks[epoch], self._full[epoch]
        return is_full


def mask_pieces(epoch: int, index: int, mask: int) -> Iterator[UnitPiece]:
    """The runs of set bits of ``mask`` as pieces of unit (epoch, index), ascending."""
    at = 0
    while mask:
        gap = (mask & -mask).bit_length() - 1
        mask >>= gap
        length = (~mask & (mask + 1)).bit_length() - 1
        yield UnitPiece(epoch, index, at + gap, at + gap + length)
        mask >>= length
        at += gap + length


def net_pieces(
    added: Iterable[UnitPiece], removed: Iterable[UnitPiece]
) -> tuple[tuple[UnitPiece, ...], tuple[UnitPiece, ...]]:
    """What first uncovering ``removed`` and then covering ``added`` comes to: (new, gone)."""
    plus, minus = _by_unit(added), _by_unit(removed)
    covered = [mask_pieces(*unit, mask & ~minus.get(unit, 0)) for unit, mask in plus.items()]
    gone = [mask_pieces(*unit, mask & ~plus.get(unit, 0)) for unit, mask in minus.items()]
    return tuple(p for run in covered for p in run), tuple(p for run in gone for p in run)


def _by_unit(pieces: Iterable[UnitPiece]) -> dict[tuple[int, int], int]:
    masks: dict[tuple[int, int], int] = {}
    for piece in pieces:
        unit = (piece.epoch, piece.index)
        masks[unit] = masks.get(unit, 0) | _bits(piece)
    return dict(sorted(masks.items()))


def _bits(piece: UnitPiece) -> int:
    return ((1 << (piece.stop - piece.start)) - 1) << piece.start
