"""Finding peers of a run on the local network."""

from __future__ import annotations

import asyncio

import pytest

from dugnad.dht.ids import PeerId, RunId, peer_text, run_text
from dugnad.peer.lan import ADDRESSES_MAX, Lan, addresses_of

RUN, OTHER_RUN = RunId(b"r" * 32), RunId(b"o" * 32)
ME, OTHER = PeerId(b"m" * 32), PeerId(b"n" * 32)
SAID = {b"v": b"1", b"run": run_text(RUN).encode(), b"peer": peer_text(OTHER).encode()}


def test_an_announcement_of_the_run_is_an_address_that_can_be_dialled() -> None:
    found = addresses_of(RUN, ME, SAID, ["192.168.1.7"], 4001)
    assert found == [f"/ip4/192.168.1.7/tcp/4001/p2p/{peer_text(OTHER)}"]


@pytest.mark.parametrize(
    ("changed", "hosts", "port"),
    [
        ({b"run": run_text(OTHER_RUN).encode()}, ["10.0.0.1"], 4001),
        ({b"run": b"no run"}, ["10.0.0.1"], 4001),
        ({b"run": None}, ["10.0.0.1"], 4001),
        ({b"run": b"\xff\xfe"}, ["10.0.0.1"], 4001),
        ({b"peer": b"nobody"}, ["10.0.0.1"], 4001),
        ({b"peer": b"1" * 255}, ["10.0.0.1"], 4001),
        ({b"peer": peer_text(ME).encode()}, ["10.0.0.1"], 4001),
        ({b"v": b"2"}, ["10.0.0.1"], 4001),
        ({}, ["10.0.0.1"], 0),
        ({}, ["10.0.0.1"], 70_000),
        ({}, ["ten.zero/tcp/1"], 4001),
        ({}, [], 4001),
    ],
)
def test_a_strangers_word_that_is_of_no_use_is_passed_over(
    changed: dict[bytes, bytes | None], hosts: list[str], port: int
) -> None:
    assert addresses_of(RUN, ME, {**SAID, **changed}, hosts, port) == []


def test_one_announcement_makes_nobody_knock_on_many_doors() -> None:
    hosts = [f"10.0.0.{number}" for number in range(50)]
    assert len(addresses_of(RUN, ME, SAID, hosts, 4001)) == ADDRESSES_MAX


@pytest.mark.slow
async def test_neighbours_of_one_run_find_each_other_and_nobody_else() -> None:
    heard: list[str] = []
    here = ["127.0.0.1"]
    mine = Lan(RUN, ME, heard.append, here)
    theirs = Lan(RUN, OTHER, lambda _: None, here)
    foreign = Lan(OTHER_RUN, PeerId(b"f" * 32), lambda _: None, here)
    try:
        for one, port in ((mine, 4001), (theirs, 4002), (foreign, 4003)):
            await one.start()
            address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_text(one.peer)}"
            if one is not mine:
                await one.announce([address, "/ip4/127.0.0.1/udp/4002/quic-v1"])
        await mine.some(10.0)
        await asyncio.sleep(0.5)  # the foreign one's time to be heard
    finally:
        for one in (mine, theirs, foreign):
            await one.close()
    assert heard == [f"/ip4/127.0.0.1/tcp/4002/p2p/{peer_text(OTHER)}"]
    assert list(mine.found) == heard
