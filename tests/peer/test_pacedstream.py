"""Streams that keep to their owner's rate."""

from __future__ import annotations

import asyncio

import pytest

from dugnad.dht.ids import PeerId
from dugnad.peer.pacedstream import FREE_BYTES, PacedStream, Traffic
from dugnad.peer.ratelimit import BURST_S

from .virtual_time import run_virtual  # noqa: TID252  the tests are no installed package

RATE = 10_000.0
LONG_S = 60.0


class Endless:
    """A stream that gives and takes at once all that it is asked to."""

    peer = PeerId(bytes(32))

    async def read(self, n: int) -> bytes:
        return bytes(n)

    async def read_into(self, target: memoryview) -> None:
        target[:] = bytes(len(target))

    async def write(self, data: bytes | memoryview) -> None:
        pass

    async def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("reads", [True, False])
def test_what_is_small_passes_a_long_transfer_and_is_counted(reads: bool) -> None:
    async def move(traffic: Traffic, size: int) -> float:
        loop = asyncio.get_running_loop()
        line, began = PacedStream(Endless(), LONG_S, traffic), loop.time()
        await (line.read(size) if reads else line.write(bytes(size)))
        return loop.time() - began

    async def story() -> None:
        traffic = Traffic()
        traffic.up.rate = traffic.down.rate = RATE
        long = asyncio.create_task(move(traffic, 50_000))
        other = asyncio.create_task(move(traffic, FREE_BYTES + 1))
        await asyncio.sleep(0)
        small = [await move(traffic, FREE_BYTES) for _ in range(10)]
        assert small == [0.0] * 10
        assert await other > 1.0, "what is not small waits for its turn, behind what went free"
        took = await long
        moved = 50_000 + 11 * FREE_BYTES + 1
        assert traffic.received + traffic.sent == moved
        assert took == pytest.approx(moved / RATE - BURST_S, abs=0.11)

    run_virtual(story())
