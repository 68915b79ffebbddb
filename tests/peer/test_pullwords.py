"""What a donor hears of its answers while they come in, and what it knows without being told."""

from __future__ import annotations

import asyncio

import pytest

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.tree import LEAF_PARAMS
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.ports import Stream
from dugnad.dht.records import decode, encode
from dugnad.peer.pacedstream import PacedStream, stream_time
from dugnad.peer.pull import Puller
from dugnad.peer.transfer import PullServer
from dugnad.peer.transferwire import (
    ANSWER_BYTES_MAX,
    PULL_PROTOCOL,
    REQUEST_BYTES_MAX,
    Answer,
    GetLeaves,
    GetManifest,
    GetPieces,
    Got,
    Here,
    NotHere,
    Request,
    Traffic,
)
from dugnad.peer.uplink import Uplink

from .test_pushing import Watched  # noqa: TID252  the tests are no installed package
from .transfer_world import (  # noqa: TID252  the same
    BIG,
    CALM,
    HOME,
    ME,
    RUN,
    WAIT_S,
    Shelf,
    world,
)
from .virtual_time import pass_time, run_virtual  # noqa: TID252  the same

LINE = 400_000.0
"""Bytes a second that the line of whoever pulls gives."""


async def answer(stream: Stream) -> Answer:
    data = await read_frame(stream, ANSWER_BYTES_MAX)
    found: Answer = decode(data, Answer, ANSWER_BYTES_MAX)  # type: ignore[arg-type]
    return found


def test_a_donor_learns_what_a_slow_line_takes_and_sends_no_more_than_that() -> None:
    async def story() -> None:
        _, (mine, donor) = await world(ME, HOME)
        meter, traffic = Watched(), Traffic()
        traffic.down.rate = LINE
        await PullServer(donor, RUN, Shelf(BIG), meter=meter).start()
        pulling = asyncio.create_task(
            Puller(mine, RUN, CALM, traffic=traffic).payload(
                [HOME.peer], BIG.header, BIG.state.theta.size
            )
        )
        most = 0
        while not pulling.done():
            await pass_time(0.05)
            for flow in meter.flows:
                most = max(most, flow.under_way)
                assert flow.under_way <= flow.window
        assert (await pulling).payload == BIG.commit.payload
        assert most > 0
        await pass_time(WAIT_S)
        # the bucket that plays the line lets a burst of a tenth of a second pass after each pause
        assert meter.rate(ME.peer) == pytest.approx(LINE, rel=0.4)

    run_virtual(story())


def test_whoever_tells_nothing_gets_everything_and_teaches_nothing() -> None:
    async def story() -> None:
        _, (mine, donor) = await world(ME, HOME)
        meter = Watched()
        await PullServer(donor, RUN, Shelf(BIG), meter=meter).start()
        stream = await mine.open(HOME.peer, PULL_PROTOCOL, WAIT_S)
        for first in range(20):  # an older release: it knows of no `tells`
            ask = GetPieces("payload", 1, BIG.digest, first, 1)
            await write_frame(stream, encode(ask))
            here = await answer(stream)
            assert isinstance(here, Here)
            assert here.each == 0
            await stream.read(here.size)
        stream.abort()
        await pass_time(WAIT_S)
        assert meter.rate(ME.peer) == 0.0

    run_virtual(story())


def test_a_word_of_progress_is_not_answered_and_a_false_one_does_no_harm() -> None:
    async def story() -> None:
        _, (mine, donor) = await world(ME, HOME)
        await PullServer(donor, RUN, Shelf(BIG)).start()
        stream = await mine.open(HOME.peer, PULL_PROTOCOL, WAIT_S)
        for total in (0, 1 << 62, 5):
            await write_frame(stream, encode(Got(total)))
        await write_frame(stream, encode(GetManifest(b"\0" * 32)))
        assert isinstance(await answer(stream), NotHere)
        stream.abort()
        await pass_time(WAIT_S)

    run_virtual(story())


def test_a_donor_of_an_older_release_that_wants_no_words_gets_none() -> None:
    async def story() -> None:
        _, (mine, donor) = await world(ME, HOME)
        heard: list[Request] = []

        async def older(stream: Stream) -> None:
            while True:
                data = await read_frame(stream, REQUEST_BYTES_MAX)
                asked: Request = decode(data, Request, REQUEST_BYTES_MAX)  # type: ignore[arg-type]
                heard.append(asked)
                answer = b"".join(BIG.commit.leaves)
                if isinstance(asked, GetPieces):
                    leaf = CODECS["int8"].encoded_size(LEAF_PARAMS)
                    answer = BIG.commit.payload[asked.first * leaf :][: asked.count * leaf]
                await write_frame(stream, encode(Here(len(answer))))
                await stream.write(answer)

        await donor.accept(PULL_PROTOCOL, older)
        found = await Puller(mine, RUN, CALM).payload([HOME.peer], BIG.header, BIG.state.theta.size)
        assert found.payload == BIG.commit.payload
        assert {type(one) for one in heard} == {GetLeaves, GetPieces}
        await pass_time(WAIT_S)

    run_virtual(story())


def test_of_a_stream_that_nobody_tells_of_the_uplink_counts_what_was_sent_as_there() -> None:
    """Else what it took away from the others would look like a line that gives less and less."""

    async def story() -> None:
        _, (mine, donor) = await world(ME, HOME)

        async def swallow(stream: Stream) -> None:
            await stream.read(300_000)

        await donor.accept(PULL_PROTOCOL, swallow)
        uplink = Uplink()
        line = PacedStream(
            await mine.open(HOME.peer, PULL_PROTOCOL, WAIT_S), WAIT_S, Traffic(uplink=uplink)
        )
        await line.write(bytes(300_000))
        assert uplink.under_way(stream_time()) == 0
        assert uplink.rate > Uplink().rate, "it rises: all arrives as it goes"
        line.abort()
        await pass_time(WAIT_S)

    run_virtual(story())
