"""Whole anchors over a slow line: one fragment after the other, and no more bytes than needed.

Fragments that come side by side all come late, when the swarm has gone on; one after the other each
is a merge or two behind at most, and follows by payloads from there. Where the run has no outer
momentum, that of the header is still all zeros: it is made here, checked against the header's root
like any other, and half of the bytes need not be fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from dugnad.averaging.formats import Header
from dugnad.averaging.tree import Vector, array_root
from dugnad.dht.ids import PeerId
from dugnad.peer.pull import Puller
from dugnad.peer.transferwire import OthersTurn, off_loop

TURN_S: Final = 120.0
"""Longer nobody waits for another fragment's turn: 30 MB at 2 Mbit/s, or a donor that trickles."""


@dataclass(slots=True)
class AnchorPull:
    """Whose turn it is. Belongs to one event loop."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def anchors(
        self, puller: Puller, peers: Sequence[PeerId], header: Header, size: int
    ) -> tuple[Vector, Vector]:
        """Parameters and momentum after a commit, matching its roots. PullError when nobody serves
        them; OthersTurn after another fragment's turn: now there may be a newer commit to ask for.
        """
        if await self._waited():
            raise OthersTurn("another fragment came first")
        if self._turn.locked():  # by one that does not get on
            return await self._pull(puller, peers, header, size)
        async with self._turn:
            return await self._pull(puller, peers, header, size)

    async def _waited(self) -> bool:
        """Whether another one had its turn and it is over; at once when nobody has."""
        if not self._turn.locked():
            return False
        try:
            async with asyncio.timeout(TURN_S), self._turn:
                return True
        except TimeoutError:
            return False

    async def _pull(
        self, puller: Puller, peers: Sequence[PeerId], header: Header, size: int
    ) -> tuple[Vector, Vector]:
        if not header.mu_bits:
            momentum = np.zeros(size, np.float32)
            root = await off_loop(momentum.nbytes, partial(array_root, momentum))
            if root == header.momentum_root:
                return await puller.theta(peers, header, size), momentum
        return await puller.anchors(peers, header, size)
