"""The roster's shell: performs what the roster core decides, over a `Transport`.

Control streams are opened and served here, each with one task that reads and one that writes; dials
run in tasks of their own; one timer waits for the core's deadline. Whatever else the core says goes
to one callback, in order.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final

from dugnad.dht.frames import FrameError, read_frame, write_frame
from dugnad.dht.ids import PeerId, short
from dugnad.dht.messages import (
    CONTROL_PROTOCOL,
    MESSAGE_BYTES_MAX,
    decode_message,
    encode_message,
)
from dugnad.dht.ports import DialError, Stream, Transport, TransportError
from dugnad.dht.records import RecordError
from dugnad.dht.roster import Roster
from dugnad.dht.roster_events import (
    Action,
    ClockJumped,
    ClockOffset,
    CloseStream,
    Dial,
    DialFailed,
    DuplicateIdentity,
    Event,
    GarbageIn,
    LeaveNow,
    MessageIn,
    Note,
    PeerChanged,
    PeerLeft,
    PeerLost,
    PeerUp,
    SelfSuspect,
    Send,
    StreamDown,
    StreamUp,
    Timer,
)

__all__ = ["RosterAction", "RosterShell"]

log = logging.getLogger(__name__)

RosterAction = (
    PeerUp
    | PeerLost
    | PeerLeft
    | PeerChanged
    | SelfSuspect
    | DuplicateIdentity
    | ClockOffset
    | ClockJumped
    | Note
)
"""What the roster says to the daemon; everything else it asks for is done here."""

QUEUE_MAX: Final = 256
"""Unsent messages of a control stream: two minutes of heartbeats. The core gives a silent peer up
long before.
"""
QUEUE_BYTES_MAX: Final = 1 << 20
"""And their bytes: about fifteen of the longest messages (everybody's adverts in a full mesh)."""
CLOSE_S: Final = 1.0
"""For a stream that is being closed to send what was queued; what is unsent then is lost."""
LEAVE_S: Final = 1.0
"""For our good-bye to reach everybody; who misses it sees the stream end."""


@dataclass(slots=True, eq=False)
class _Line:
    """One control stream and what waits to be sent on it."""

    number: int
    stream: Stream
    queue: deque[bytes] = field(default_factory=deque)
    queued_bytes: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False
    writer: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerId:
        """The peer at the other end."""
        return self.stream.peer

    def put(self, data: bytes) -> bool:
        """Queues one message; False if the queue is full."""
        if len(self.queue) >= QUEUE_MAX or self.queued_bytes + len(data) > QUEUE_BYTES_MAX:
            return False
        self.queue.append(data)
        self.queued_bytes += len(data)
        self.wake.set()
        return True

    def give_up(self) -> None:
        """Ends the stream at once; its tasks end by themselves."""
        self.stream.abort()
        self.ended.set()
        self.wake.set()


class RosterShell:
    """Drives one roster. `clock` is its `now` (seconds), `wall_ms` the wall clock in milliseconds.

    Everything runs on one event loop. `on_action` is called in the order of the core's actions and
    may call `feed`; what it raises is logged and does not disturb the roster.
    """

    def __init__(
        self,
        roster: Roster,
        transport: Transport,
        on_action: Callable[[RosterAction], None],
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
    ) -> None:
        self.roster = roster
        self._transport = transport
        self._on_action = on_action
        self._clock = clock
        self._wall_ms = wall_ms
        self._lines: dict[int, _Line] = {}  # those that the core knows
        self._served: set[_Line] = set()  # and those that are still being closed
        self._numbers = 0
        self._events: deque[Event] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._closed = False

    # --- life

    async def start(self) -> None:
        """Serves control streams from now on. Raises what `Transport.accept` raises."""
        assert not self._started, "a roster shell starts once"
        self._started = True
        await self._transport.accept(CONTROL_PROTOCOL, self._accepted)
        self.feed(Timer(self._wall_ms()))

    def feed(self, event: Event) -> None:
        """Gives the core one event and performs what it answers. Ignored after `close`.

        ValueError for a `MyAdvert` that cannot be made valid (then nothing has changed); if that
        was fed by `on_action`, it is logged instead.
        """
        if self._closed:
            return
        self._events.append(event)
        if self._feeding:
            return  # the call below us takes it up: actions stay in order
        self._feeding = True
        try:
            while self._events and not self._closed:
                self._handle(self._events.popleft(), outermost=event)
        finally:
            self._feeding = False
            self._arm()

    async def leave(self) -> None:
        """Says good-bye to everybody and closes all streams; takes at most `LEAVE_S`."""
        writers = [line.writer for line in self._served if line.writer is not None]
        self.feed(LeaveNow())
        if writers:
            await asyncio.wait(writers, timeout=LEAVE_S)

    async def close(self) -> None:
        """Ends all streams, tasks and the timer without a word. Idempotent."""
        self._closed = True
        self._events.clear()
        self._arm()
        self._lines.clear()
        for line in tuple(self._served):
            line.give_up()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the core

    def _handle(self, event: Event, *, outermost: Event) -> None:
        try:
            actions = self.roster.handle(event, self._clock())
        except ValueError:
            if event is outermost:
                raise
            log.exception("the roster cannot take %r", event)
            return
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Dial():
                self._own(self._dial(action), f"dial {short(action.peer)}")
            case Send():
                self._send(action)
            case CloseStream(_, number, reason):
                self._close_line(number, reason)
            case _:
                self._tell(action)

    def _tell(self, action: RosterAction) -> None:
        try:
            self._on_action(action)
        except Exception:  # the rest of the core's actions must be done, or the two would disagree
            log.exception("the daemon failed over %r", action)

    def _arm(self) -> None:
        """Keeps exactly one timer, for the core's deadline."""
        deadline = None if self._closed else self.roster.deadline
        if deadline == self._timer_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_for = None, deadline
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_for = None, None
        self.feed(Timer(self._wall_ms()))

    # --- streams

    async def _dial(self, action: Dial) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + action.deadline_s
        try:
            async with asyncio.timeout_at(until):
                await self._transport.dial(action.peer, action.addresses, action.deadline_s)
                left = max(0.001, until - clock())
                stream = await self._transport.open(action.peer, CONTROL_PROTOCOL, left)
        except Exception as error:
            self.feed(DialFailed(action.peer, _reason(error, action.peer)))
            return
        if self._closed:
            stream.abort()
            return
        self._line_up(stream, outgoing=True)

    async def _accepted(self, stream: Stream) -> None:
        """Serves a stream that a peer opened; runs in a task of the transport until it ends."""
        if self._closed:
            stream.abort()
            return
        line = self._line_up(stream, outgoing=False)
        try:
            await line.ended.wait()
        finally:
            self._end(line, "the transport ended it")

    def _line_up(self, stream: Stream, *, outgoing: bool) -> _Line:
        self._numbers += 1
        line = _Line(self._numbers, stream)
        self._lines[line.number] = line
        self._served.add(line)
        name = f"{short(line.peer)} #{line.number}"
        self._own(self._guarded(line, self._read), f"control reader {name}")
        line.writer = self._own(self._guarded(line, self._write), f"control writer {name}")
        self.feed(StreamUp(line.peer, line.number, outgoing))
        return line

    async def _guarded(self, line: _Line, work: Callable[[_Line], Awaitable[None]]) -> None:
        """The one place where trouble on a stream, expected or not, becomes `StreamDown`."""
        reason = "given up"
        try:
            await work(line)
        except Exception as error:
            reason = _reason(error, line.peer)
        finally:
            # Of a stream that is being closed nothing more is read, but something may be unsent.
            if not line.closing or work == self._write:
                self._end(line, reason)

    async def _read(self, line: _Line) -> None:
        while True:
            try:
                data = await read_frame(line.stream, MESSAGE_BYTES_MAX)
            except FrameError as error:
                self.feed(GarbageIn(line.peer, line.number, str(error)))
                raise
            if line.closing:
                continue  # read on, so that what we still send can arrive
            try:
                message = decode_message(data)
            except RecordError as error:
                self.feed(GarbageIn(line.peer, line.number, error.reason))
                continue
            self.feed(MessageIn(line.peer, line.number, message))

    async def _write(self, line: _Line) -> None:
        while not line.ended.is_set():
            while line.queue:
                data = line.queue.popleft()
                line.queued_bytes -= len(data)
                await write_frame(line.stream, data)
            if line.closing:
                await line.stream.close()
                return
            line.wake.clear()
            await line.wake.wait()

    def _send(self, action: Send) -> None:
        line = self._lines.get(action.stream)
        if line is None:
            self.feed(StreamDown(action.peer, action.stream, "the stream is gone"))
        elif not line.put(encode_message(action.message)):
            self._end(line, f"over {QUEUE_MAX} messages or {QUEUE_BYTES_MAX} bytes are unsent")

    def _close_line(self, number: int, reason: str) -> None:
        """The core has forgotten the stream: send what is queued, then close."""
        line = self._lines.pop(number, None)
        if line is None:
            return
        log.debug("control stream closed: peer=%s: %s", short(line.peer), reason)
        line.closing = True
        line.wake.set()
        self._own(self._end_in_time(line), f"control closer {short(line.peer)} #{number}")

    async def _end_in_time(self, line: _Line) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await line.ended.wait()
        except TimeoutError:
            log.debug("control stream to %s did not close in time", short(line.peer))
        finally:
            self._end(line, "closed by us")

    def _end(self, line: _Line, reason: str) -> None:
        """Gives a stream up, once, and tells the core unless it has forgotten the stream."""
        if line not in self._served:
            return
        self._served.discard(line)
        line.give_up()
        if self._lines.pop(line.number, None) is not None:
            self.feed(StreamDown(line.peer, line.number, reason))

    def _own(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _reason(error: Exception, peer: PeerId) -> str:
    """Why something failed, in one line; an error of our own making is logged in full."""
    if isinstance(error, DialError):
        return "; ".join(f"{address or 'dial'}: {why}" for address, why in error.reasons)
    if isinstance(error, TransportError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    log.error("serving %s failed", short(peer), exc_info=error)
    return f"an error on our side: {error!r}"
