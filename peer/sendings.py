"""Contributions on their way out: to the homes that the cores name, and for who is leaving others'.

A sending ends with its answer, with a broken stream, when it takes so long that nobody would list
it any more, or when its core does not need it any more. While it moves, the core hears so now and
then, and does not pass its home over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dugnad.averaging import events as ev
from dugnad.averaging.worker import Kept
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import TransportError
from dugnad.peer.exchangeports import Ports

PUSH_TIMEOUT_S: Final = 60.0
"""A contribution that takes longer, and longer than two intervals (later nobody lists it), is sent
again or replaced; the core does not wait for it."""
WATCH_S: Final = 0.5
"""Half of the shortest time after which a home is passed over."""

Feed = Callable[[int, ev.Event], None]
Which = tuple[int, int, PeerId]
"""Fragment, seq, and to whom."""


class Sendings:
    """Those of one peer. Belongs to its event loop."""

    def __init__(self, ports: Ports, feed: Feed, forwarded: Callable[[], None]) -> None:
        """`forwarded` is told when nothing of others' is on its way any more."""
        self._ports, self._feed, self._forwarded = ports, feed, forwarded
        self._under_way: dict[Which, asyncio.Task[None]] = {}
        self._watches: dict[Which, asyncio.TimerHandle] = {}
        self._forwarding = 0

    @property
    def forwarding(self) -> bool:
        """Whether a contribution of somebody else is on its way."""
        return self._forwarding > 0

    async def send(self, which: Which, kept: Kept, interval_s: float) -> None:
        """Bring one of ours to its home, in a task of its own; what comes of it is fed."""
        p, seq, to = which
        task = asyncio.current_task()
        assert task is not None
        self._under_way[which] = task
        self._watch(which)
        try:
            async with asyncio.timeout(max(PUSH_TIMEOUT_S, 2.0 * interval_s)):
                refusal = await self._push(kept, to)
        except (TransportError, TimeoutError):
            self._feed(p, ev.SendLost(seq, to))
        else:
            self._feed(p, ev.SendDone(seq, to, refusal))
        finally:
            if self._under_way.get(which) is task:
                del self._under_way[which]
                self._watches.pop(which).cancel()

    def cancel(self, which: Which) -> None:
        """End one that is under way; nothing is fed."""
        task = self._under_way.pop(which, None)
        if task is not None:
            self._watches.pop(which).cancel()
            task.cancel()

    def _watch(self, which: Which) -> None:
        """Tell the core now and then that it is still getting through."""
        if known := self._watches.get(which):
            known.cancel()
        loop = asyncio.get_running_loop()
        self._watches[which] = loop.call_later(WATCH_S, self._look, which)

    def _look(self, which: Which) -> None:
        p, seq, to = which
        if self._ports.codecs.moving(p, to):
            self._feed(p, ev.SendMoves(seq, to))
        if which in self._under_way:
            self._watch(which)

    async def forward(self, p: int, kept: Kept, to: PeerId) -> None:
        """Bring somebody else's contribution to the next home; if that fails, it was tried."""
        self._forwarding += 1
        try:
            async with asyncio.timeout(PUSH_TIMEOUT_S):
                await self._push(kept, to)
        except (TransportError, TimeoutError) as error:
            self._ports.on_note(p, ev.Note("leave", f"a contribution was not passed on: {error}"))
        finally:
            self._forwarding -= 1
            if not self._forwarding:
                self._forwarded()

    async def _push(self, kept: Kept, to: PeerId) -> str:
        return await self._ports.network.push(to, kept.contribution, kept.pieces, kept.payload)
