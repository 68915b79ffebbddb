"""An observer among peers: it sees them, takes what is true, and is in nobody's roster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dugnad.averaging.formats import CommitRecord, HeadRow
from dugnad.dht.advert import Advert, sign_advert
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.memory import MemoryNetwork
from dugnad.dht.records import RecordError, encode
from dugnad.peer import receiptsync
from dugnad.peer.addressbook import publish
from dugnad.peer.assembly import credit_rules
from dugnad.peer.newswire import News, decode_news
from dugnad.peer.observernet import Scout
from dugnad.peer.observerview import peer_row
from dugnad.peer.pageviews import Moment
from dugnad.peer.sightings import Came, Change, Silent, Went
from dugnad.peer.storethread import StoreThread
from dugnad.peer.transfer import PullServer

from .receipt_world import PEOPLE, Made  # noqa: TID252  the world is no installed package
from .transfer_world import ME, WAIT_S, Shelf  # noqa: TID252


class Peer(Shelf):
    """A peer of a made run, as far as an observer asks it."""

    def __init__(self, made: Made, who: Identity, address: str) -> None:
        super().__init__()
        self.made = made
        self.who = who
        self.by_name = dict(made.commits)
        self.advert = sign_advert(
            Advert(peer=who.peer, boot=1, seq=1, addresses=(address,), tokens_per_s=50.0),
            who,
            made.run,
        )
        self.tells()

    def tells(self, *others: Advert, left: tuple[PeerId, ...] = (), **more: object) -> None:
        self.told = encode(News(adverts=(self.advert, *others), left=left, **more))  # type: ignore[arg-type]

    def heads(self) -> tuple[HeadRow, ...]:
        return tuple(HeadRow(p, tip.version, tip.digest) for p, tip in enumerate(self.made.tips))

    def digests(self, fragment: int, since_ms: int) -> list[bytes]:
        return sorted(d for d, c in self.by_name.items() if c.header.fragment == fragment)

    def commits(self, fragment: int, digest: bytes, count: int) -> tuple[CommitRecord, ...]:
        found: list[CommitRecord] = []
        while digest in self.by_name and len(found) < count:
            found.append(self.by_name[digest])
            digest = found[-1].header.parent
        return tuple(found)


@dataclass
class World:
    """Two peers, and me who watch."""

    made: Made
    network: MemoryNetwork
    peers: list[Peer]
    store: StoreThread
    scout: Scout
    changes: list[Change] = field(default_factory=list)
    now: float = 0.0

    async def held(self) -> set[bytes]:
        def names() -> set[bytes]:
            assert self.store._store is not None
            store = self.store._store
            return {d for p in range(self.made.fragments) for d in store.digests(p, 0)}

        return await self.store.call(lambda _: names())


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(receiptsync, "window_start", lambda wall_ms: 0)
    made, network, store = Made().go(3), MemoryNetwork(), StoreThread()
    mine = network.join(ME.peer)
    peers = []
    for who in PEOPLE[:2]:
        transport = network.join(who.peer)
        peer = Peer(made, who, network.address_of(who.peer))
        await PullServer(transport, made.run, peer, idle_s=WAIT_S).start()
        peers.append(peer)
    await store.open(tmp_path / "state", made.run)
    rules = credit_rules(made.manifest, made.run)
    changes: list[Change] = []
    scout = Scout(mine, network.book(ME.peer), store, rules, lambda: found.now, changes.append)
    found = World(made, network, peers, store, scout, changes)
    yield found
    await mine.close()
    await store.close()


async def test_who_is_asked_tells_of_the_others_and_brings_the_receipts(world: World) -> None:
    a, b = world.peers
    a.tells(b.advert, train_loss=1.5, tokens=9)
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    assert world.changes == [Came(a.who.peer), Came(b.who.peer)]
    assert world.scout.news[a.who.peer].train_loss == 1.5
    assert await world.held() == {digest for digest, _ in world.made.commits}
    assert world.scout.fresh
    world.now = 10.0
    await world.scout.ask(b.who.peer)  # its address is known from its advert
    assert world.scout.sightings.answering() == sorted(p.who.peer for p in world.peers)


async def test_a_killed_peer_is_gone_once_nobody_names_it(world: World) -> None:
    a, b = world.peers
    for one, other in ((a, b), (b, a)):
        one.tells(other.advert)
        world.scout.know(world.network.address_of(one.who.peer))
        await world.scout.ask(one.who.peer)
    world.network.kill(b.who.peer)
    world.now = 5.0
    await world.scout.ask(b.who.peer)
    assert len(world.changes) == 2
    a.tells()
    await world.scout.ask(a.who.peer)
    (gone,) = world.changes[2:]
    assert isinstance(gone, Went)
    assert (gone.peer, gone.left) == (b.who.peer, False)
    assert b.who.peer not in world.scout.news


async def test_an_advert_that_its_maker_has_not_signed_is_passed_over(world: World) -> None:
    a, b = world.peers
    a.tells(msgspec.structs.replace(b.advert, tokens_per_s=9e9))
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    assert world.scout.sightings.here() == [a.who.peer]


async def test_a_peer_that_serves_a_forged_receipt_is_not_believed(world: World) -> None:
    a, _ = world.peers
    digest, record = next(
        row
        for row in world.made.commits
        if (row[1].header.fragment, row[1].header.version) == (0, 2)
    )
    bad = msgspec.structs.replace(record.header, signature=b"x" * 64)
    a.by_name[digest] = CommitRecord(bad, record.inputs)
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    assert digest not in await world.held()
    assert "refused" in world.scout.sightings.peers[a.who.peer].reason


async def test_an_older_peer_that_knows_no_news_still_shows_where_the_run_stands(
    world: World,
) -> None:
    a, _ = world.peers
    a.told = None
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    assert world.scout.sightings.here() == [a.who.peer]
    assert len(await world.held()) == len(world.made.commits)


async def test_one_answer_that_fails_makes_nobody_go_and_two_do(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = world.peers
    a.tells(b.advert)
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    answers = [None, a.told, None, None]
    monkeypatch.setattr(a, "news", lambda: answers.pop(0))
    world.now = 1.0
    await world.scout.ask(a.who.peer)
    assert world.changes == [Came(a.who.peer), Came(b.who.peer)]
    world.now = 2.0
    await world.scout.ask(a.who.peer)
    assert [type(one) for one in world.changes[2:]] == [Went, Went]


async def test_receipts_of_forks_come_by_comparing(world: World) -> None:
    a, _ = world.peers
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    tip = world.made.tips[0]
    world.made.tips[0] = world.made.lineages[0].genesis
    pieces = world.made.commits[0][1].inputs[2].pieces
    alone = [world.made.listing(PEOPLE[2], 0, pieces)]
    fork, record = world.made.merge(0, PEOPLE[2], alone)
    world.made.tips[0] = tip
    a.by_name[fork] = record
    assert await world.scout.compare() is not None
    assert fork in await world.held()


async def test_peers_are_found_in_the_address_book(world: World) -> None:
    a, b = world.peers
    for one in (a, b):
        await publish(world.network.book(one.who.peer), world.made.run, one.advert)
    for _ in range(4):
        await world.scout.look_up()
    assert world.changes == []  # being in the book is not being here
    assert set(world.scout.sightings.due(0.0, 9)) == {a.who.peer, b.who.peer}


async def test_rows_say_what_is_known_of_a_peer_and_no_address(world: World) -> None:
    a, b = world.peers
    a.tells(b.advert)
    world.scout.know(world.network.address_of(a.who.peer))
    await world.scout.ask(a.who.peer)
    seen = world.scout.sightings.peers
    at = Moment(5.0, 5_000)
    row = peer_row(a.who.peer, seen[a.who.peer], 7, "int8", at)
    assert (row.state, row.reason, row.link, row.listed_tokens) == ("training", "", "direct", 7)
    assert (row.tokens_per_s, row.since_ms, row.gone_ms) == (50.0, 0, 0)
    world.scout.tell(Silent(b.who.peer, "/ip4/9.8.7.6/tcp/1: connection refused"))
    row = peer_row(b.who.peer, seen[b.who.peer], 0, "int8", at)
    assert (row.state, row.gone_ms) == ("here", 0)
    assert row.reason == "others see it; from here: (address) connection refused"
    a.tells()
    await world.scout.ask(a.who.peer)
    row = peer_row(b.who.peer, seen[b.who.peer], 0, "int8", at)
    assert (row.state, row.tokens_per_s) == ("unreachable", 0.0)


def test_news_with_a_loss_that_is_no_number_are_refused() -> None:
    with pytest.raises(RecordError, match="no number"):
        decode_news(encode(News(adverts=(), train_loss=float("nan"))))
    with pytest.raises(RecordError):
        decode_news(b"\xc1")
