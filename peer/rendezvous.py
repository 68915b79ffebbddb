"""Who does which unit: weighted rendezvous hashing, in whole numbers.

Each participant draws, for each unit, a number from a hash of (run, unit, peer) and the lowest E(u)
/ weight has the unit, where u in (0, 1) is the hash and E(u) = -log2(u). With an exponential E, a
participant has the lowest with a probability that is its share of the weight. A participant's
number depends on nobody else, so when it goes only its own units move, and when its weight grows it
only gains.

**All machines must agree**, so no floating logarithm: libm's differ in the last bit. -log2 is a
table of 256 chords in fixed point, made at import by repeated squaring of whole numbers, and two
quotients are compared by cross multiplication. A chord is within 0.2 % of the true logarithm
everywhere, which moves shares by less than that; and what it computes is the same on every machine,
being only integer products and shifts.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from dugnad.dht.ids import PeerId

PARTICIPANTS_MAX: Final = 4096
"""Participants that share work: beyond a thousand peers, work is to be shared inside clusters."""
OWNERS_CACHED_MAX: Final = 16_384
"""Owners remembered: the window and what is looked at beyond it; about 200 bytes each."""

_FRACTION = 48  # bits behind the point of a logarithm
_CHORDS = 256
_WORK = 96  # bits behind the point while the table is made
_TAG = b"dugnad unit owner 1\0"


class Participant(NamedTuple):
    """Who takes part in sharing the work, with a positive whole weight
    (`averaging.speed.class_weight`)."""

    peer: PeerId
    weight: int


class _Draw(NamedTuple):
    """A participant's number for one unit; the lowest `cost / weight` has the unit, then the lower
    key."""

    peer: PeerId
    weight: int
    cost: int

    def before(self, other: "_Draw") -> bool:
        mine, theirs = self.cost * other.weight, other.cost * self.weight
        return mine < theirs or (mine == theirs and self.peer < other.peer)


def owner(epoch: int, index: int, participants: Sequence[Participant], seed: bytes = b"") -> PeerId:
    """Who has unit (epoch, index). `seed` keeps runs apart. ValueError when nobody takes part.

    Depends on the set of participants, not on their order.
    """
    best = _best(epoch, index, participants, seed)
    if best is None:
        raise ValueError("nobody takes part")
    return best.peer


class Ownership:
    """Owners of units under changing participants, remembered and mended instead of computed anew.

    Always equal to what `owner` says for the present participants. When a few of N participants
    change, a remembered unit costs one hash for each that came, and N only if its owner was among
    those that left.
    """

    __slots__ = ("_best", "_seed", "_weights")

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._weights: dict[PeerId, int] = {}
        self._best: dict[tuple[int, int], _Draw] = {}

    @property
    def participants(self) -> Mapping[PeerId, int]:
        """Who takes part now, with the weight."""
        return self._weights

    def change(self, weights: Mapping[PeerId, int]) -> None:
        """From now on these take part (at most PARTICIPANTS_MAX: the lowest keys of more)."""
        kept = dict(weights)
        if len(kept) > PARTICIPANTS_MAX:
            kept = {peer: kept[peer] for peer in sorted(kept)[:PARTICIPANTS_MAX]}
        before, self._weights = self._weights, kept
        gone = {peer for peer, weight in before.items() if kept.get(peer) != weight}
        came = [Participant(p, w) for p, w in kept.items() if before.get(p) != w]
        if 2 * len(came) > len(kept):
            self._best.clear()  # computing anew is cheaper, and lazy
            return
        for unit in [unit for unit, best in self._best.items() if best.peer in gone]:
            del self._best[unit]
        if came:
            self._challenge(came)

    def owner(self, epoch: int, index: int) -> PeerId | None:
        """Who has unit (epoch, index); None when nobody takes part."""
        unit = (epoch, index)
        best = self._best.get(unit)
        if best is None:
            best = _best(epoch, index, self._list(), self._seed)
            if best is None:
                return None
            if len(self._best) >= OWNERS_CACHED_MAX:
                del self._best[next(iter(self._best))]  # the one looked up first: the oldest unit
            self._best[unit] = best
        return best.peer

    def known(self, epoch: int, index: int) -> bool:
        """Whether `owner` answers this without a computation over all participants."""
        return (epoch, index) in self._best or not self._weights

    def heir(self, epoch: int, index: int) -> PeerId | None:
        """Who would have unit (epoch, index) if its owner went; None when nobody else takes
        part."""
        first = self.owner(epoch, index)
        rest = [one for one in self._list() if one.peer != first]
        best = _best(epoch, index, rest, self._seed)
        return None if best is None else best.peer

    def first_of(self, epoch: int, index: int, peers: Sequence[PeerId]) -> PeerId:
        """Which of `peers` comes first for a unit; those that do not take part have the weight
        1."""
        draws = [Participant(peer, self._weights.get(peer, 1)) for peer in peers]
        return owner(epoch, index, draws, self._seed)

    def _list(self) -> list[Participant]:
        return [Participant(peer, weight) for peer, weight in self._weights.items()]

    def _challenge(self, came: list[Participant]) -> None:
        for unit, best in self._best.items():
            challenger = _best(*unit, came, self._seed)
            if challenger is not None and challenger.before(best):
                self._best[unit] = challenger  # same key: the dict does not change its size


def _best(epoch: int, index: int, participants: Sequence[Participant], seed: bytes) -> _Draw | None:
    start = hashlib.sha256(_TAG + epoch.to_bytes(8, "big") + index.to_bytes(8, "big") + seed)
    best: _Draw | None = None
    for peer, weight in participants:
        digest = start.copy()
        digest.update(peer)
        draw = _Draw(peer, weight, _cost(int.from_bytes(digest.digest()[:8], "big")))
        if best is None or draw.before(best):
            best = draw
    return best


def _cost(bits: int) -> int:
    """-log2 of u = (2·bits + 1) / 2^65 in fixed point: positive for each of the 2^64 values of
    `bits`."""
    odd = 2 * bits + 1
    whole = odd.bit_length() - 1
    fraction = (odd << (64 - whole)) - (1 << 64)  # the 64 bits behind the leading one
    chord, along = fraction >> 56, fraction & (1 << 56) - 1
    low, high = _LOG2[chord], _LOG2[chord + 1]
    return (65 << _FRACTION) - (whole << _FRACTION) - low - ((high - low) * along >> 56)


def _log2(x: int) -> int:
    """log2 of x / 2^_WORK, for x in [1, 2) · 2^_WORK, bit by bit: squaring doubles the
    logarithm."""
    result = 0
    for _ in range(_FRACTION):
        x = x * x >> _WORK
        result <<= 1
        if x >> (_WORK + 1):
            x >>= 1
            result |= 1
    return result


_LOG2: Final = (
    *(_log2((_CHORDS + chord) * ((1 << _WORK) // _CHORDS)) for chord in range(_CHORDS)),
    1 << _FRACTION,
)
