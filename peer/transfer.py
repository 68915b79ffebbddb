"""Handing bulk data over: contributions to a home, and whatever a peer holds to those who pull it.

`ContributionServer` is the receiving end of CONTRIBUTE (`dugnad.peer.pushing` is the other),
`PullServer` the serving end of PULL (`dugnad.peer.pull` is the other). Frames and bounds are in
`dugnad.peer.transferwire`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Protocol

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS
from dugnad.averaging.formats import (
    CommitRecord,
    Contribution,
    HeadRow,
    UnitPiece,
    contribution_fault,
    pieces_root,
    signature_holds,
)
from dugnad.averaging.reconcile import summarise
from dugnad.averaging.tree import LEAF_PARAMS, Vector, array_bytes, leaf_hashes, root_of
from dugnad.averaging.worker import Commit
from dugnad.dht.frames import (
    HEADER_BYTES,
    TOGETHER_BYTES,
    FrameError,
    framed,
    read_frame,
    write_frame,
)
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.keptstreams import REST_S, RESTING_MAX, RESTING_PER_PEER_MAX
from dugnad.dht.ports import Stream, Transport
from dugnad.dht.records import RecordError, Verifier, decode, encode
from dugnad.peer.flow import Meter, Rates
from dugnad.peer.pacedstream import LOOK_S, stream_time
from dugnad.peer.pushing import word_of
from dugnad.peer.requestsin import Asked, next_request
from dugnad.peer.transferwire import (
    BUDDY_PROTOCOL,
    COMMITS_BYTES_MAX,
    CONTRIBUTE_PROTOCOL,
    CONTRIBUTIONS_MAX,
    CONTRIBUTIONS_PER_PEER_MAX,
    IDLE_S,
    OFFER_BYTES_MAX,
    PIECES_BYTES_MAX,
    PULL_PROTOCOL,
    PULLS_MAX,
    PULLS_PER_PEER_MAX,
    READS_AT_ONCE,
    SENDING_BYTES_MAX,
    SENDING_PER_PEER_BYTES_MAX,
    Gate,
    GetBlock,
    GetCommits,
    GetHeads,
    GetLeaves,
    GetManifest,
    GetNews,
    GetPieces,
    GetShard,
    GetStatements,
    GetStatementSummaries,
    GetSummaries,
    Got,
    Here,
    NotHere,
    Offer,
    PacedStream,
    Refusal,
    Request,
    Rest,
    Room,
    Slots,
    Stalled,
    Traffic,
    byte_bounds,
    off_loop,
    plain,
)
from dugnad.peer.transferwire import (
    PullError as PullError,
)

SizeOf = Callable[[int, str], int | None]
"""(fragment, codec), foreign, -> bytes of such a payload; None if this run has no such thing."""
Take = Callable[[Contribution, tuple[UnitPiece, ...], bytes], Awaitable[str]]
"""Takes a contribution whose signature holds, and whose payload has its root unless it is said that
`take` looks itself; '' or why not."""
Refused = Callable[[PeerId, str], None]
"""(sender, reason): told of every contribution that was turned down."""

_FLOAT_BYTES: Final = 4
LISTEN_S: Final = 86_400.0
"""How long the next request may take while an answer is on its way: that has a limit of its own."""


class ContributionServer:
    """Receives contributions: each is refused with a reason, or checked and handed to `take`.

    Anybody may bring one (a buddy hands in what a peer that left had made): its maker's signature
    is what counts. Nothing is received that is longer than `size_of` says.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunId,
        size_of: SizeOf,
        take: Take,
        verify: Verifier,
        *,
        refused: Refused = lambda peer, reason: None,
        idle_s: float = IDLE_S,
        traffic: Traffic | None = None,
        drafts: bool = False,
        roots: bool = True,
    ) -> None:
        """`refused` hears each refusal; a sender that gives nothing for `idle_s` is cut. `drafts`
        are taken on a stream of their own, and from their makers only. Without `roots` it is `take`
        that compares the payload with its root, which is then hashed once."""
        self._transport, self._run = transport, run
        self._size_of, self._take, self._verify = size_of, take, verify
        self._refused, self._idle_s = refused, idle_s
        self._traffic = traffic or Traffic()
        self._drafts, self._roots = drafts, roots
        self._places = Slots(CONTRIBUTIONS_PER_PEER_MAX)
        self._gate = Gate("contributions", each=CONTRIBUTIONS_PER_PEER_MAX, total=CONTRIBUTIONS_MAX)
        self._resting = Gate("streams at rest", each=RESTING_PER_PEER_MAX, total=RESTING_MAX)

    async def start(self) -> None:
        """From now on serves; ends with the transport."""
        protocol = BUDDY_PROTOCOL if self._drafts else CONTRIBUTE_PROTOCOL
        await self._transport.accept(protocol, self._serve)

    async def _serve(self, stream: Stream) -> None:
        header = b""
        while True:
            line = PacedStream(stream, self._idle_s, self._traffic)
            taken = await self._serve_one(line, header)
            if not taken or not line.lasts:
                return
            line.over()
            header = await _rested(stream, self._resting, self._traffic)
            if not header:
                return

    async def _serve_one(self, line: PacedStream, header: bytes) -> bool:
        """Receives one contribution and answers; whether it was taken. `header` is what was read of
        its offer."""
        try:
            async with self._places.of(line.peer):
                with self._gate.hold(line.peer):
                    reason = await self._receive(line, header)
        except Refusal as refusal:
            reason = refusal.reason
        except (FrameError, Stalled) as fault:
            reason = plain(str(fault))
        if reason:
            self._refused(line.peer, reason)
        await write_frame(line, reason.encode())
        return not reason

    async def _receive(self, line: PacedStream, header: bytes) -> str:
        try:
            data = await read_frame(line, OFFER_BYTES_MAX, header)
            offer = decode(data, Offer, OFFER_BYTES_MAX)
        except RecordError as fault:
            raise Refusal(fault.reason) from None
        made = offer.contribution
        if self._drafts and made.peer != line.peer:
            raise Refusal("a draft is taken from its maker only")
        self._check(made, offer.pieces)
        room = Room(made.payload_bytes)
        tell = partial(_tell, line) if offer.tells else None
        await line.read_into(room.view, tell, offer.each)
        payload = room.take()
        if self._roots:
            found = await off_loop(len(payload), partial(_payload_root, payload, made.codec))
            if found != made.payload_root:
                raise Refusal("the payload does not match its root")
        return plain(await self._take(made, offer.pieces, payload))

    def _check(self, made: Contribution, pieces: tuple[UnitPiece, ...]) -> None:
        """Refusal of what is wrong before the payload has come."""
        if fault := contribution_fault(made, pieces):
            raise Refusal(fault)
        size = self._size_of(made.fragment, made.codec) if made.codec in CODECS else None
        if size is None:
            raise Refusal(f"there is no fragment {made.fragment} with codec {made.codec!r} here")
        if made.payload_bytes != size:
            raise Refusal(f"a payload of {made.payload_bytes} bytes where {size} were due")
        if not signature_holds(made, self._run, self._verify):
            raise Refusal("the maker's signature does not hold in this run")
        if pieces_root(self._run, pieces) != made.pieces_root:
            raise Refusal("the unit pieces do not match their root")


async def _rested(stream: Stream, resting: Gate, traffic: Traffic) -> bytes:
    """The header of the next transfer's first frame; nothing where too many streams wait for one.
    TransportError when none comes."""
    try:
        with resting.hold(stream.peer):
            return await PacedStream(stream, REST_S, traffic).read(HEADER_BYTES)
    except Refusal:
        return b""


async def _tell(line: PacedStream, total: int) -> None:
    await write_frame(line, word_of(total))


def _payload_root(payload: bytes, codec: str) -> bytes:
    bounds = byte_bounds(len(payload), CODECS[codec].encoded_size(LEAF_PARAMS))
    return root_of(leaf_hashes(payload, bounds))


class Donor(Protocol):
    """What a peer holds and gives to others. No method raises; None or nothing: not here.

    The first five are called on the event loop and must answer at once; the others may read the
    disk and are called in threads.
    """

    def manifest(self) -> bytes | None:
        """The encoded manifest of the run."""
        ...

    def heads(self) -> tuple[HeadRow, ...]:
        """The heads of all fragments."""
        ...

    def news(self) -> bytes | None:
        """Who is here and how the run stands, encoded."""
        ...

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        """The payload of a commit with its leaf hashes."""
        ...

    def anchor(self, fragment: int, digest: bytes) -> AnchorState | None:
        """The anchors and momenta after a commit."""
        ...

    def shard(self, number: int) -> bytes | None:
        """A whole, verified shard of the text."""
        ...

    def block(self, name: bytes) -> bytes | None:
        """The tokens of a prepared unit, with that SHA-256."""
        ...

    def commits(self, fragment: int, digest: bytes, count: int) -> tuple[CommitRecord, ...]:
        """A commit and its ancestors, newest first, at most `count`; nothing if it is unknown."""
        ...

    def digests(self, fragment: int, since_ms: int) -> Sequence[bytes]:
        """Names of the commits of a fragment dated since then, ascending."""
        ...

    def statement_names(self) -> Sequence[bytes]:
        """Names of the statements that are held, ascending; at once, from memory."""
        ...

    def statements(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """The statements of these names that are held; at once, from memory."""
        ...


class PullServer:
    """Gives others what a `Donor` holds, within the bounds of `transferwire`."""

    def __init__(
        self,
        transport: Transport,
        run: RunId,
        donor: Donor,
        *,
        idle_s: float = IDLE_S,
        traffic: Traffic | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Streams on which nothing moves for `idle_s` are ended, those without requests too.

        `meter` knows how quickly each peer takes what it draws.
        """
        self._meter = meter or Rates(stream_time)
        self._transport, self._run, self._donor = transport, run, donor
        self._idle_s = idle_s
        self._traffic = traffic or Traffic()
        self._streams = Gate("transfers", each=PULLS_PER_PEER_MAX, total=PULLS_MAX)
        self._resting = Gate("streams at rest", each=RESTING_PER_PEER_MAX, total=RESTING_MAX)
        self._sending = Gate("bytes", each=SENDING_PER_PEER_BYTES_MAX, total=SENDING_BYTES_MAX)
        self._reads = asyncio.Semaphore(READS_AT_ONCE)

    async def start(self) -> None:
        """From now on serves; ends with the transport."""
        await self._transport.accept(PULL_PROTOCOL, self._serve)

    async def _serve(self, stream: Stream) -> None:
        line = PacedStream(stream, self._idle_s, self._traffic)
        if not line.lasts:
            asked = Asked(PacedStream(stream, LISTEN_S, self._traffic), line)
            reading = asyncio.create_task(asked.read(), name="requests in")
            try:
                await self._transfer(line, partial(asked.next, self._idle_s))
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            return
        header = b""
        while await self._transfer(line, partial(next_request, line), header):
            header = await self._following(line, stream)
            if not header:
                return
            line = PacedStream(stream, self._idle_s, self._traffic)

    async def _following(self, line: PacedStream, stream: Stream) -> bytes:
        """The header of the next transfer's first frame. The last one is measured until all of it
        has arrived: what it still has in the line's queues counts in the uplink's pace."""
        following = asyncio.create_task(
            _rested(stream, self._resting, self._traffic), name="a stream at rest"
        )
        try:
            try:
                while not (following.done() or line.all_arrived()):
                    await asyncio.wait((following,), timeout=LOOK_S)
            finally:
                self._measured(line)
            return await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def _measured(self, line: PacedStream) -> None:
        """The transfer is over, and all of it has arrived or never will."""
        assert line.flow is not None, "its transfer had begun"
        self._meter.end(line.peer, line.flow)
        line.over()

    async def _transfer(
        self, line: PacedStream, following: Callable[..., Awaitable[Request]], *header: bytes
    ) -> bool:
        """Answers until the other side rests; False when it asks for what cannot be: the stream is
        of no further use then."""
        line.flow, over = self._meter.begin(line.peer), False
        try:
            with self._streams.hold(line.peer):
                request = await following(*header)
                while not isinstance(request, Rest):
                    await self._answer(line, request)
                    if line.lasts and isinstance(request, GetPieces) and request.last:
                        break
                    request = await following()
        except Refusal as refusal:
            await write_frame(line, encode(NotHere(refusal.reason)))
        else:
            over = True
        finally:
            if not (over and line.lasts):
                self._measured(line)
        return over

    async def _answer(self, line: PacedStream, request: Request) -> None:
        """Answers one request. A refusal of it leaves the stream usable."""
        try:
            data = await self._find(request)
            tells = isinstance(request, GetPieces) and request.tells
            each = line.wants_words() if tells else 0
            here = framed(encode(Here(data.nbytes, each)))
            with self._sending.hold(line.peer, data.nbytes):
                if data.nbytes <= TOGETHER_BYTES and not each:
                    await line.write(here + data)
                else:
                    await line.write(here)
                    if each:
                        line.begin_flow()
                    await line.write(data)
                self._traffic.served += data.nbytes
        except Refusal as refusal:
            await write_frame(line, encode(NotHere(refusal.reason)))

    async def _find(self, request: Request) -> memoryview:
        match request:
            case GetManifest(run):
                found = self._donor.manifest() if run == self._run else None
            case GetHeads():
                found = encode(self._donor.heads())
            case GetNews():
                found = self._donor.news()
            case GetLeaves():
                found = b"".join(self._leaves(request)[0])
            case GetPieces():
                return self._pieces(request)
            case GetShard(number):
                async with self._reads:
                    found = await asyncio.to_thread(self._donor.shard, number)
            case GetBlock(name):
                async with self._reads:
                    found = await asyncio.to_thread(self._donor.block, name)
            case GetCommits():
                async with self._reads:
                    found = await asyncio.to_thread(self._commits, request)
            case GetSummaries():
                async with self._reads:
                    found = await asyncio.to_thread(self._summaries, request)
            case GetStatementSummaries(ranges):
                names = self._donor.statement_names()
                found = encode(tuple(summarise(names, part) for part in ranges))
            case GetStatements(names):
                found = encode(self._donor.statements(names))
            case Got() | Rest():
                raise Refusal("that is no question")
        if found is None:
            raise Refusal("it is not here")
        return memoryview(found)

    def _leaves(self, request: GetLeaves | GetPieces) -> tuple[tuple[bytes, ...], Commit | Vector]:
        """The leaf hashes and what they are of."""
        if request.kind == "payload":
            commit = self._donor.commit(request.fragment, request.digest)
            if commit is not None:
                return commit.leaves, commit
        else:
            state = self._donor.anchor(request.fragment, request.digest)
            if state is not None and request.kind == "theta":
                return state.theta_leaves, state.theta
            if state is not None:
                return state.momentum_leaves, state.momentum
        raise Refusal(f"that {request.kind} is not here")

    def _pieces(self, request: GetPieces) -> memoryview:
        leaves, source = self._leaves(request)
        if request.first + request.count > len(leaves):
            raise Refusal(f"there are {len(leaves)} leaves")
        if isinstance(source, Commit):
            leaf_bytes = CODECS[source.codec].encoded_size(LEAF_PARAMS)
        else:
            leaf_bytes = _FLOAT_BYTES * LEAF_PARAMS
        if request.count * leaf_bytes > PIECES_BYTES_MAX:
            raise Refusal(f"more than {PIECES_BYTES_MAX} bytes in one request")
        first, last = request.first, request.first + request.count
        if isinstance(source, Commit):
            return memoryview(source.payload)[first * leaf_bytes : last * leaf_bytes]
        part = array_bytes(source[first * LEAF_PARAMS : last * LEAF_PARAMS])
        return memoryview(part)

    def _summaries(self, request: GetSummaries) -> bytes:
        names = self._donor.digests(request.fragment, request.since_ms)
        return encode(tuple(summarise(names, part) for part in request.ranges))

    def _commits(self, request: GetCommits) -> bytes | None:
        """As many as fit, encoded; None when there are none."""
        found = self._donor.commits(request.fragment, request.digest, request.count)
        fitting: list[CommitRecord] = []
        size = _FLOAT_BYTES + 1  # the head of a msgpack array
        for record in found[: request.count]:
            size += len(encode(record))
            if size > COMMITS_BYTES_MAX:
                break
            fitting.append(record)
        return encode(fitting) if fitting else None
