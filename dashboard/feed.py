"""Where a dashboard gets its state: the port that a host fills, and the feed that folds events.

A host makes one `RunFeed` for each run, calls `publish` with each event in the loop that serves
the pages, and gives the feed to `DashboardServer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dugnad.dashboard import events as ev
from dugnad.dashboard.contributor import Receipt
from dugnad.dashboard.history import History
from dugnad.dashboard.live import Hub
from dugnad.dashboard.state import State, apply_clean, restored


class Receipts(Protocol):
    """What a host must be able to look up. May read a disk, so it is awaited."""

    async def receipts(self, peer: str, limit: int) -> Sequence[Receipt]:
        """The newest receipts of `peer` (text form; foreign, so perhaps no key), newest first."""
        ...


class Feed(Protocol):
    """What the web application asks of a run. `state` and `hub` answer at once, from memory."""

    def state(self) -> State:
        """The state now."""
        ...

    @property
    def hub(self) -> Hub:
        """The numbered news, for readers who stay."""
        ...

    async def receipts(self, peer: str, limit: int) -> Sequence[Receipt]:
        """As in `Receipts`."""
        ...


class NoReceipts:
    """A host that keeps no receipts."""

    async def receipts(self, peer: str, limit: int) -> Sequence[Receipt]:
        """None at all."""
        return ()


class RunFeed:
    """The state of one run as the fold of what was published. For one event loop."""

    def __init__(self, receipts: Receipts | None = None, history: History | None = None) -> None:
        self._receipts = receipts or NoReceipts()
        self._state = restored(State(), history) if history is not None else State()
        self._hub = Hub()

    def publish(self, event: ev.AnyEvent) -> None:
        """Fold `event` into the state and tell the readers. Never waits; costs microseconds."""
        event = ev.clean(event)
        self._state = apply_clean(self._state, event)
        self._hub.publish(self._state.events, event)

    def state(self) -> State:
        """The state now."""
        return self._state

    @property
    def hub(self) -> Hub:
        """The numbered news."""
        return self._hub

    async def receipts(self, peer: str, limit: int) -> Sequence[Receipt]:
        """As in `Receipts`."""
        return await self._receipts.receipts(peer, limit)
