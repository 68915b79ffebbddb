"""The organiser's word in a daemon: taken, kept, passed on, obeyed, and remembered."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dugnad.averaging.events import Ordered
from dugnad.averaging.formats import Word, decode_message
from dugnad.averaging.orders import NOTHING, Orders, banned, sign_orders, stopped, unbanned
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import encode
from dugnad.dht.roster_events import Bans, Known
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.orderkeeper import COPIES, LOOK_S, TOLD_TRIES, OrderKeeper
from dugnad.peer.paths import Home

ORGANISER, OTHER = Identity.ephemeral(b"o" * 32), Identity.ephemeral(b"x" * 32)
RUN = RunId(b"r" * 32)
BAD = PeerId(b"b" * 32)


class FakeRoster:
    def __init__(self) -> None:
        self.crowded = False
        self.bans: tuple[PeerId, ...] = ()
        self.fed: list[object] = []

    def banned(self) -> tuple[PeerId, ...]:
        return self.bans

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        return ("/ip4/10.0.0.1/tcp/1",)

    def feed(self, event: object) -> None:
        self.fed.append(event)
        if isinstance(event, Bans):
            self.bans = tuple(event.reasons)


class FakeBook:
    def __init__(self, *values: bytes) -> None:
        self.values = dict(enumerate(values))
        self.stored: list[bytes] = []
        self.gets = 0

    async def meet(self, peers: tuple[PeerId, ...]) -> int:
        return len(peers)

    async def get(self, key: str) -> dict[Any, bytes]:
        self.gets += 1
        return self.values

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        self.stored.append(value)
        return True


class Net:
    """Keepers that tell each other at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[PeerId, Any] = {}  # Any: stand-ins for daemons

    def add(self, name: bytes, *, met: bool = True) -> Any:
        me = PeerId(name * 32)
        home = Home(self.folder / name.decode())
        home.create()
        home.run(RUN).create()
        notes: list[str] = []
        roster = FakeRoster()
        daemon: Any = SimpleNamespace(  # Any: stands in for a daemon
            home=home,
            run_id=RUN,
            identity=SimpleNamespace(peer=me),
            manifest=SimpleNamespace(organiser=bytes(ORGANISER.peer)),
            notes=notes,
            note=lambda kind, text: notes.append(text),
            fed=[],
            refused=[],
            roster=roster,
        )
        daemon.averager = SimpleNamespace(
            feed_all=daemon.fed.append,
            live=lambda: tuple(p for p in self.daemons if p != me) if met else (),
        )
        daemon.unsent = frozenset()
        daemon.swarm = SimpleNamespace(
            roster=roster,
            shell=roster,
            send=lambda to, message: self.send(me, to, message),
            waiting=lambda peer: peer in daemon.unsent,
            substrate=FakeBook(),
        )
        daemon.looks = []
        daemon.own = lambda work, name: daemon.looks.append(asyncio.ensure_future(work))
        daemon.relay = CrowdRelay(daemon)
        daemon.happenings = SimpleNamespace(
            label=lambda peer: "somebody",
            refused=lambda peer, reason: daemon.refused.append(reason),
        )
        daemon.orders = OrderKeeper(daemon)
        self.daemons[me] = daemon
        return daemon

    def send(self, sender: PeerId, to: PeerId, message: Word) -> None:
        read = decode_message(encode(message))
        assert isinstance(read, Word)
        self.daemons[to].orders.heard(sender, read.data)


def signed(orders: Orders, by: Identity = ORGANISER) -> bytes:
    return encode(sign_orders(orders, RUN, by))


async def test_a_stop_reaches_all_and_says_why(tmp_path: Path) -> None:
    net = Net(tmp_path)
    all_of_them = [net.add(name) for name in (b"1", b"2", b"3")]
    assert all_of_them[0].orders.take(signed(stopped(NOTHING, "done", 1))) == ""
    for daemon in all_of_them:
        assert daemon.fed == [Ordered(True, frozenset())]
        assert daemon.orders.stop_reason() == "the organiser stopped the run: done"
        assert daemon.notes == ["the organiser stopped the run: done"]
        daemon.orders.close()


async def test_a_restart_remembers(tmp_path: Path) -> None:
    net = Net(tmp_path)
    first = net.add(b"1")
    orders = banned(stopped(NOTHING, "done", 1), BAD, "floods", 1)
    assert first.orders.take(signed(orders)) == ""
    first.orders.close()
    again = Net(tmp_path).add(b"1")
    again.orders.load()
    again.orders.joined()
    assert again.fed == [Ordered(True, frozenset({BAD}))]
    assert again.orders.refusal(BAD) == "banned by the organiser: floods"
    assert again.roster.fed == [Bans({BAD: "banned by the organiser: floods"})]


async def test_a_damaged_file_is_said_and_passed_over(tmp_path: Path) -> None:
    daemon = Net(tmp_path).add(b"1")
    daemon.home.run(RUN).orders.write_bytes(b"\xc1")
    daemon.orders.load()
    assert "are not used" in daemon.notes[0]
    assert daemon.orders.held == NOTHING


async def test_forged_and_older_orders_change_nothing(tmp_path: Path) -> None:
    net = Net(tmp_path)
    daemon, sender = net.add(b"1"), net.add(b"2", met=False)
    newest = banned(banned(NOTHING, BAD, "floods", 5), PeerId(b"c" * 32), "lies", 5)
    daemon.orders.take(signed(newest))
    held = daemon.orders.held
    assert "not signed" in daemon.orders.take(signed(stopped(newest, "mine now", 9), OTHER))
    daemon.orders.heard(sender.identity.peer, signed(stopped(newest, "mine now", 9), OTHER))
    assert "not signed" in daemon.refused[0]
    old = signed(banned(NOTHING, BAD, "old", 1))
    assert "newer" in daemon.orders.take(old)
    sender.orders.held = NOTHING
    daemon.orders.heard(sender.identity.peer, old)
    assert sender.orders.held == held, "whoever tells old orders is told the new ones"
    assert daemon.orders.held == held
    daemon.orders.close()
    sender.orders.close()


async def test_a_newcomer_is_told_and_told_nothing_where_nothing_was_ordered(
    tmp_path: Path,
) -> None:
    net = Net(tmp_path)
    old = net.add(b"1", met=False)
    new = net.add(b"2", met=False)
    old.orders.tell(new.identity.peer)
    assert new.orders.held == NOTHING
    old.orders.take(signed(stopped(NOTHING, "done", 1)))
    old.orders.tell(new.identity.peer)
    assert new.orders.held.stop == "done"
    old.orders.close()
    new.orders.close()


async def test_a_lifted_ban_opens_the_streams_again(tmp_path: Path) -> None:
    daemon = Net(tmp_path).add(b"1")
    orders = banned(NOTHING, BAD, "floods", 1)
    daemon.orders.take(signed(orders))
    daemon.orders.close()
    daemon.orders.joined()
    daemon.orders.take(signed(unbanned(orders, BAD, 1)))
    daemon.orders.close()
    daemon.orders.joined()
    assert daemon.orders.refusal(BAD) == ""
    assert daemon.roster.fed[1] == Bans({})
    assert isinstance(daemon.roster.fed[2], Known)
    assert daemon.fed[-1] == Ordered(False, frozenset())


async def test_a_banned_peer_that_hears_of_it_trains_no_more(tmp_path: Path) -> None:
    daemon = Net(tmp_path).add(b"1")
    daemon.orders.take(signed(banned(NOTHING, daemon.identity.peer, "floods", 1)))
    assert daemon.orders.stop_reason() == "the organiser banned this peer: floods"
    daemon.orders.close()


async def test_orders_come_from_the_address_book_and_a_few_copies_stay_there(
    tmp_path: Path,
) -> None:
    daemon = Net(tmp_path).add(b"1")
    data = signed(stopped(NOTHING, "done", 1))
    forged = signed(stopped(NOTHING, "forged", 9), OTHER)
    few, enough = FakeBook(forged, data), FakeBook(*[data] * COPIES)
    await daemon.orders.use_book(few)
    assert daemon.orders.held.stop == "done"
    assert few.stored == [data]
    await daemon.orders.use_book(enough)
    assert enough.stored == []
    daemon.orders.close()
    await asyncio.gather(*daemon.looks)


async def turns(count: int) -> None:
    """Lets the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_new_orders_go_into_the_address_book_at_once(tmp_path: Path) -> None:
    daemon = Net(tmp_path).add(b"1")
    data = signed(banned(NOTHING, BAD, "floods", 1))
    daemon.orders.take(data)
    await asyncio.gather(*daemon.looks)
    assert daemon.swarm.substrate.stored == [data]
    daemon.orders.close()


async def test_a_banned_peer_that_missed_the_word_finds_it_when_it_is_refused(
    tmp_path: Path,
) -> None:
    daemon = Net(tmp_path).add(b"1")
    orders = signed(banned(NOTHING, daemon.identity.peer, "floods", 1))
    daemon.swarm.substrate = FakeBook(orders)
    daemon.orders.shut_out(100.0)
    await asyncio.gather(*daemon.looks)
    assert daemon.orders.stop_reason() == "the organiser banned this peer: floods"
    looked = daemon.swarm.substrate.gets
    daemon.orders.shut_out(100.0 + LOOK_S - 1.0)
    await asyncio.gather(*daemon.looks)
    assert daemon.swarm.substrate.gets == looked, "and does not look at each refusal"
    daemon.orders.close()


def banning(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ban is taken, and the word to the banned peer waits to be sent."""
    monkeypatch.setattr("dugnad.peer.orderkeeper.TOLD_S", 0.0)
    daemon.unsent = {BAD}
    daemon.orders.take(signed(banned(NOTHING, BAD, "floods", 1)))


async def test_streams_stay_open_while_the_word_to_a_banned_peer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Net(tmp_path).add(b"1")
    banning(daemon, monkeypatch)
    await turns(5)
    assert daemon.roster.fed == []
    daemon.unsent = set()
    await turns(5 * TOLD_TRIES)
    assert daemon.roster.bans == (BAD,)
    daemon.orders.close()


async def test_a_word_that_does_not_go_out_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Net(tmp_path).add(b"1")
    banning(daemon, monkeypatch)
    await turns(5 * TOLD_TRIES)
    assert daemon.roster.bans == (BAD,)
    daemon.orders.close()
