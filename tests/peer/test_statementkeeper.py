"""Statements between peers: each ends with the other's, keeps them, and blames only liars."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dugnad.averaging.board import Owner
from dugnad.averaging.owners import Bond, accept, offer
from dugnad.averaging.statements import EXCUSED, StatementSet
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId
from dugnad.dht.records import encode
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.daemon import Daemon
from dugnad.peer.ownerfiles import accept_offer, create_owner, offer_text, release_machine
from dugnad.peer.ownerfiles import sign_machine as sign
from dugnad.peer.paths import Home
from dugnad.peer.pull import Puller
from dugnad.peer.statementkeeper import KEY, StatementKeeper

from .transfer_world import RUN, Shelf, Swarm, swarm  # noqa: TID252  the world is no installed package

OWNER = Identity.ephemeral(b"o" * 32)
NOW = 1_764_500_000_000


class FakeStore:
    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}

    async def call(self, work: Any) -> Any:  # Any: as StoreThread.call
        return work(SimpleNamespace(kept=self.rows.get, keep=self.rows.__setitem__))


def daemon_in(folder: Path) -> Any:  # Any: stands in for a daemon
    home = Home(folder)
    home.create()
    notes: list[str] = []
    sent: list[tuple[PeerId, bytes]] = []
    refused: list[str] = []
    daemon = SimpleNamespace(
        home=home,
        boot=1,
        run_id=RUN,
        store=FakeStore(),
        notes=notes,
        note=lambda kind, text: notes.append(text),
        ledger=SimpleNamespace(fold=SimpleNamespace(lists=lambda peer: True)),
        swarm=SimpleNamespace(
            roster=None, puller=None, send=lambda to, told: sent.append((to, told.data))
        ),
        sent=sent,
        refused=refused,
        happenings=SimpleNamespace(refused=lambda peer, reason: refused.append(reason)),
        averager=SimpleNamespace(live=lambda: ()),
    )
    daemon.relay = CrowdRelay(cast(Daemon, daemon))
    return daemon


def bonds(count: int) -> list[bytes]:
    machines = [Identity.ephemeral(bytes([n, 7]) * 16) for n in range(count)]
    return [encode(accept(offer(OWNER, one.peer, "", NOW), one)) for one in machines]


async def shelf_with(records: list[bytes]) -> tuple[Swarm, StatementSet]:
    shelf = Shelf()
    for record in records:
        assert shelf.said.take(record, NOW) == ""
    return await swarm(shelf), shelf.said


async def test_a_peer_ends_with_the_statements_that_another_has(tmp_path: Path) -> None:
    network, there = await shelf_with(bonds(120))
    daemon = daemon_in(tmp_path)
    keeper = StatementKeeper(daemon)
    daemon.swarm.puller, daemon.averager.live = Puller(network.mine), lambda: network.peers
    await keeper.once()
    assert daemon.notes == []
    assert keeper.held.everything() == there.everything()
    assert keeper.said().owners == there.said().owners
    assert len(keeper.said().owners) == 120


async def test_what_was_heard_is_kept_over_a_restart(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path)
    keeper = StatementKeeper(daemon)
    for record in bonds(3):
        assert keeper.held.take(record, NOW) == ""
    await keeper.keep()
    again = StatementKeeper(daemon)
    await again.load()
    assert again.held.everything() == keeper.held.everything()
    daemon.store.rows[KEY] = b"\xc1"
    damaged = StatementKeeper(daemon)
    await damaged.load()
    assert damaged.held.everything() == ()
    assert "not used" in daemon.notes[0]


async def test_a_forged_statement_is_its_tellers_fault_and_not_kept(tmp_path: Path) -> None:
    network, there = await shelf_with(bonds(1))
    forged = encode(Bond(OWNER.peer, b"m" * 32, NOW, "", b"s" * 64, b"s" * 64))
    there._verifier = lambda peer, message, signature: True
    assert there.take(forged, NOW) == ""
    daemon = daemon_in(tmp_path)
    keeper = StatementKeeper(daemon)
    fault = await keeper.compare(Puller(network.mine), network.peers[0])
    assert "has not signed" in fault
    assert PeerId(b"m" * 32) not in keeper.said().owners


async def test_a_daemon_takes_up_its_own_bond_and_its_owners_releases(tmp_path: Path) -> None:
    owner, machine = daemon_in(tmp_path / "owner"), daemon_in(tmp_path / "machine")
    key = create_owner(owner.home, "Kari")
    me = Identity.create(machine.home.identity_key)
    keeper = StatementKeeper(machine)
    accept_offer(machine.home, offer_text(sign(owner.home, me.peer, NOW)))
    assert keeper.look() == ""
    assert keeper.said().owners == {me.peer: Owner(key.peer, "Kari")}
    at_owner = StatementKeeper(owner)
    assert at_owner.held.take(keeper.held.everything()[0], NOW) == ""
    release_machine(owner.home, me.peer)
    assert at_owner.look() == ""
    assert at_owner.said().owners == {}
    assert keeper.held.take(at_owner.held.everything()[0], NOW) == ""
    assert keeper.said().owners == {}
    machine.home.bond_file.write_bytes(b"\xc1")
    assert "damaged" in keeper.look()


async def test_what_is_said_is_told_to_the_live_once_and_forgeries_name_their_teller(
    tmp_path: Path,
) -> None:
    daemon, other = daemon_in(tmp_path / "one"), daemon_in(tmp_path / "other")
    daemon.averager.live = lambda: (OWNER.peer,)
    keeper, there = StatementKeeper(daemon), StatementKeeper(other)
    record = bonds(1)[0]
    assert keeper.say(record) == ""
    assert keeper.say(record) in EXCUSED
    assert daemon.sent == [(OWNER.peer, record)]
    there.told(OWNER.peer, record)
    there.told(OWNER.peer, record)
    assert there.held.everything() == (record,)
    assert other.refused == []
    there.told(OWNER.peer, encode(Bond(OWNER.peer, b"m" * 32, NOW, "", b"s" * 64, b"s" * 64)))
    assert "has not signed" in other.refused[0]
    assert other.sent == [], "who is told tells nobody"
