"""The plan of units: which sequences each work unit holds, the same on every peer.

An epoch goes once through all sequences of the data in an order of its own. The order is a keyed
permutation that is computed place by place, so no peer needs a table, and a peer that joins at unit
one million does not have to shuffle first. A unit (epoch, index) is the next few places of that
order. Everything here is whole-number arithmetic; nothing depends on the machine or on Python's
hash seed.
"""

import functools
import hashlib
from typing import Final

from dugnad.averaging.coverage import UNIT_SEQUENCES_MAX

SEQUENCES_MAX: Final = 1 << 48
"""Sequences in one epoch: half of the Feistel network then has 24 bits, far inside its 64-bit
mixer."""
EPOCHS_MAX: Final = 1 << 32
"""Epochs of one run: an epoch's number is hashed as 8 bytes, and a piece that names more is
nonsense."""

_ROUNDS: Final = 6  # four make a strong permutation of a good mixer; two more for small domains
_KEYS_CACHED = 16  # epochs in use at one time: this one, the next, and a few behind
_MASK = (1 << 64) - 1
_TAG = b"dugnad unit order 1\0"


Unit = tuple[int, int]
"""(epoch, index): the name of a work unit."""


class UnitPlan:
    """How the data of one run is cut into units.

    `seed` derives from the run id; `sequences` is the length of an epoch; `unit_sequences` how many
    a unit holds (the last unit of an epoch may hold fewer). ValueError on numbers out of range.

    Units are also numbered through from the first of epoch 0: their *position*.
    """

    __slots__ = ("_half_bits", "seed", "sequences", "unit_sequences", "units_per_epoch")

    def __init__(self, seed: bytes, sequences: int, unit_sequences: int) -> None:
        if not 1 <= sequences <= SEQUENCES_MAX:
            raise ValueError(f"an epoch has 1 to {SEQUENCES_MAX} sequences, not {sequences}")
        if not 1 <= unit_sequences <= UNIT_SEQUENCES_MAX:
            raise ValueError(
                f"a unit has 1 to {UNIT_SEQUENCES_MAX} sequences, not {unit_sequences}"
            )
        self.seed = seed
        self.sequences = sequences
        self.unit_sequences = unit_sequences
        self.units_per_epoch = -(-sequences // unit_sequences)
        self._half_bits = max(1, ((sequences - 1).bit_length() + 1) // 2)

    def size_of(self, epoch: int, index: int) -> int:
        """How many sequences unit (epoch, index) holds. ValueError if there is no such unit."""
        self._check(epoch, index)
        return min(self.unit_sequences, self.sequences - index * self.unit_sequences)

    def sequences_of(self, epoch: int, index: int) -> list[int]:
        """The sequences of unit (epoch, index), in order. ValueError if there is no such unit."""
        first = index * self.unit_sequences
        return [self._sequence(epoch, first + i) for i in range(self.size_of(epoch, index))]

    def position(self, epoch: int, index: int) -> int:
        """The place of a unit on the line of all units. ValueError if there is no such unit."""
        self._check(epoch, index)
        return epoch * self.units_per_epoch + index

    def unit(self, position: int) -> Unit:
        """The unit at a position."""
        return divmod(position, self.units_per_epoch)

    def has(self, epoch: int, index: int, stop: int) -> bool:
        """Whether there is such a unit, and it holds at least `stop` sequences: a foreign piece is
        asked this before anything else."""
        if not (0 <= epoch < EPOCHS_MAX and 0 <= index < self.units_per_epoch):
            return False
        return stop <= self.size_of(epoch, index)

    def _check(self, epoch: int, index: int) -> None:
        if not (0 <= epoch < EPOCHS_MAX and 0 <= index < self.units_per_epoch):
            raise ValueError(f"there is no unit ({epoch}, {index})")

    def _sequence(self, epoch: int, place: int) -> int:
        """Cycle walking: the network permutes the next power of four; a value outside the epoch is
        sent round again. That stays a permutation, ends always, and takes less than four turns on
        average."""
        keys = _round_keys(self.seed, epoch)
        value = _permute(place, self._half_bits, keys)
        while value >= self.sequences:
            value = _permute(value, self._half_bits, keys)
        return value


@functools.lru_cache(_KEYS_CACHED)
def _round_keys(seed: bytes, epoch: int) -> tuple[int, ...]:
    def key(number: int) -> int:
        text = _TAG + epoch.to_bytes(8, "big") + bytes([number]) + seed
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")

    return tuple(key(number) for number in range(_ROUNDS))


def _permute(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    """A balanced Feistel network over 2·half_bits bits."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit reaches every
    output bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
