"""How long it takes from training a unit until the lineage lists it, as a peer sees it of its
own work.

A slow line or a busy machine makes this many merge intervals, and what is merely under way must not
look overdue.
"""

from typing import Final

WAITING_MAX: Final = 4096
"""Units that wait to be listed: twice the window. Of more, the newest are not watched."""
NEWEST_SHARE: Final = 0.2
"""Weight of the newest unit in the moving average."""


class ListingLag:
    """The usual delay in seconds; 0 while nothing was listed. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: dict[int, float] = {}

    def trained(self, position: int, now: float) -> None:
        """A part of a unit was trained; the first part counts, since the unit waits for all."""
        if position in self._since or len(self._since) < WAITING_MAX:
            self._since.setdefault(position, now)

    def listed(self, position: int, now: float) -> None:
        """A unit is listed; nothing when it was not trained here."""
        since = self._since.pop(position, None)
        if since is None:
            return
        delay = max(now - since, 0.0)
        known = self.seconds or delay
        self.seconds = known + NEWEST_SHARE * (delay - known)
