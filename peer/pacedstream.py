"""A stream of bulk data that counts its bytes, keeps to every pace, and never waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, cast

from dugnad.averaging.room import Room
from dugnad.dht.ports import Acknowledged, Lasting, Stream, StreamEnded, TransportError
from dugnad.peer.flow import Flow
from dugnad.peer.ratelimit import Bucket
from dugnad.peer.uplink import Uplink

STEP_BYTES: Final = 32 << 10
"""The unit of progress: 26 kbit/s at least. Smaller steps cost more timers than they tell."""
STEP_BYTES_MAX: Final = 1 << 20
"""A step on a quick line: on loopback 32 KiB ones cost more in waiting than in moving (15 % of
the CPU of an exchange went to the interpreter)."""
QUICK_S: Final = 0.05
"""A step within this time is followed by one of twice the size."""
SLOW_S: Final = 1.0
"""One that took longer is followed by the smallest."""
LOOK_S: Final = 0.02
"""Between two looks at what has arrived, while there is no room for more."""
ROOM_BYTES_MIN: Final = STEP_BYTES // 2
"""Room for less is no room: packets would be small and looks many."""
SILENT_S: Final = 2.0
"""The first word of progress comes a round trip after the first step; more than any usual line."""
TELL_BYTES_MIN: Final = 4 << 10
"""Progress is told of after so many bytes, three packets, or ..."""
TELL_PARTS: Final = 8
"""... this part of a flow's window: what has arrived and is not told of yet takes up room in it."""
FREE_BYTES: Final = 1024
"""Requests, answers and words of progress this long are counted and not held up: behind a shard on
a line that its owner limits, each would wait a tenth of a second."""


class Stalled(TransportError):
    """The other side let the time pass in which some bytes had to move."""


def stream_time() -> float:
    """The clock of streams and of everything that measures them: the event loop's."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Traffic:
    """Bytes of bulk data that this daemon moved, what failed half-way included."""

    sent: int = 0
    received: int = 0
    served: int = 0
    """Of what was sent: whole answers to those who pull."""
    up: Bucket = field(default_factory=Bucket)
    """How fast its owner lets it send; without a rate, as fast as the line."""
    down: Bucket = field(default_factory=Bucket)
    uplink: Uplink | None = None
    """What the line itself takes; None: nobody measures it."""
    under_way: set[PacedStream] = field(default_factory=set)
    """Streams of which not everything had arrived at the last look."""
    push_bytes_per_s: float = 0.0
    """Of the newest contribution that was taken, from offer to answer; 0: none yet."""


class PacedStream:
    """A `Stream` that counts its bytes, and raises `Stalled` when a step of them takes too long.

    What it sends keeps to the owner's rate, to the pace of the uplink, and to its `flow`.
    """

    def __init__(self, stream: Stream, idle_s: float, traffic: Traffic) -> None:
        self.peer = stream.peer
        self.moved_at = stream_time()
        self.flow: Flow | None = None
        """The transfer that it carries, if somebody measures it."""
        self.told: int | None = None
        """Bytes of that transfer that the other side says it has, once it says so."""
        self.rests = False
        """Whether the other side knows that the transfer is over with what it was asked for."""
        self._stream = stream
        acked, lasting = _is_acked_and_lasting(stream)
        self._acked = cast(Acknowledged, stream) if acked else None
        self._lasting = cast(Lasting, stream) if lasting else None
        self._idle_s = idle_s
        self._traffic = traffic
        self._cut = ""
        self._step = max(STEP_BYTES, self._lasting.step) if self._lasting else STEP_BYTES
        self._sent = 0
        self._pending = 0
        """Of these bytes, those that have leave to go and were not given to the socket yet."""
        self._arrived = 0
        self._begun = self._heard = False

    async def read(self, n: int) -> bytes:
        """Exactly `n` bytes."""
        if self._lasting is not None and n <= FREE_BYTES:
            data = self._lasting.at_hand(n)
            if data is not None:
                self._traffic.down.take(n, stream_time())
                self._traffic.received += n
                return data
        room = Room(n)
        await self.read_into(room.view)
        return room.take()

    async def read_into(
        self,
        target: memoryview,
        tell: Callable[[int], Awaitable[None]] | None = None,
        each: int = TELL_BYTES_MIN,
    ) -> None:
        """Fills `target`; `tell` is told after `each` bytes how much of it is here."""
        view, at = _bytes_of(target), 0
        free = len(view) <= FREE_BYTES
        while at < len(view):
            step = self._step if tell is None else max(TELL_BYTES_MIN, min(each, STEP_BYTES_MAX))
            part = view[at : at + self._traffic.down.step(step)]
            wait = self._traffic.down.take(len(part), stream_time())
            if not free:
                await self._owed(wait)
            await self._in_time(self._stream.read_into(part))
            self._traffic.received += len(part)
            self._heard = True
            at += len(part)
            if tell is not None:
                await tell(at)

    async def write(self, data: bytes | memoryview) -> None:
        """Sends `data`."""
        view, at = _bytes_of(memoryview(data)), 0
        free = len(view) <= FREE_BYTES
        while at < len(view):
            size = min(len(view) - at, self._traffic.up.step(self._step))
            if not free:
                if self._traffic.uplink is not None:
                    size = min(size, self._traffic.uplink.step(size))
                size = min(size, await self._room(size))
            part = view[at : at + size]
            wait = self._traffic.up.take(size, stream_time())
            if not free:
                await self._owed(wait)
                await self._paced(size)
            await self._in_time(self._stream.write(part))
            self._pending = 0
            self._traffic.sent += size
            at += size
        if not free:
            self.look()

    @property
    def lasts(self) -> bool:
        """Whether another transfer can follow on the stream, by another `PacedStream`."""
        return self._lasting is not None

    @property
    def may_be_dead(self) -> bool:
        """Whether it was kept from an earlier transfer and nothing has come on it since: that it
        breaks says nothing about the peer."""
        return self._lasting is not None and self._lasting.used and not self._heard

    def rest(self) -> None:
        """The transfer is over at both ends: the stream is kept for the next one, or ends."""
        self.over()
        if self._lasting is not None:
            self._lasting.rest()
        else:
            self._stream.abort()

    def over(self) -> None:
        """The transfer is over; the stream goes on, if it is one that lasts."""
        self.done()
        if self._lasting is not None:
            self._lasting.step = self._step

    async def close(self) -> None:
        """Sends what is unsent, then the end."""
        self.done()
        await self._stream.close()

    def abort(self) -> None:
        """Gives the stream up."""
        self.done()
        self._stream.abort()

    def cut(self, reason: str) -> None:
        """Gives the stream up; whoever reads or writes on it gets `Stalled` with the reason."""
        self._cut = reason
        self.abort()

    def wants_words(self) -> int:
        """After how many bytes each the other side should tell what has arrived; 0: it need not,
        since this machine itself knows, or nobody measures this stream."""
        if self.flow is None or self._acked is not None:
            return 0
        return max(TELL_BYTES_MIN, self.flow.window // TELL_PARTS)

    def heard(self, total: int) -> None:
        """The other side says that so many bytes of the flow have arrived."""
        if self._begun:
            self.told = min(total, self._sent)
            self.look()

    def begin_flow(self) -> None:
        """From here on the bytes are its flow's, and the other side is to tell what arrived. Does
        nothing the second time."""
        if not self._begun:
            self._sent = self._arrived = self.told = 0
            self._begun = True

    def look(self) -> None:
        """Take note of what has arrived by now."""
        if self._acked is not None:
            arrived = max(0, self._sent - self._pending - self._acked.unsent())
        elif self.told is not None:
            arrived = self.told
        else:
            self._unknown()
            return
        new, now = arrived - self._arrived, stream_time()
        if not 0 <= new <= self._sent - self._arrived:
            return
        self._arrived = arrived
        if new:
            self.moved_at = now
        if self.flow is not None and new:
            self.flow.arrived(arrived, now)
        if self._traffic.uplink is not None:
            gone = self._sent - self._pending - arrived
            self._traffic.uplink.moved(id(self), new, max(0, gone), now, self._pending)
            if self._sent > arrived:
                self._traffic.under_way.add(self)
            else:
                self._traffic.under_way.discard(self)

    def all_arrived(self) -> bool:
        """Whether nothing of what was sent is under way, as far as somebody knows."""
        self.look()
        known = self._acked is not None or self.told is not None
        return not known or self._arrived >= self._sent

    def _unknown(self) -> None:
        """Nobody can tell what has arrived: of the uplink's pace it takes its part, and of what is
        under way it says nothing."""
        uplink, now = self._traffic.uplink, stream_time()
        self._traffic.under_way.discard(self)
        gone = self._sent - self._pending
        new, self._arrived = max(0, gone - self._arrived), gone
        if uplink is not None:
            uplink.moved(id(self), new, 0, now, self._pending)

    async def _room(self, size: int) -> int:
        """Bytes that may go, at least ROOM_BYTES_MIN of `size`."""
        wanted, since = min(size, ROOM_BYTES_MIN), stream_time()
        while True:
            self.look()
            for other in tuple(self._traffic.under_way):
                other.look()
            room = min(self._rooms(), default=size)
            if room >= wanted:
                return room
            if not self.told and stream_time() - since > SILENT_S:
                self.told = None  # an older release: it tells nothing
            if stream_time() - max(since, self.moved_at) > self._idle_s:
                raise Stalled(f"it took nothing for {self._idle_s:g} s")
            await asyncio.sleep(LOOK_S)

    def _rooms(self) -> list[int]:
        """What holds this stream up; its own flow only where somebody can tell what has arrived."""
        known = self._acked is not None or self.told is not None
        rooms = [self.flow.room()] if self.flow is not None and known else []
        uplink = self._traffic.uplink
        return rooms if uplink is None else [*rooms, uplink.room(stream_time())]

    async def _paced(self, size: int) -> None:
        """Waits as the line's pace and the transfer's want it."""
        now, wait = stream_time(), 0.0
        self._sent += size
        self._pending = size
        self.look()  # others that wait for room see that this much is taken
        if self._traffic.uplink is not None:
            wait = self._traffic.uplink.take(size, now)
            if wait > 0.0 and self.flow is not None:
                self.flow.paused()
        if self.flow is not None:
            if len(self._traffic.under_way) > (self in self._traffic.under_way):
                self.flow.paused()  # others have their part of the line
            known = self._acked is not None or self.told is not None
            wait = max(wait, self.flow.sent(size, now)) if known else wait
        if wait > 0.0:
            await asyncio.sleep(wait)

    async def _owed(self, wait: float) -> None:
        """Waits for the owner's rate: not a fault of the line, so no deadline runs."""
        if wait > 0.0:
            if self.flow is not None:
                self.flow.paused()
            await asyncio.sleep(wait)

    def done(self) -> None:
        """Nothing more is sent on it."""
        if self._traffic.uplink is not None:
            self._traffic.uplink.ended(id(self))
            self._traffic.under_way.discard(self)

    async def _in_time(self, work: Awaitable[None]) -> None:
        """Waits for one step; a quick line gets longer ones, a slow one the shortest again."""
        begin = stream_time()
        try:
            async with asyncio.timeout(self._idle_s):
                await work
        except TimeoutError:
            raise Stalled(f"it gave or took nothing for {self._idle_s:g} s") from None
        except StreamEnded:
            if self._cut:
                raise Stalled(self._cut) from None
            raise
        now = stream_time()
        if now - begin < QUICK_S:
            self._step = min(2 * self._step, STEP_BYTES_MAX)
        elif now - begin > SLOW_S:
            self._step = STEP_BYTES
        self.moved_at = now


_kinds: dict[type[Stream], tuple[bool, bool]] = {}


def _is_acked_and_lasting(stream: Stream) -> tuple[bool, bool]:
    """Looked at once for each class of streams: to ask a protocol costs 50 microseconds."""
    kind = type(stream)
    if kind not in _kinds:
        _kinds[kind] = isinstance(stream, Acknowledged), isinstance(stream, Lasting)
    return _kinds[kind]


def _bytes_of(data: memoryview) -> memoryview:
    """The same memory as single bytes."""
    return data.cast("B") if data.format != "B" or data.ndim != 1 else data
