"""Streams to members of a crowd with whom nothing is open yet: they are dialled when one is wanted.

In a mesh every peer is connected, and this transport is the one below it. In a crowd a peer is
connected with its neighbours; a hand-in, a payload or an answer to anybody else first dials the
addresses of its advert, whose signature the roster has checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dugnad.dht.ids import PeerId
from dugnad.dht.ports import Handler, Stream, Transport


class FarTransport:
    """A `Transport` over another one. ``places(peer)``: addresses to dial before a stream is opened
    to it; none for a peer that is a neighbour, or in a mesh."""

    def __init__(self, base: Transport, places: Callable[[PeerId], Sequence[str]]) -> None:
        self._base = base
        self._places = places

    @property
    def peer(self) -> PeerId:
        """Who we are."""
        return self._base.peer

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """As the base."""
        await self._base.dial(peer, addresses, timeout_s)

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """Opens a stream, to a far peer after dialling it. DialError with the reasons."""
        deadline = time.monotonic() + timeout_s
        if places := self._places(peer):
            await self._base.dial(peer, places, timeout_s)
        return await self._base.open(peer, protocol, max(deadline - time.monotonic(), 0.001))

    async def accept(self, protocol: str, handler: Handler) -> None:
        """As the base."""
        await self._base.accept(protocol, handler)

    async def addresses(self) -> list[str]:
        """The base's."""
        return await self._base.addresses()

    async def close(self) -> None:
        """Closes the base."""
        await self._base.close()
