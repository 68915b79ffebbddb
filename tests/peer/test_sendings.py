"""Contributions on their way out: what their cores hear, and what ends them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from dugnad.averaging import events as ev
from dugnad.averaging.worker import Kept
from dugnad.dht.identity import Identity
from dugnad.dht.ports import TransportError
from dugnad.peer.exchangeports import Ports
from dugnad.peer.sendings import PUSH_TIMEOUT_S, WATCH_S, Sendings, Which

from .virtual_time import pass_time, run_virtual  # noqa: TID252  the tests are no installed package

HOME = Identity.ephemeral(bytes(32)).peer
WHICH: Which = (0, 7, HOME)
KEPT = cast(Kept, SimpleNamespace(contribution=None, pieces=(), payload=b""))


@dataclass
class World:
    """A network that takes as long as it is told, and what the core and people heard."""

    takes_s: float = 1.0
    answer: str | Exception = ""
    moves: bool = True
    heard: list[ev.Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: int = 0
    forwarded: int = 0

    def sendings(self) -> Sendings:
        ports = SimpleNamespace(
            network=SimpleNamespace(push=self._push),
            codecs=SimpleNamespace(moving=lambda fragment, to: self.moves),
            on_note=lambda fragment, note: self.notes.append(note.text),
        )
        return Sendings(cast(Ports, ports), lambda p, event: self.heard.append(event), self._all)

    async def _push(self, *_: object) -> str:
        try:
            await pass_time(self.takes_s)
        finally:
            self.ended += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _all(self) -> None:
        self.forwarded += 1


def test_a_core_hears_that_a_sending_moves_and_what_was_answered() -> None:
    async def story() -> None:
        world = World(takes_s=2.2 * WATCH_S, answer="it is stale")
        await world.sendings().send(WHICH, KEPT, 1.0)
        moves = ev.SendMoves(7, HOME)
        assert world.heard == [moves, moves, ev.SendDone(7, HOME, "it is stale")]
        await pass_time(5 * WATCH_S)
        assert len(world.heard) == 3

    run_virtual(story())


def test_of_a_sending_that_stands_still_nothing_is_heard_until_it_breaks() -> None:
    async def story() -> None:
        world = World(takes_s=3.0, answer=TransportError("gone"), moves=False)
        await world.sendings().send(WHICH, KEPT, 1.0)
        assert world.heard == [ev.SendLost(7, HOME)]

    run_virtual(story())


def test_a_sending_may_take_two_intervals_where_those_are_long() -> None:
    async def story() -> None:
        world = World(takes_s=1.5 * PUSH_TIMEOUT_S, moves=False)
        await world.sendings().send(WHICH, KEPT, 1.0)
        assert world.heard == [ev.SendLost(7, HOME)]
        await world.sendings().send(WHICH, KEPT, PUSH_TIMEOUT_S)
        assert world.heard[1:] == [ev.SendDone(7, HOME, "")]

    run_virtual(story())


def test_one_that_is_cancelled_ends_at_once_and_nothing_is_heard_of_it() -> None:
    async def story() -> None:
        world = World(takes_s=10.0)
        sendings = world.sendings()
        task = asyncio.create_task(sendings.send(WHICH, KEPT, 1.0))
        await pass_time(0.1)
        sendings.cancel((0, 8, HOME))  # another one
        sendings.cancel(WHICH)
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert world.ended == 1
        again = asyncio.create_task(sendings.send(WHICH, KEPT, 1.0))
        await again
        assert world.heard[-1] == ev.SendDone(7, HOME, "")

    run_virtual(story())


def test_what_is_passed_on_for_others_is_tried_once_and_said_when_it_fails() -> None:
    async def story() -> None:
        world = World(answer=TransportError("no way there"))
        sendings = world.sendings()
        task = asyncio.create_task(sendings.forward(0, KEPT, HOME))
        await pass_time(0.1)
        during = sendings.forwarding
        await task
        assert (during, sendings.forwarding) == (True, False)
        assert world.forwarded == 1
        assert world.notes == ["a contribution was not passed on: no way there"]

    run_virtual(story())
