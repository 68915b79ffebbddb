"""Which versions of the protocol peers speak, and whether two of them can talk to each other.

Each release speaks its own version and, for one release, the one before: peers of one version apart
work together while volunteers update. Everybody names the newest and the oldest version that it
speaks; a pair speaks the newest that both know. Pure functions; the roster asks them at each hello.
"""

from dataclasses import dataclass
from typing import Final

PROTOCOL: Final = 2
"""Version of everything that peers say to each other. Since 2 commits of a run of that version may
be in int4."""
OLDEST: Final = max(1, PROTOCOL - 1)
"""The oldest version that this release still speaks."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """The versions that one peer speaks: all from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return str(self.newest)
        return f"{self.oldest} to {self.newest}"

    def may_reach(self, newest: int) -> bool:
        """Whether a peer of that newest version, whose oldest is not known, can be expected to
        talk to us: it speaks one of ours, or the release after ours, which still speaks it.
        """
        return self.oldest <= newest <= self.newest + 1


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two peers without a common version; `mine` when it is our side that is older."""

    reason: str
    mine: bool


def spoken_by(protocol: int, oldest: int) -> Spoken:
    """What a hello says; `oldest` 0 (the first release did not name it), or one that is above the
    newest, counts as the newest alone.
    """
    return Spoken(oldest if 0 < oldest <= protocol else protocol, protocol)


def agree(ours: Spoken, theirs: Spoken, me: str, peer: str) -> int | Mismatch:
    """The version to speak with a peer, or whose dugnad is to be updated.

    `me` and `peer` are short names: both sides compute the same sentence.
    """
    version = min(ours.newest, theirs.newest)
    if version >= max(ours.oldest, theirs.oldest):
        return version
    mine = ours.newest < theirs.newest
    old, new = ((me, ours), (peer, theirs)) if mine else ((peer, theirs), (me, ours))
    return Mismatch(
        f"peer {old[0]} speaks protocol {old[1]}, peer {new[0]} {new[1]}: "
        f"update dugnad on {old[0]}",
        mine,
    )
