"""Pulling: bulk data from whichever peers have it, every byte checked against hashes that we know.

Large things (a commit's payload, the anchors after it) come leaf by leaf from several donors at
once: each proves itself by the leaf hashes, whose root the commit's header names, and then draws
batches of leaves from one pool. What a donor leaves undone goes back to the pool; a donor that
fails or lies is dropped and named, and another takes its place. Small things are asked of one peer
after another. Memory: the arrays themselves, into which the bytes are received in place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from dugnad.averaging.codecs import COMMIT_CODECS
from dugnad.averaging.formats import (
    CommitRecord,
    Header,
    HeadRow,
    header_digest,
)
from dugnad.averaging.reconcile import Range, Summary
from dugnad.averaging.tree import HASH_BYTES, LEAF_PARAMS, Vector, root_of
from dugnad.averaging.worker import Commit
from dugnad.dht.frames import framed, read_frame, write_frame
from dugnad.dht.ids import PeerId, RunId, short
from dugnad.dht.ports import StreamEnded, Transport, TransportError
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.corpus import SHARD_BYTES
from dugnad.peer.flow import Flow, Meter, Rates
from dugnad.peer.manifest import MANIFEST_BYTES_MAX
from dugnad.peer.newswire import NEWS_BYTES_MAX, News
from dugnad.peer.pacedstream import stream_time
from dugnad.peer.pullchecks import (
    chain_in,
    head_rows_in,
    news_in,
    statements_in,
    summaries_in,
    with_hash,
)
from dugnad.peer.pulljob import Batch, Job, Part
from dugnad.peer.transferwire import (
    ANSWER_BYTES_MAX,
    COMMITS_BYTES_MAX,
    COMMITS_MAX,
    DONORS_AT_ONCE,
    HEADS_BYTES_MAX,
    IDLE_S,
    OPEN_S,
    PATIENCE_S,
    PULL_PROTOCOL,
    PULLS_PER_DONOR_MAX,
    REQUESTS_AHEAD,
    STATEMENTS_BYTES_MAX,
    SUMMARIES_BYTES_MAX,
    Answer,
    Blame,
    GetBlock,
    GetCommits,
    GetHeads,
    GetLeaves,
    GetManifest,
    GetNews,
    GetShard,
    GetStatements,
    GetStatementSummaries,
    GetSummaries,
    Got,
    Here,
    NotHere,
    PacedStream,
    Refusal,
    Request,
    Rest,
    Room,
    Slots,
    T,
    Traffic,
    off_loop,
    plain,
)
from dugnad.peer.transferwire import (
    PullError as PullError,
)

DONORS_TRIED_MAX: Final = 64
"""Donors of one transfer: everybody of a full mesh."""
AHEAD_BYTES_MIN: Final = 96 << 10
"""With less than this under way, a leaf of int8, the next is asked for: a line that carries one
leaf at a time stands still for a round trip after each."""
_NODE_BYTES: Final = 1024
"""A node of a tree of hashes takes as long as about so many bytes of a leaf."""
_FLOAT_BYTES: Final = 4
_NAMED_MAX: Final = 3

Blamed = Callable[[Blame], None]
"""Told of each donor that is dropped, also when the transfer then succeeds."""


@dataclass(frozen=True, slots=True)
class PullPolicy:
    """How long a donor may take, in seconds, and how many are drawn from at once."""

    open_s: float = OPEN_S
    idle_s: float = IDLE_S
    patience_s: float = PATIENCE_S
    donors: int = DONORS_AT_ONCE


class Puller:
    """Gets what other peers hold. Any number of transfers may run at once.

    Every method raises PullError when none of `peers` served the thing; they are tried in order.
    Each donor that is dropped is told to `blamed` at once and is in the error's `blame`.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunId | None = None,
        policy: PullPolicy | None = None,
        *,
        blamed: Blamed = lambda blame: None,
        traffic: Traffic | None = None,
        meter: Meter | None = None,
    ) -> None:
        """With `run`, commits of any other are refused. `traffic` counts bytes of all transfers,
        `meter` knows how quickly each donor gives."""
        self._transport, self._run, self._policy = transport, run, policy or PullPolicy()
        self._blamed, self._traffic = blamed, traffic or Traffic()
        self._meter = meter or Rates(stream_time)
        self._places = Slots(PULLS_PER_DONOR_MAX)

    async def manifest(self, peers: Sequence[PeerId], run: RunId) -> bytes:
        """The encoded manifest whose SHA-256 is `run`; not decoded."""
        check = partial(with_hash, run)
        return await self._ask(peers, GetManifest(run), MANIFEST_BYTES_MAX, check)

    async def shard(self, peers: Sequence[PeerId], number: int, sha256: bytes) -> bytes:
        """A shard of the text with that hash. To share the work, vary the order of `peers`."""
        check = partial(with_hash, sha256)
        return await self._ask(peers, GetShard(number), SHARD_BYTES, check)

    async def block(self, peers: Sequence[PeerId], name: bytes, size: int) -> bytes:
        """The tokens of a prepared unit: `size` bytes with that SHA-256."""
        return await self._ask(peers, GetBlock(name), size, partial(with_hash, name))

    async def heads(self, peers: Sequence[PeerId]) -> tuple[HeadRow, ...]:
        """The heads that the first of `peers` to answer stands at: its word, nothing more."""
        return await self._ask(peers, GetHeads(), HEADS_BYTES_MAX, head_rows_in)

    async def commits(
        self, peers: Sequence[PeerId], fragment: int, digest: bytes, count: int
    ) -> tuple[CommitRecord, ...]:
        """Commit `digest` and its ancestors, newest first: one to `count` of them (64 at most).

        Checked: well-formed, each is the parent of the one before, inputs match their roots. Not
        checked: the headers' signatures, which digests do not cover, and the acks.
        """
        request = GetCommits(fragment, digest, min(count, COMMITS_MAX))
        return await self._ask(
            peers, request, COMMITS_BYTES_MAX, partial(chain_in, self._run, request)
        )

    async def summaries(
        self, peer: PeerId, fragment: int, since_ms: int, ranges: tuple[Range, ...]
    ) -> tuple[Summary, ...]:
        """What one peer holds in ranges of its commits' digests; not judged against the ranges."""
        request = GetSummaries(fragment, since_ms, ranges)
        return await self._ask([peer], request, SUMMARIES_BYTES_MAX, summaries_in)

    async def statement_summaries(
        self, peer: PeerId, ranges: tuple[Range, ...]
    ) -> tuple[Summary, ...]:
        """What one peer holds in ranges of its statements' names; not judged against them."""
        request = GetStatementSummaries(ranges)
        return await self._ask([peer], request, SUMMARIES_BYTES_MAX, summaries_in)

    async def statements(self, peer: PeerId, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """The statements of these names (STATEMENTS_MAX at most) that one peer holds."""
        request = GetStatements(tuple(names))
        return await self._ask([peer], request, STATEMENTS_BYTES_MAX, statements_in)

    async def news(self, peer: PeerId) -> News:
        """What one peer tells an observer: its word, but for the adverts' own signatures, which are
        not checked.
        """
        return await self._ask([peer], GetNews(), NEWS_BYTES_MAX, news_in)

    async def payload(self, peers: Sequence[PeerId], header: Header, size: int) -> Commit:
        """The payload of a commit of a fragment with `size` parameters, matching its root, and the
        leaf hashes that it was compared with."""
        codec = COMMIT_CODECS.get(header.codec)
        if codec is None or header.payload_bytes != codec.encoded_size(size):
            raise PullError("the header's codec and payload size do not fit the fragment")
        room = Room(header.payload_bytes)
        leaf_bytes = codec.encoded_size(LEAF_PARAMS)
        part = Part("payload", header.payload_root, leaf_bytes, room.view)
        await self._collect(peers, header, [part])
        return Commit(codec.name, room.take(), part.hashes or ())

    async def anchors(
        self, peers: Sequence[PeerId], header: Header, size: int
    ) -> tuple[Vector, Vector]:
        """Parameters and momentum after a commit, matching its roots, as new writable arrays.

        Not checked: that the numbers are finite.
        """
        arrays = np.empty(size, "<f4"), np.empty(size, "<f4")
        views = [array.view(np.uint8).data for array in arrays]
        leaf_bytes = _FLOAT_BYTES * LEAF_PARAMS
        parts = [
            Part("theta", header.theta_root, leaf_bytes, views[0]),
            Part("momentum", header.momentum_root, leaf_bytes, views[1]),
        ]
        await self._collect(peers, header, parts)
        theta, momentum = (array.astype(np.float32, copy=False) for array in arrays)
        return theta, momentum

    async def theta(self, peers: Sequence[PeerId], header: Header, size: int) -> Vector:
        """The parameters alone, otherwise as `anchors`."""
        array = np.empty(size, "<f4")
        view = array.view(np.uint8).data
        await self._collect(
            peers, header, [Part("theta", header.theta_root, _FLOAT_BYTES * LEAF_PARAMS, view)]
        )
        return array.astype(np.float32, copy=False)

    # -- one answer from one peer --------------------------------------------------------------

    async def _ask(
        self,
        peers: Sequence[PeerId],
        request: Request,
        limit: int,
        check: Callable[[bytes], T],
    ) -> T:
        """What `check` makes of the first good answer; it raises Refusal for a bad one."""
        blame: list[Blame] = []
        for peer in tuple(dict.fromkeys(peers))[:DONORS_TRIED_MAX]:
            try:
                data = await self._ask_one(peer, request, limit)
                return await off_loop(len(data), partial(check, data))
            except Refusal as fault:
                self._drop(blame, Blame(peer, fault.reason, True))
            except (TransportError, _Unserved) as fault:
                self._drop(blame, Blame(peer, plain(str(fault)), False))
        raise _nobody(blame)

    async def _ask_one(self, peer: PeerId, request: Request, limit: int) -> bytes:
        while True:
            try:
                async with self._line(peer) as line:
                    await write_frame(line, encode(request))
                    size = (await _here(line)).size
                    if size > limit:
                        raise Refusal(f"it offered {size} bytes where at most {limit} can be due")
                    return await line.read(size)
            except _Dead:
                pass  # the next one that was kept, or a new one

    @contextlib.asynccontextmanager
    async def _line(self, peer: PeerId) -> AsyncIterator[PacedStream]:
        """A stream to a donor, once few enough are in use; without an exception all that was asked
        for on it has come, so it may be kept."""
        async with self._places.of(peer):
            stream = await self._transport.open(peer, PULL_PROTOCOL, self._policy.open_s)
            line, over = PacedStream(stream, self._policy.idle_s, self._traffic), False
            try:
                yield line
                if line.rests:
                    over = True
                elif line.lasts:
                    with contextlib.suppress(TransportError):  # it has ended: the next one is new
                        await write_frame(line, encode(Rest()))
                        over = True
            except StreamEnded:
                if line.may_be_dead:
                    raise _Dead from None
                raise
            finally:
                line.rest() if over else line.abort()

    def _drop(self, blame: list[Blame], one: Blame) -> None:
        blame.append(one)
        self._blamed(one)

    # -- leaves from many peers ----------------------------------------------------------------

    async def _collect(
        self, peers: Sequence[PeerId], header: Header, parts: Sequence[Part]
    ) -> None:
        """Fills the parts; PullError if that is not possible."""
        peers = tuple(dict.fromkeys(peers))[:DONORS_TRIED_MAX]
        digest = header_digest(header, RunId(header.run))
        at_once = min(self._policy.donors, len(peers))
        job = Job(header.fragment, digest, parts, peers, at_once)
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(self._work(job), name="transfer in") for _ in range(at_once)
            ]
            await job.finished.wait()
            for worker in workers:
                worker.cancel()
        if job.remaining:
            raise _nobody(job.blame)

    async def _work(self, job: Job) -> None:
        """Draws from one donor after another, until all is here or nobody is left."""
        try:
            while job.peers:
                peer = job.peers.popleft()
                try:
                    while await job.wants_more(self._policy.patience_s):
                        await self._draw(job, peer)
                    return
                except Refusal as fault:
                    self._drop(job.blame, Blame(peer, fault.reason, True))
                except (TransportError, _Unserved) as fault:
                    self._drop(job.blame, Blame(peer, plain(str(fault)), False))
        finally:
            job.leave()

    async def _draw(self, job: Job, peer: PeerId) -> None:
        """Fetches from a donor until the pool is empty. Refusal if it lies."""
        while True:
            try:
                async with self._line(peer) as line:
                    await self._draw_on(line, job)
                return
            except _Dead:
                pass  # the next one that was kept, or a new one

    async def _draw_on(self, line: PacedStream, job: Job) -> None:
        line.flow = flow = self._meter.begin(line.peer)
        job.lines.add(line)
        draw = _Draw(line, job, flow)
        try:
            await draw.run()
        finally:
            self._meter.end(line.peer, flow)
            job.lines.discard(line)
            job.put_back(draw.held)


class _Dead(Exception):
    """A stream that was kept from an earlier transfer had died."""


class _Unserved(Exception):
    """A donor says that it does not have the thing or is busy."""


async def _here(line: PacedStream) -> Here:
    """The next answer; _Unserved with its reason if it is a no, Refusal if garbage."""
    data = await read_frame(line, ANSWER_BYTES_MAX)
    try:
        answer: Answer = decode(data, Answer, ANSWER_BYTES_MAX)  # type: ignore[arg-type]
    except RecordError as fault:
        raise Refusal(fault.reason) from None
    if isinstance(answer, NotHere):
        raise _Unserved(plain(answer.reason))
    return answer


class _Draw:
    """What is drawn from one donor in one go: hashes where nobody has them yet, and batches until
    the pool is empty. No more is asked for than the donor's line carries in a moment: what it sends
    us later waits in queues that its heartbeats have to pass, too.
    """

    def __init__(self, line: PacedStream, job: Job, flow: Flow) -> None:
        self._line, self._job, self._flow = line, job, flow
        self._got = 0
        self._asked_last = False
        self.held: deque[Batch] = deque()
        """What was asked for and is not here."""

    async def run(self) -> None:
        """Until nothing is left to ask for. Refusal if the donor lies."""
        job = self._job
        unknown = [part for part in job.parts if part.hashes is None]
        asked = [encode(GetLeaves(part.kind, job.fragment, job.digest)) for part in unknown]
        await self._ask(asked)  # with the first batches, so that no round trip lies between
        for part in unknown:
            part.hashes = await self._hashes_in(part)
        while self.held:
            await self._batch_in(self.held[0])
            self._got += len(self.held.popleft().view)
            self._flow.arrived(self._got, stream_time())
            job.done()
            await self._ask([])

    async def _ask(self, requests: list[bytes]) -> None:
        """Sends these requests and those for the next batches."""
        job, flow, held = self._job, self._flow, self.held
        while len(held) < REQUESTS_AHEAD and job.pool and not self._asked_last:
            if held and flow.under_way >= max(flow.window, AHEAD_BYTES_MIN):
                break
            held.append(job.next(flow.room()))
            flow.sent(len(held[-1].view), stream_time())
            request = job.request(held[-1])
            self._line.rests = self._asked_last = request.last
            requests.append(encode(request))
        if requests:
            await self._line.write(b"".join(framed(request) for request in requests))

    async def _hashes_in(self, part: Part) -> tuple[bytes, ...]:
        """The leaf hashes of a part, matching its root; Refusal when they do not."""
        size = (await _here(self._line)).size
        if size != part.count * HASH_BYTES:
            raise Refusal(f"{size} bytes of hashes for {part.count} leaves of {part.kind}")
        data = await self._line.read(size)
        hashes = tuple(data[at : at + HASH_BYTES] for at in range(0, size, HASH_BYTES))
        found = await off_loop(part.count * _NODE_BYTES, partial(root_of, hashes))
        if found != part.root:
            raise Refusal(f"the leaf hashes of {part.kind} have another root than the header")
        return hashes

    async def _batch_in(self, batch: Batch) -> None:
        """Receives a batch in place; Refusal when a leaf is not what its hash says."""
        line, before = self._line, self._got
        here, view = await _here(line), batch.view
        size = here.size
        if size != len(view):
            raise Refusal(f"{size} bytes of {batch.part.kind} where {len(view)} were due")

        async def tell(arrived: int) -> None:
            await write_frame(line, encode(Got(before + arrived)))

        await line.read_into(view, tell if here.each else None, here.each)
        bad = batch.bad_leaf()  # an answer's bytes at most: less than handing it to a thread costs
        if bad is not None:
            raise Refusal(f"leaf {bad} of {batch.part.kind} has another hash than its list says")


def _nobody(blame: Sequence[Blame]) -> PullError:
    """The error when no donor is left."""
    if not blame:
        return PullError("there is nobody to ask")
    told = "; ".join(f"{short(one.peer)}: {one.reason}" for one in blame[:_NAMED_MAX])
    more = f"; and {len(blame) - _NAMED_MAX} more" if len(blame) > _NAMED_MAX else ""
    return PullError(f"none of {len(blame)} donors served it: {told}{more}", tuple(blame))
