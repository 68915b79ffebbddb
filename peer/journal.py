"""What happened, in plain words: a bounded list in memory, and the store for later."""

from __future__ import annotations

from collections import deque
from typing import Final

from dugnad.peer.clock import wall_ms
from dugnad.peer.views import EVENTS_PER_REPLY_MAX, EventRow, printable

KEPT: Final = 2000
"""Events kept in memory: a lively hour."""
TEXT_MAX: Final = 300


class Journal:
    """Numbered events of one daemon."""

    def __init__(self) -> None:
        self._rows: deque[EventRow] = deque(maxlen=KEPT)
        self._n = 0

    def add(self, kind: str, text: str, **data: str | int | float) -> EventRow:
        """Note an event; the text is made printable, since parts of it may be foreign."""
        self._n += 1
        row = EventRow(
            n=self._n, at_ms=wall_ms(), kind=kind, text=printable(text, TEXT_MAX), data=data
        )
        self._rows.append(row)
        return row

    def since(self, n: int) -> list[EventRow]:
        """Events after number ``n``, oldest first."""
        return [row for row in self._rows if row.n > n][:EVENTS_PER_REPLY_MAX]
