"""Transfers one after the other on one direct stream, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.tree import LEAF_PARAMS
from dugnad.dht import keptstreams
from dugnad.dht.direct import DirectTransport
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import Stream
from dugnad.dht.records import decode, encode, verify_ed25519
from dugnad.dht.tlsstream import TlsStream
from dugnad.peer import transfer
from dugnad.peer.flow import Flow, Rates
from dugnad.peer.pacedstream import LOOK_S, stream_time
from dugnad.peer.pull import Puller
from dugnad.peer.pushing import push
from dugnad.peer.transfer import ContributionServer, PullServer
from dugnad.peer.transferwire import (
    CONTRIBUTE_PROTOCOL,
    PULL_PROTOCOL,
    REQUEST_BYTES_MAX,
    Blame,
    GetHeads,
    GetPieces,
    Here,
    PullError,
    Request,
    Rest,
)

from .transfer_world import (  # noqa: TID252  the tests are no installed package
    BIG,
    CALM,
    HOME,
    ME,
    PIECES,
    RUN,
    Inbox,
    Shelf,
    made_contribution,
    made_payload,
    size_of,
    world,
)
from .virtual_time import until  # noqa: TID252  the same

pytestmark = pytest.mark.slow

WAIT_S = 10.0
PROTOCOLS = (CONTRIBUTE_PROTOCOL, PULL_PROTOCOL)


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[DirectTransport, DirectTransport]]:
    """My transport and the home's, which reach each other directly."""
    _, bases = await world(ME, HOME)
    made = []
    for base, who in zip(bases, (ME, HOME), strict=True):
        one = DirectTransport(base, who, folder, protocols=PROTOCOLS, hosts=("127.0.0.1",))
        await one.start()
        made.append(one)
    try:
        yield made[0], made[1]
    finally:
        for one in made:
            await one.close()


async def drawn(puller: Puller) -> None:
    """Get the big payload."""
    size = BIG.state.theta.size
    assert await puller.payload([HOME.peer], BIG.header, size) == BIG.commit


async def pushed(mine: DirectTransport, seq: int, *, good: bool = True) -> str:
    payload = made_payload()
    made = made_contribution(payload, seq=seq)
    sent = payload if good else bytes([payload[0] ^ 1]) + payload[1:]
    return await push(mine, HOME.peer, made, PIECES, sent, WAIT_S)


async def test_pulls_one_after_the_other_share_a_stream(tmp_path: Path) -> None:
    async with pair(tmp_path) as (mine, home):
        shelf = Shelf(BIG)
        await PullServer(home, RUN, shelf).start()
        puller = Puller(mine, RUN, CALM)
        for _ in range(3):
            await drawn(puller)
        assert (mine.counts.direct, mine.counts.again) == (1, 2)
        with pytest.raises(PullError):  # a small thing that is not there ends it
            await puller.shard([HOME.peer], 99, bytes(32))
        await drawn(puller)
        assert (mine.counts.direct, mine.counts.again) == (2, 3)


async def test_contributions_one_after_the_other_share_a_stream_until_one_is_refused(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (mine, home):
        inbox = Inbox()
        await ContributionServer(home, RUN, size_of, inbox.take, verify_ed25519).start()
        assert [await pushed(mine, seq) for seq in (1, 2)] == ["", ""]
        assert (mine.counts.direct, mine.counts.again) == (1, 1)
        assert await pushed(mine, 3, good=False) == "the payload does not match its root"
        assert await pushed(mine, 4) == ""
        assert (mine.counts.direct, mine.counts.again) == (2, 2)
        assert [made.seq for made, _, _ in inbox.taken] == [1, 2, 4]


async def test_a_stream_at_rest_takes_no_place_of_those_that_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PULLS_PER_PEER_MAX", 1)
    async with pair(tmp_path) as (mine, home):
        await PullServer(home, RUN, Shelf(BIG)).start()
        await drawn(Puller(mine, RUN, CALM))
        resting = mine._kept.take(HOME.peer, PULL_PROTOCOL)
        assert resting is not None
        await drawn(Puller(mine, RUN, CALM))  # over another one
        assert mine.counts.direct == 2
        resting.abort()


async def test_more_streams_than_may_rest_end_after_their_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "RESTING_PER_PEER_MAX", 0)
    async with pair(tmp_path) as (mine, home):
        inbox = Inbox()
        await ContributionServer(home, RUN, size_of, inbox.take, verify_ed25519).start()
        await PullServer(home, RUN, Shelf(BIG)).start()
        await drawn(Puller(mine, RUN, CALM))
        assert await pushed(mine, 1) == ""
        await until(lambda: not len(home._streams), WAIT_S)
        await drawn(Puller(mine, RUN, CALM))
        assert await pushed(mine, 2) == ""
        assert (mine.counts.direct, mine.counts.again) == (4, 0)


async def test_a_transfer_is_measured_until_all_of_it_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until it was given to the socket: the uplink's pace then forgot what was in its queues,
    and a line of 2 Mbit/s was taken for one of 50 and more."""
    left = [5000]
    monkeypatch.setattr(TlsStream, "unsent", lambda self: left[0])
    async with pair(tmp_path) as (mine, home):
        meter = Ends(stream_time)
        await PullServer(home, RUN, Shelf(BIG), meter=meter).start()
        await drawn(Puller(mine, RUN, CALM))
        await asyncio.sleep(5 * LOOK_S)
        assert meter.ends == 0
        left[0] = 0
        await until(lambda: meter.ends > 0, WAIT_S)
        await asyncio.sleep(5 * LOOK_S)
        assert meter.ends == 1


class Ends(Rates):
    """Counts what it learned from."""

    ends = 0

    def end(self, peer: PeerId, flow: Flow) -> None:
        """Count."""
        self.ends += 1
        super().end(peer, flow)


async def test_streams_that_died_while_they_were_kept_are_replaced(tmp_path: Path) -> None:
    async with pair(tmp_path) as (mine, home):
        inbox = Inbox()
        await ContributionServer(home, RUN, size_of, inbox.take, verify_ed25519).start()
        await PullServer(home, RUN, Shelf(BIG)).start()
        blamed: list[Blame] = []
        puller = Puller(mine, RUN, CALM, blamed=blamed.append)
        await drawn(puller)
        assert await pushed(mine, 1) == ""
        home._streams.abort_all()
        kept = mine._kept._waiting
        for stream in kept:  # as where the word of the end is lost: it is noticed in use
            stream.is_quiet = lambda: True  # type: ignore[method-assign]
        await drawn(puller)
        assert await pushed(mine, 2) == ""
        assert not blamed
        assert (mine.counts.direct, mine.counts.again) == (4, 2)


async def test_where_an_older_release_ends_the_stream_the_next_one_is_new(
    tmp_path: Path,
) -> None:
    async def older(stream: Stream) -> None:
        while True:
            data = await read_frame(stream, REQUEST_BYTES_MAX)
            asked: Request = decode(data, Request, REQUEST_BYTES_MAX)  # type: ignore[arg-type]
            if isinstance(asked, Rest):  # to such a release a record that it does not know
                return
            answer = encode(()) if isinstance(asked, GetHeads) else b"".join(BIG.commit.leaves)
            if isinstance(asked, GetPieces):
                leaf = CODECS["int8"].encoded_size(LEAF_PARAMS)
                answer = BIG.commit.payload[asked.first * leaf :][: asked.count * leaf]
            await write_frame(stream, encode(Here(len(answer))))
            await stream.write(answer)

    async with pair(tmp_path) as (mine, home):
        await home.accept(PULL_PROTOCOL, older)
        puller = Puller(mine, RUN, CALM)
        await drawn(puller)
        assert await puller.heads([HOME.peer]) == ()
        await until(lambda: not len(home._streams), WAIT_S)
        await drawn(puller)
        assert (mine.counts.direct, mine.counts.again) == (2, 1)


async def test_streams_that_nobody_needs_end_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keptstreams, "KEPT_S", 0.1)
    async with pair(tmp_path) as (mine, home):
        await PullServer(home, RUN, Shelf(BIG)).start()
        await drawn(Puller(mine, RUN, CALM))
        assert len(mine._streams) == len(home._streams) == 1
        await until(lambda: not (len(mine._streams) or len(home._streams)), WAIT_S)
