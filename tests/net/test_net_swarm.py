"""A swarm of real daemons over an emulated network: delay, loss, a partition, a wrong clock, a
killed libp2p daemon, and a peer behind a router that lets nothing in.

One swarm serves all tests of this module, since getting up takes longer than each of them; every
test leaves it whole.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import pytest
from _nethosts import Hosts, missing
from _wan import Line

from ..peer.processes import run_file  # noqa: TID252  the tests are no installed package
from .netswarm import NetPeer, NetSwarm, clock_shift  # noqa: TID252  the same

pytestmark = [pytest.mark.net, pytest.mark.slow]

LINES = {
    "a": Line(20, 20, delay_ms=15),
    "b": Line(20, 20, delay_ms=25, loss=0.01),
    "c": Line(10, 20, delay_ms=40, loss=0.01),
    "inside": Line(10, 20, delay_ms=20),
}
EVERYBODY = tuple(LINES)
CLOCK_AHEAD_S = 30


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
    rows = swarm.peers["a"].board()["rows"]
    tokens = {row["peer"]: row["tokens"] + row["provisional"] for row in rows}
    assert tokens[peer] > 0


def test_a_clock_that_is_half_a_minute_ahead_is_measured_and_harms_nobody(swarm: NetSwarm) -> None:
    ahead = swarm.peers["c"]
    status = swarm.wait_for(ahead.status, 10.0, "its status")
    assert status["clock_offset_s"] == pytest.approx(-CLOCK_AHEAD_S, abs=2.0)
    for name in ("a", "b", "inside"):
        assert abs(swarm.peers[name].status()["clock_offset_s"]) < 2.0
    assert _listed(ahead)


def test_halves_that_were_parted_agree_after_they_meet_again(swarm: NetSwarm) -> None:
    halves = ("a", "inside"), ("b", "c")
    swarm.hosts.split(*halves)
    try:
        top = max(swarm.peers[name].version() for name in EVERYBODY)
        swarm.until_merged(EVERYBODY, top + 2, 40.0)
        assert not swarm.agreed(EVERYBODY), "two halves that hear nothing go different ways"
    finally:
        swarm.hosts.split()
    swarm.wait_for(partial(swarm.agreed, EVERYBODY), 40.0, "equal heads")


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


def _listed(peer: NetPeer) -> bool:
    status = peer.status()
    return bool(status) and status["join_to_listed_s"] is not None


def _dial(address: str) -> None:
    """Nothing listens on the router; whatever came of it, nothing new gets through."""
    socket.create_connection((address, 4001), 2.0).close()
