"""Drafts of others, kept for the case that their makers die: a core with bounds, without I/O.

One draft for each maker and fragment, the newest. It takes from so many that its memory is bounded;
what does not fit is refused with the reason, and its maker asks another neighbour.
"""

from __future__ import annotations

from typing import Final

from dugnad.averaging.worker import Kept
from dugnad.dht.ids import PeerId

MAKERS_MAX: Final = 4
"""Neighbours that one peer keeps drafts of: with drafts spread evenly each has one."""
BYTES_MAX: Final = 64 << 20
"""Memory for all drafts: as int4 those of 120 million parameters."""


class BuddyBox:
    """The drafts that lie here."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._drafts: dict[PeerId, dict[int, Kept]] = {}

    @property
    def bytes(self) -> int:
        """Memory that the payloads take."""
        return sum(
            len(kept.payload) for drafts in self._drafts.values() for kept in drafts.values()
        )

    def makers(self) -> tuple[PeerId, ...]:
        """Whose drafts lie here."""
        return tuple(self._drafts)

    def keep(self, kept: Kept) -> str:
        """Keep a draft from its maker whose signature and root were checked; '' or why not."""
        made = kept.contribution
        maker = PeerId(made.peer)
        mine = self._drafts.get(maker)
        if mine is None and len(self._drafts) >= MAKERS_MAX:
            return f"drafts of {MAKERS_MAX} others lie here already"
        before = mine.get(made.fragment) if mine is not None else None
        if before is not None and _rank(before) >= _rank(kept):
            return "a newer draft lies here already"
        freed = len(before.payload) if before is not None else 0
        if self.bytes - freed + len(kept.payload) > self.bytes_max:
            return "there is no room for another draft"
        self._drafts.setdefault(maker, {})[made.fragment] = kept
        return ""

    def take(self, maker: PeerId) -> tuple[Kept, ...]:
        """Remove and return what lies here of a maker."""
        return tuple(self._drafts.pop(maker, {}).values())


def _rank(kept: Kept) -> tuple[int, int]:
    """Of two drafts of one fragment the later one holds more work, or has a higher number."""
    return kept.contribution.seq, kept.contribution.tokens
