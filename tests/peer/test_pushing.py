"""A contribution as its link carries it: words of progress, window and pace."""

from __future__ import annotations

import asyncio

import pytest

from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.ids import PeerId
from dugnad.dht.memory import MemoryTransport
from dugnad.dht.ports import Stream
from dugnad.dht.records import decode, encode, verify_ed25519
from dugnad.peer.flow import Flow, Rates
from dugnad.peer.pushing import push, word_of
from dugnad.peer.transfer import ContributionServer
from dugnad.peer.transferwire import (
    CONTRIBUTE_PROTOCOL,
    OFFER_BYTES_MAX,
    Offer,
    Traffic,
)

from .transfer_world import (  # noqa: TID252  the tests are no installed package
    HOME,
    ME,
    PIECES,
    RUN,
    Inbox,
    made_contribution,
    made_payload,
    size_of,
    world,
)
from .virtual_time import pass_time, run_virtual  # noqa: TID252  the same

LONG_S = 60.0
LINE = 100_000.0
"""Bytes a second that the home's line gives."""


class Watched(Rates):
    """A meter that keeps its flows."""

    def __init__(self) -> None:
        super().__init__(lambda: asyncio.get_running_loop().time(), lambda peer: 0.05)
        self.flows: list[Flow] = []

    def begin(self, peer: PeerId) -> Flow:
        self.flows.append(super().begin(peer))
        return self.flows[-1]


async def slow_home(inbox: Inbox) -> MemoryTransport:
    """My transport, connected to a home behind a slow line."""
    _, (mine, home) = await world(ME, HOME)
    traffic = Traffic()
    traffic.down.rate = LINE
    server = ContributionServer(home, RUN, size_of, inbox.take, verify_ed25519, traffic=traffic)
    await server.start()
    return mine


def test_the_rate_of_a_slow_line_is_learned_and_nothing_is_sent_that_it_cannot_take() -> None:
    async def story() -> None:
        inbox, meter, sent = Inbox(), Watched(), Traffic()
        mine = await slow_home(inbox)
        payload = made_payload()
        made = made_contribution(payload)
        pushing = asyncio.create_task(
            push(mine, HOME.peer, made, PIECES, payload, LONG_S, traffic=sent, meter=meter)
        )
        arrived = 0.0
        while not pushing.done():
            await pass_time(0.05)
            if meter.flows:
                arrived = max(arrived, meter.flows[0].under_way)
                assert meter.flows[0].under_way <= meter.flows[0].window
        assert await pushing == ""
        assert inbox.taken == [(made, PIECES, payload)]
        assert 0 < arrived < len(payload) / 3
        # the bucket that plays the line lets a burst of a tenth of a second pass after each pause
        assert meter.rate(HOME.peer) == pytest.approx(LINE, rel=0.4)

    run_virtual(story())


def test_a_receiver_of_an_older_release_tells_nothing_and_still_gets_everything() -> None:
    async def story() -> None:
        _, (mine, home) = await world(ME, HOME)
        got: list[bytes] = []

        async def older(stream: Stream) -> None:
            await read_frame(stream, OFFER_BYTES_MAX)
            got.append(await stream.read(len(payload)))
            await write_frame(stream, b"")

        await home.accept(CONTRIBUTE_PROTOCOL, older)
        payload, meter = made_payload(), Watched()
        answer = await push(
            mine, HOME.peer, made_contribution(payload), PIECES, payload, LONG_S, meter=meter
        )
        assert answer == ""
        assert got == [payload]

    run_virtual(story())


def test_what_is_no_word_of_progress_is_an_answer() -> None:
    async def story() -> None:
        _, (mine, home) = await world(ME, HOME)

        async def odd(stream: Stream) -> None:
            offer = decode(await read_frame(stream, OFFER_BYTES_MAX), Offer, OFFER_BYTES_MAX)
            assert offer.tells
            await write_frame(stream, word_of(1 << 60))
            await write_frame(stream, word_of(0))
            await write_frame(stream, b"too late")

        await home.accept(CONTRIBUTE_PROTOCOL, odd)
        payload, meter = made_payload(), Watched()
        answer = await push(
            mine, HOME.peer, made_contribution(payload), PIECES, payload, LONG_S, meter=meter
        )
        assert answer == "too late"

    run_virtual(story())


def test_an_offer_of_an_older_release_wants_no_words() -> None:
    payload = made_payload()
    made = made_contribution(payload)
    older = encode((made, PIECES))
    assert not decode(older, Offer, OFFER_BYTES_MAX).tells
