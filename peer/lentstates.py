"""Anchors that somebody is fetching, kept until that is done though the swarm has gone on.

On a slow line whole anchors take longer than a few merges, and a donor that let go of them with the
next ones would have its peer begin again, for ever. A core: the time is passed in.
"""

from __future__ import annotations

from typing import Final

from dugnad.averaging.buffers import AnchorState

LENT_S: Final = 30.0
"""Kept for so long after somebody drew of it last: three times as long as a donor may be silent."""
LENT_MAX: Final = 2
"""Of one fragment, the newest drawn: two peers on slow lines may have begun at different heads.
Memory: 8 bytes a parameter each, once the swarm has left them behind."""


class LentStates:
    """The anchors of one peer that others draw from."""

    def __init__(self) -> None:
        self._lent: dict[tuple[int, bytes], tuple[AnchorState, float]] = {}

    def find(
        self, fragment: int, digest: bytes, held: AnchorState | None, now: float
    ) -> AnchorState | None:
        """The anchors after a commit: as they are `held`, or as they were lent before."""
        self.sweep(now)
        key = (fragment, digest)
        known, _ = self._lent.pop(key, (None, now))
        found = held or known
        if found is None:
            return None
        self._lent[key] = (found, now)  # the newest drawn last
        lent = [one for one in self._lent if one[0] == fragment]
        for one in lent[:-LENT_MAX]:
            del self._lent[one]
        return found

    def sweep(self, now: float) -> None:
        """Let go of what nobody has drawn from for LENT_S."""
        for key in [key for key, (_, at) in self._lent.items() if now - at >= LENT_S]:
            del self._lent[key]

    def __len__(self) -> int:
        return len(self._lent)
