"""Messages of the exchange between live peers: flooded commits, acks, heads, and who wants what.

Each peer opens one one-way stream to each live peer, when it first has something to say, and opens
it again after a failure. Queues are bounded, reading is paced for each peer, and nothing reaches
the core whose makers' signatures were not checked. A message that was written to a stream that then
broke may be lost: heads are told again, so the exchange heals.
"""

import asyncio
import functools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dugnad.averaging.formats import MESSAGE_BYTES_MAX, Heads, Message, Witness
from dugnad.dht.frames import FrameError, read_frame, write_frame
from dugnad.dht.ids import PeerId, RunId, short
from dugnad.dht.ports import Stream, Transport, TransportError
from dugnad.dht.records import RecordError, Verifier, encode
from dugnad.peer.messagecheck import (
    CheckedRecords,
    check_signatures,
    parse_message,
    without_acks,
)

__all__ = ["EXCHANGE_PROTOCOL", "Conduct", "Messenger", "MessengerCounts", "Outbox"]

log = logging.getLogger(__name__)

EXCHANGE_PROTOCOL: Final = "/dugnad/exchange/1"

QUEUE_MAX: Final = 1024
"""Unsent messages to one peer: some minutes of a swarm of 64 that merges once a second."""
QUEUE_BYTES_MAX: Final = 2 * MESSAGE_BYTES_MAX
"""And their bytes: one of the longest messages, and as much again of all others."""
OPEN_S: Final = 10.0
"""For opening a stream to a live peer: relays and slow lines."""
BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
"""Pauses before a broken stream is opened again; a stream that held so long was no failure."""
IDLE_S: Final = 60.0
"""A stream to somebody who is no neighbour in a crowd is closed when it was idle for so long."""
STRANGER_S: Final = 5.0
"""The peer may see us as live a moment before we see it; its stream waits so long to be read."""

MESSAGES_PER_S: Final = 200.0
"""A peer of a full mesh floods about 130 commits and acks a second at one merge a second."""
BYTES_PER_S: Final = float(8 << 20)
"""Two of the longest messages a second."""
SIGNATURES_PER_S: Final = 2048.0
"""Not checked before; about a fifth of a core, and one full answer of 32 commits of 64 inputs."""
FAULTS_MAX: Final = 8
FAULTS_WINDOW_S: Final = 60.0
CUT_OFF_S: Final = 60.0
"""Whoever sends more than `FAULTS_MAX` refused messages in the window is not read for so long."""
CONDUCTS_MAX: Final = 512
"""Peers whose conduct is remembered: as many as the roster's table holds."""

SIGNATURES_INLINE_MAX: Final = 16
"""Checked on the event loop, in about 2 ms; more go through a thread."""
BYTES_INLINE_MAX: Final = 64 << 10
"""Decoded on the event loop, in about 1 ms; longer messages go through a thread."""
T = TypeVar("T")


@dataclass(slots=True)
class MessengerCounts:
    """What happened since the start."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0  # ours, because a queue was full, the peer gone or the message too long
    refused: int = 0  # theirs


class Outbox:
    """What waits to be sent to one peer: bounded, first in first out.

    When it is full, the oldest heads or ack goes first (newer ones say the same or more), then the
    oldest of all.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[bool, bytes]] = deque()
        self._light = 0  # how many of them are heads and acks
        self._bytes = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes, *, light: bool) -> int:
        """Queues a message (`light`: heads or an ack); how many were dropped for it."""
        self._waiting.append((light, data))
        self._light += light
        self._bytes += len(data)
        self._filled.set()
        dropped = 0
        while len(self._waiting) > QUEUE_MAX or self._bytes > QUEUE_BYTES_MAX:
            self._drop()
            dropped += 1
        return dropped

    async def first(self) -> bytes:
        """The message to send next, which is no longer in the queue; waits for one."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        light, data = self._waiting.popleft()
        self._light -= light
        self._bytes -= len(data)
        return data

    def _drop(self) -> None:
        places = enumerate(self._waiting)
        place = next(at for at, (light, _) in places if light) if self._light else 0
        light, data = self._waiting[place]
        del self._waiting[place]
        self._light -= light
        self._bytes -= len(data)


class Conduct:
    """How a peer behaves towards us: pace of reading, faults, and whether it is cut off."""

    def __init__(self) -> None:
        self._debt = dict.fromkeys(("messages", "bytes", "signatures"), 0.0)  # each in seconds
        self._at = float("-inf")
        self._faults: deque[float] = deque(maxlen=FAULTS_MAX + 1)
        self.cut_until = float("-inf")

    def spend(self, now: float, *, messages: int = 0, size: int = 0, signatures: int = 0) -> None:
        """Counts what was read or checked for the peer."""
        self._drain(now)
        self._debt["messages"] += messages / MESSAGES_PER_S
        self._debt["bytes"] += size / BYTES_PER_S
        self._debt["signatures"] += signatures / SIGNATURES_PER_S

    def wait_s(self, now: float) -> float:
        """Seconds before the next message may be read: one second's worth may come at once."""
        self._drain(now)
        return max(0.0, max(self._debt.values()) - 1.0)

    def fault(self, now: float) -> bool:
        """Counts a message that was refused; whether the peer is cut off for it."""
        self._faults.append(now)
        if len(self._faults) > FAULTS_MAX and now - self._faults[0] <= FAULTS_WINDOW_S:
            self._faults.clear()
            self.cut_until = now + CUT_OFF_S
            return True
        return False

    def _drain(self, now: float) -> None:
        passed, self._at = now - self._at, now
        for kind, debt in self._debt.items():
            self._debt[kind] = max(0.0, debt - passed)


@dataclass(slots=True, eq=False)
class _Link:
    """A live peer: what waits for it, and the task that sends."""

    peer: PeerId
    outbox: Outbox = field(default_factory=Outbox)
    sender: asyncio.Task[None] | None = None
    unsent: bytes | None = None  # taken from the outbox, not yet written as a whole
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # one stream after the other


class Messenger:
    """Sends and receives the exchange's messages. One event loop; `clock` is monotonic seconds.

    `on_message` gets, in the order of each sender, messages whose signatures hold (`verify`);
    `on_refused` the reason for each that was refused. Neither may block.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunId,
        verify: Verifier,
        on_message: Callable[[PeerId, Message], None],
        on_refused: Callable[[PeerId, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        brief: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        """`brief`: peers whose streams are closed when they have been idle for `IDLE_S`, and to
        whom a message is tried once."""
        self.counts = MessengerCounts()
        self._transport = transport
        self._run = run
        self._verify = verify
        self._on_message = on_message
        self._on_refused = on_refused
        self._clock = clock
        self._brief = brief
        self._links: dict[PeerId, _Link] = {}
        self._incoming: dict[PeerId, Stream] = {}  # the newest of each peer; only that is read
        self._arrivals: dict[PeerId, asyncio.Event] = {}
        self._conducts: OrderedDict[PeerId, Conduct] = OrderedDict()
        self._checked = CheckedRecords()
        self._threads = asyncio.Semaphore(1)  # a flood of signatures takes one core, not all
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Task[None]] = set()  # the transport's, in our `_accepted`
        self._encoded: tuple[Message, bytes] | None = None
        self._closed = False

    # --- life

    async def start(self) -> None:
        """Serves incoming streams from now on. Raises what `Transport.accept` raises."""
        await self._transport.accept(EXCHANGE_PROTOCOL, self._accepted)

    async def close(self) -> None:
        """Ends all streams and tasks; what is unsent is lost. Idempotent."""
        self._closed = True
        for peer in tuple(self._links):
            self.peer_down(peer)
        for task in (*self._tasks, *self._readers):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._readers, return_exceptions=True)

    def peer_up(self, peer: PeerId) -> None:
        """The peer is live: messages can be sent to it and are taken from it."""
        if self._closed or peer in self._links:
            return
        self._links[peer] = link = _Link(peer)
        link.sender = self._own(self._send_all(link), f"messages to {short(peer)}")
        arrival = self._arrivals.pop(peer, None)
        if arrival is not None:
            arrival.set()

    def peer_down(self, peer: PeerId) -> None:
        """The peer is gone: what waited for it is dropped, its streams end."""
        link = self._links.pop(peer, None)
        if link is None:
            return
        self.counts.dropped += len(link.outbox) + (link.unsent is not None)
        if link.sender is not None:
            link.sender.cancel()
        stream = self._incoming.pop(peer, None)
        if stream is not None:
            stream.abort()

    # --- sending

    def send(self, peer: PeerId, message: Message) -> None:
        """Queues a message for a live peer. Never waits; what cannot be queued is counted."""
        link = self._links.get(peer)
        if link is None:
            self.counts.dropped += 1
            return
        data = self._encode(message)
        if len(data) > MESSAGE_BYTES_MAX:
            self.counts.dropped += 1
            kind = type(message).__name__
            log.warning("not sent to %s: %s of %d bytes", short(peer), kind, len(data))
            return
        self.counts.dropped += link.outbox.put(data, light=isinstance(message, Heads | Witness))

    def waiting(self, peer: PeerId) -> bool:
        """Whether a message to a live peer is not yet written to its stream."""
        link = self._links.get(peer)
        return link is not None and (link.unsent is not None or len(link.outbox) > 0)

    def _encode(self, message: Message) -> bytes:
        """The message's bytes; one that is flooded to many peers is encoded once."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    async def _send_all(self, link: _Link) -> None:
        """Sends what is queued for a peer, over as many streams as it takes, until cancelled."""
        pause = BACKOFF_FIRST_S
        while True:
            if link.unsent is None:
                link.unsent = await link.outbox.first()
            since = self._clock()
            try:
                stream = await self._transport.open(link.peer, EXCHANGE_PROTOCOL, OPEN_S)
            except TransportError as error:
                log.debug("no stream to %s: %s", short(link.peer), error)
                if self._brief(link.peer):
                    link.unsent = None
                    self.counts.dropped += 1
            else:
                await self._pump(link, stream)
            if self._clock() - since > BACKOFF_MAX_S + OPEN_S:
                pause = BACKOFF_FIRST_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_MAX_S)

    async def _pump(self, link: _Link, stream: Stream) -> None:
        """Writes messages until the stream ends."""
        # No TaskGroup: a child that fails while we are cancelled would hide the cancellation.
        tasks = (
            self._own(_until_end(stream), f"end of the stream to {short(link.peer)}"),
            self._own(self._write(link, stream), f"writes to {short(link.peer)}"),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, link: _Link, stream: Stream) -> None:
        while True:
            if link.unsent is None:
                link.unsent = await self._next(link)
                if link.unsent is None:
                    return
            try:
                await write_frame(stream, link.unsent)
            except TransportError as error:
                log.debug("messages to %s stopped: %s", short(link.peer), error)
                return
            self.counts.sent += 1
            self.counts.sent_bytes += len(link.unsent)
            link.unsent = None

    async def _next(self, link: _Link) -> bytes | None:
        """The next message for a peer; None when its stream is brief and was idle."""
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    return await link.outbox.first()
            except TimeoutError:
                if self._brief(link.peer):
                    return None

    # --- receiving

    async def _accepted(self, stream: Stream) -> None:
        """Serves a peer's stream, in a task of the transport: the newest one replaces others."""
        peer = stream.peer
        conduct = self._conducts.get(peer)
        if self._closed or (conduct is not None and conduct.cut_until > self._clock()):
            stream.abort()
            return
        task = asyncio.current_task()
        assert task is not None, "a transport serves streams in tasks"
        self._readers.add(task)
        before = self._incoming.get(peer)
        self._incoming[peer] = stream
        if before is not None:
            before.abort()
        try:
            link = await self._live(peer)
            if link is not None:
                async with link.reading:
                    await self._read_all(link, stream)
        finally:
            self._readers.discard(task)
            stream.abort()
            if self._incoming.get(peer) is stream:
                del self._incoming[peer]

    async def _live(self, peer: PeerId) -> _Link | None:
        """The link to a peer, waiting a little until it is live; None if it does not become so."""
        if peer not in self._links:
            arrival = self._arrivals.setdefault(peer, asyncio.Event())
            try:
                async with asyncio.timeout(STRANGER_S):
                    await arrival.wait()
            except TimeoutError:
                log.debug("%s sends messages but is not live", short(peer))
            finally:
                if self._arrivals.get(peer) is arrival:
                    del self._arrivals[peer]
        return self._links.get(peer)

    async def _read_all(self, link: _Link, stream: Stream) -> None:
        """Reads until the stream ends (StreamEnded) or the peer is cut off."""
        conduct = self._conduct(link.peer)
        while True:
            await asyncio.sleep(conduct.wait_s(self._clock()))
            try:
                data = await read_frame(stream, MESSAGE_BYTES_MAX)
                conduct.spend(self._clock(), messages=1, size=len(data))
                message = await self._judge(data, conduct)
            except (RecordError, FrameError) as error:
                self._refuse(link.peer, str(error))
                if conduct.fault(self._clock()):
                    self._refuse(link.peer, f"cut off for {CUT_OFF_S:.0f} s: too many faults")
                    return
                if isinstance(error, FrameError):
                    return
                continue
            if self._links.get(link.peer) is not link:
                return  # it went while its message was checked
            self.counts.received += 1
            self.counts.received_bytes += len(data)
            self._on_message(link.peer, message)

    async def _judge(self, data: bytes, conduct: Conduct) -> Message:
        """The message in a frame, its signatures checked; RecordError with the reason if not."""
        if len(data) <= BYTES_INLINE_MAX:
            parsed = parse_message(data, self._run)
        else:
            parsed = await self._in_thread(functools.partial(parse_message, data, self._run))
        must, acks = self._checked.unknown(parsed.must), self._checked.unknown(parsed.acks)
        check = functools.partial(check_signatures, must, acks, self._run, self._verify)
        count = len(must) + len(acks)
        conduct.spend(self._clock(), signatures=count)
        if count <= SIGNATURES_INLINE_MAX:
            good = check()
        else:
            good = await self._in_thread(check)
        self._checked.add(good)
        return without_acks(parsed.message, {name for name, _ in acks} - set(good))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._threads:
            return await asyncio.to_thread(work)

    def _refuse(self, peer: PeerId, reason: str) -> None:
        self.counts.refused += 1
        self._on_refused(peer, reason)

    def _conduct(self, peer: PeerId) -> Conduct:
        conduct = self._conducts.setdefault(peer, Conduct())
        self._conducts.move_to_end(peer)
        if len(self._conducts) > CONDUCTS_MAX:
            self._conducts.popitem(last=False)
        return conduct

    def _own(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """The one place where a sender that failed by our own fault is told of."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)


async def _until_end(stream: Stream) -> None:
    """Notices the end of a stream on which the other side has nothing to say (or says it)."""
    try:
        await stream.read(1)
    except TransportError as error:
        log.debug("the stream to %s ended: %s", short(stream.peer), error)
