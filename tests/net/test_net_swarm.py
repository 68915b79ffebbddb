"""A swarm of real daemons over an emulated network: delay, loss, a partition, a wrong clock, a
killed libp2p daemon, and a peer behind a router that lets nothing in.

One swarm serves all tests of this module, since getting up takes longer than each of them; every
test leaves it whole.
"""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest
from _nethosts import Hosts, missing
from _wan import Line

from dugnad.averaging.formats import HEADER_BYTES_MAX, Header
from dugnad.averaging.join import JOIN
from dugnad.dht.ids import PeerId, peer_text
from dugnad.dht.link import format_link, parse_link
from dugnad.dht.records import decode

from ..peer.processes import run_file  # noqa: TID252  the tests are no installed package
from .netswarm import NetPeer, NetSwarm, clock_shift  # noqa: TID252  the same

pytestmark = [pytest.mark.net, pytest.mark.slow]

LINES = {
    "a": Line(20, 20, delay_ms=15),
    "b": Line(20, 20, delay_ms=25, loss=0.01),
    "c": Line(10, 20, delay_ms=40, loss=0.01),
    "inside": Line(10, 20, delay_ms=20),
    "late": Line(20, 20, delay_ms=5),
}
EVERYBODY = tuple(name for name in LINES if name != "late")
NOBODY = PeerId(bytes(32))
CLOCK_AHEAD_S = 30
APART = 7
"""Versions that two halves go on for alone: more than F = 4, so that a join is due."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetSwarm]:
    """Four daemons: the clock of `c` is half a minute ahead, `inside` sits behind a NAT router."""
    if reason := missing(nat=True):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("net")
    with Hosts(LINES, behind_nat={"inside"}, seed=1) as hosts:
        found = NetSwarm(hosts, folder)
        first = found.launch("a", "start", str(run_file(folder)))
        link = found.wait_for(first.link, 30.0, "the link")
        found.launch("b", "join", link)
        found.launch("c", "join", link, **clock_shift(folder / "clock", CLOCK_AHEAD_S))
        found.launch("inside", "join", link, "--outbound-only")
        yield found


def test_a_swarm_merges_over_lines_with_delay_and_loss(swarm: NetSwarm) -> None:
    swarm.until_merged(EVERYBODY, 3, 60.0)
    for name in EVERYBODY:
        swarm.wait_for(
            partial(_listed, swarm.peers[name]), 30.0, f"a listed contribution of {name}"
        )
    counts = swarm.hosts.counts()
    assert counts["b"]["lost"] > 0, "the network lost something"
    swarm.wait_for(partial(swarm.agreed, EVERYBODY), 30.0, "equal heads")


def test_a_peer_behind_a_nat_router_contributes_and_nobody_can_dial_it(swarm: NetSwarm) -> None:
    inside = swarm.peers["inside"]
    peer = swarm.wait_for(inside.status, 10.0, "its status")["peer"]
    assert swarm.peers["a"].status()["peers_live"] == len(EVERYBODY)
    with pytest.raises(OSError):  # noqa: PT011  refused or timed out, as the router likes
        swarm.hosts["a"].call(partial(_dial, swarm.hosts["inside"].address))
    assert _tokens(swarm.peers["a"], peer) > 0


def test_a_clock_that_is_half_a_minute_ahead_is_measured_and_harms_nobody(swarm: NetSwarm) -> None:
    ahead = swarm.peers["c"]
    status = swarm.wait_for(ahead.status, 10.0, "its status")
    assert status["clock_offset_s"] == pytest.approx(-CLOCK_AHEAD_S, abs=2.0)
    for name in ("a", "b", "inside"):
        assert abs(swarm.peers[name].status()["clock_offset_s"]) < 2.0
    assert _listed(ahead)


def test_halves_that_were_parted_for_long_are_joined_when_they_meet_again(
    swarm: NetSwarm,
) -> None:
    halves = ("a", "inside"), ("b", "c")
    swarm.hosts.split(*halves)
    try:
        versions = [peer.status()["versions"] for peer in swarm.peers.values()]
        top = [max(column) for column in zip(*versions, strict=True)]
        for peer in swarm.peers.values():
            swarm.wait_for(partial(_went_on, peer, top), 90.0, f"versions of {peer.name}")
        assert not swarm.agreed(EVERYBODY), "two halves that hear nothing go different ways"
    finally:
        swarm.hosts.split()
    swarm.wait_for(partial(swarm.agreed, EVERYBODY), 60.0, "equal heads")
    for peer in swarm.peers.values():
        swarm.wait_for(partial(_joins, peer, min(top)), 20.0, f"a join at {peer.name}")


def test_a_killed_p2pd_comes_back_with_the_same_key_and_port_under_the_same_daemon(
    swarm: NetSwarm,
) -> None:
    peer = swarm.peers["b"]
    before = swarm.wait_for(peer.status, 10.0, "its status")
    (old,) = peer.p2pds()
    old.kill()

    def back() -> bool:
        status = peer.status()
        new = [one.pid for one in peer.p2pds() if one.pid != old.pid]
        return bool(status) and len(new) == 1 and status["peers_live"] == len(EVERYBODY)

    swarm.wait_for(back, 30.0, "the reunion")
    after = peer.status()
    assert (after["pid"], after["peer"]) == (before["pid"], before["peer"])
    assert set(after["addresses"]) == set(before["addresses"])
    top = max(swarm.peers[name].version() for name in EVERYBODY)
    swarm.until_merged(EVERYBODY, top + 2, 30.0)
    swarm.wait_for(partial(swarm.agreed, EVERYBODY), 30.0, "equal heads")


def test_a_link_whose_peers_have_all_gone_leads_to_a_neighbour_of_the_run(swarm: NetSwarm) -> None:
    run = parse_link(swarm.peers["a"].link()).run
    gone = f"/ip4/{swarm.hosts['late'].address}/tcp/9/p2p/{peer_text(NOBODY)}"
    late = swarm.launch("late", "join", format_link(run, [gone]))
    swarm.wait_for(late.status, 30.0, "its status")
    swarm.wait_for(lambda: late.status()["peers_live"] == len(LINES), 30.0, "everybody")
    assert "addresses of this run on the local network" in late.words()


def test_a_peer_whose_wireless_drops_and_comes_back_elsewhere_loses_no_step(
    swarm: NetSwarm,
) -> None:
    late, first = swarm.peers["late"], swarm.peers["a"]
    swarm.wait_for(partial(_listed, late), 60.0, "its first listed contribution")
    before = late.status()
    swarm.hosts.split(["late"], EVERYBODY)
    try:
        swarm.wait_for(lambda: _live(first) == len(EVERYBODY), 30.0, "the loss")
        swarm.wait_for(lambda: late.status()["step"] > before["step"], 30.0, "training alone")
        swarm.hosts.move("late")
    finally:
        swarm.hosts.split()
    swarm.wait_for(lambda: _live(first) == len(LINES) == _live(late), 30.0, "the reunion")
    new = f"/{late.host.address}/"
    swarm.wait_for(lambda: _told(first, before["peer"], new), 30.0, "the new address at others")
    after = late.status()
    assert after["pid"] == before["pid"]
    assert after["step"] > before["step"]
    credit = _tokens(first, after["peer"])
    swarm.wait_for(lambda: _tokens(first, after["peer"]) > credit, 60.0, "new work in the lineage")
    late.process.terminate()
    assert late.process.wait(30.0) == 0


def _live(peer: NetPeer) -> int:
    status = peer.status()
    return status["peers_live"] if status else 0


def _tokens(peer: NetPeer, of: str) -> int:
    rows = {row["peer"]: row for row in peer.board()["rows"]}
    return int(rows[of]["tokens"] + rows[of]["provisional"]) if of in rows else 0


def _told(peer: NetPeer, of: str, host: str) -> bool:
    """Whether it knows the other by addresses on that host alone."""
    known = {row["peer"]: row["addresses"] for row in peer.peers()}[of]
    return bool(known) and all(host in address for address in known)


def _listed(peer: NetPeer) -> bool:
    status = peer.status()
    return bool(status) and status["join_to_listed_s"] is not None


def _dial(address: str) -> None:
    """Nothing listens on the router; whatever came of it, nothing new gets through."""
    socket.create_connection((address, 4001), 2.0).close()


def _went_on(peer: NetPeer, top: list[int]) -> bool:
    status = peer.status()
    return bool(status) and all(
        now >= before + APART for now, before in zip(status["versions"], top, strict=True)
    )


def _joins(peer: NetPeer, above: int) -> bool:
    """Whether each fragment's lineage has a join above a version."""
    status = peer.status()
    if not status:
        return False
    (state,) = peer.home.root.glob("runs/*/state.sqlite")
    with closing(sqlite3.connect(f"file:{state}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT digest, header FROM commits").fetchall()
    headers = {digest: decode(header, Header, HEADER_BYTES_MAX) for digest, header in rows}
    found = 0
    for head in status["heads"]:
        digest, kinds = bytes.fromhex(head), list[str]()
        while digest in headers and headers[digest].version > above:
            kinds.append(headers[digest].kind)
            digest = headers[digest].parent
        found += JOIN in kinds
    return found == len(status["heads"])
