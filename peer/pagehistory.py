"""The history behind the public page: taken up when a daemon starts, written as it grows."""

from __future__ import annotations

from typing import Final

from dugnad.dashboard.history import History, all_closed, decode_old
from dugnad.dashboard.historyrows import HistoryRows, changed, history_of
from dugnad.peer.pagetables import PageTables
from dugnad.peer.storethread import StoreThread

OLD_KEY: Final = "page/history"
"""Where versions before the tables kept a history in one piece."""


class PageHistory:
    """One page's history on the disk. `load` before `save`; both raise StoreError."""

    def __init__(self, store: StoreThread) -> None:
        self._store = store
        self._written = History()

    async def load(self, now_ms: int) -> History | None:
        """What was kept; None when nothing was. ValueError when it is damaged: a new one begins.

        One in the form of earlier versions is taken up and, once the tables have it, forgotten.
        """
        rows, old = await self._store.call(
            lambda store: (PageTables(store).read(now_ms), store.kept(OLD_KEY))
        )
        if rows != HistoryRows():
            try:
                self._written = history_of(rows, now_ms)
            except ValueError:
                await self._store.call(lambda store: PageTables(store).clear())
                raise
            return all_closed(self._written, now_ms)
        if not old:
            return None
        history = decode_old(old, now_ms)
        await self.save(history)
        await self._store.call(lambda store: store.keep(OLD_KEY, b""))
        return history

    async def save(self, history: History) -> None:
        """Write what changed since the last time: a few rows."""
        change = changed(self._written, history)
        if change is None:
            return
        await self._store.call(lambda store: PageTables(store).write(change))
        self._written = history
