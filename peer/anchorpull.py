"""Whole anchors over a slow line: one fragment after the other, and no more bytes than needed.

Fragments that come side by side all come late, when the swarm has gone on; one after the other each
is a merge or two behind at most, and follows by payloads from there. Where the run has no outer
momentum, what the header calls momentum is the merged pseudo-gradient: it follows from the
commit's payload, a quarter of its size, and is checked against the header's root like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dugnad.averaging.codecs import COMMIT_CODECS, CodecError, settle_range
from dugnad.averaging.formats import Header
from dugnad.averaging.join import MERGE
from dugnad.averaging.tree import Vector, array_root
from dugnad.dht.ids import PeerId
from dugnad.peer.pull import Puller
from dugnad.peer.transferwire import OthersTurn, PullError


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
        if self._turn.locked():
            async with self._turn:
                pass
            raise OthersTurn("another fragment came first")
        async with self._turn:
            momentum = await self._derived(puller, peers, header, size)
            if momentum is None:
                return await puller.anchors(peers, header, size)
            return await puller.theta(peers, header, size), momentum

    async def _derived(
        self, puller: Puller, peers: Sequence[PeerId], header: Header, size: int
    ) -> Vector | None:
        """The momentum as the payload gives it; None where it does not, or nobody has that."""
        if header.mu_bits or header.kind != MERGE:
            return None
        try:
            payload = await puller.payload(peers, header, size)
            momentum = await asyncio.to_thread(momentum_of, payload, header.codec, size)
        except (PullError, CodecError):
            return None
        root = await asyncio.to_thread(array_root, momentum)
        return momentum if root == header.momentum_root else None


def momentum_of(payload: bytes, codec: str, size: int) -> Vector:
    """The outer momentum after a merge with μ = 0: b = 0 · b + G, as `averaging.outer` has it.
    CodecError when the payload is none of that codec."""
    momentum = COMMIT_CODECS[codec].decode(payload, size)
    settle_range(momentum, np.empty_like(momentum))
    return momentum
