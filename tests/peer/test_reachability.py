"""What others say about whether they can reach this peer."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId, peer_text
from dugnad.dht.memory import MemoryNetwork
from dugnad.peer.reachability import (
    KNOCKS_MAX,
    SERVE_S,
    SERVED_MAX,
    Doorman,
    Knocks,
    Reachability,
    judged,
)

A, B, C = (PeerId(bytes([n]) * 32) for n in (1, 2, 3))
HERE = f"/ip4/10.0.0.1/tcp/4001/p2p/{peer_text(A)}"
OPEN, SHUT = Knocks(((HERE, ""),)), Knocks(((HERE, "no answer in time"),))


@pytest.mark.parametrize(
    ("answers", "reachable", "words"),
    [
        ({}, "unknown", "no peer has tried"),
        ({B: Knocks(), C: Knocks()}, "unknown", "no peer has tried"),
        ({B: OPEN}, "direct", "1 of 1"),
        ({B: SHUT, C: OPEN}, "direct", "1 of 2"),
        ({B: SHUT, C: Knocks()}, "outbound", "no answer in time"),
        ({B: Knocks(((HERE, "refused"), (HERE, "")))}, "direct", "1 of 1"),
    ],
)
def test_one_who_gets_through_is_proof_and_silence_is_none(
    answers: dict[PeerId, Knocks], reachable: str, words: str
) -> None:
    found = judged(answers)
    assert found.reachable == reachable
    assert words in found.text


def test_nobodys_doors_are_tried_more_often_than_now_and_then() -> None:
    doorman = Doorman()
    assert doorman.due(A, 0.0)
    assert not doorman.due(A, SERVE_S - 0.1)
    assert doorman.due(B, 1.0)
    assert doorman.due(A, SERVE_S)
    for number in range(SERVED_MAX):
        assert doorman.due(PeerId(number.to_bytes(32, "big")), SERVE_S)
    assert doorman.due(A, SERVE_S), "the table is bounded: the oldest are forgotten"


def daemon(peer: PeerId, transport: Any, live: list[PeerId], advert: Advert | None) -> Any:
    """As much of a daemon as reachability needs."""
    notes: list[str] = []
    told: list[dict[str, str]] = []
    return SimpleNamespace(
        boot=1,
        settings=SimpleNamespace(outbound_only=False),
        averager=SimpleNamespace(live=lambda: live),
        swarm=SimpleNamespace(
            substrate=transport,
            roster=SimpleNamespace(advert=lambda of: advert if of != peer else None),
            advertise=lambda **changes: told.append(changes),
        ),
        note=lambda kind, text: notes.append(text),
        notes=notes,
        told=told,
    )


@pytest.mark.slow
async def test_a_peer_learns_from_others_whether_its_door_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        open_door = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_text(A)}"
        found = await _asked(open_door)
        assert (found.reachable, found.text) == ("direct", "1 of 1 peers that tried reached it")
    shut = await _asked(open_door)
    assert shut.reachable == "outbound"
    assert "refused" in shut.text
    assert (await _asked(f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{peer_text(A)}")).reachable == (
        "unknown"
    )


async def _asked(address: str) -> Any:
    network = MemoryNetwork()
    mine, theirs = network.join(A), network.join(B)
    await mine.dial(B, [network.address_of(B)], 1.0)
    me = daemon(A, mine, [B], None)
    advert = Advert(peer=A, boot=1, addresses=(address,) * KNOCKS_MAX)
    other = Reachability(daemon(B, theirs, [], advert))
    await other.serve(theirs)
    asking = Reachability(me)
    asking._tell(judged(await asking._ask([B])))
    advertised = [one["reachable"] for one in me.told] or ["unknown"]
    assert advertised == [asking.found.reachable]
    return asking.found
