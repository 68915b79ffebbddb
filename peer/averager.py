"""The exchange's shell: one core and one set of vectors per fragment, and what the cores ask for.

Two lanes of work per fragment, each in order and one at a time: the *learner lane* (hand in, adopt,
settle: whatever moves progress) and the *merge lane* (merge, sign, fetch, advance). Numbers run in
threads, signatures and files too; every result goes back into the core as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.exchange import Exchange
from dugnad.averaging.linkcontrol import lateness
from dugnad.averaging.worker import Commit, FragmentWorker, Kept, WorkError
from dugnad.dht.ids import PeerId
from dugnad.dht.records import encode
from dugnad.peer.exchangeports import LearnerAway, Ports
from dugnad.peer.handin import Draft, HandIns
from dugnad.peer.sendings import Sendings
from dugnad.peer.store import Promise, StoreError
from dugnad.peer.transferwire import OthersTurn, PullError

LANE_MAX: Final = 256
"""Jobs waiting in one lane; the cores ask for a handful at a time."""
THREADS: Final = 2
"""Threads for numbers, hashes and signatures: the learner has the cores."""

T = TypeVar("T")


@dataclass(slots=True)
class Lane:
    """Jobs of one fragment that run one after the other."""

    name: str
    queue: asyncio.Queue[Callable[[], Awaitable[None]]] = field(
        default_factory=lambda: asyncio.Queue(LANE_MAX)
    )


@dataclass(slots=True)
class FragmentShell:
    """One fragment: its core, its vectors, its lanes and its timer."""

    core: Exchange
    worker: FragmentWorker
    learner_lane: Lane
    merge_lane: Lane
    timer: asyncio.TimerHandle | None = None
    draft: Draft | None = None


class Averager:
    """All fragments of one peer. Belongs to one event loop; ``feed`` may be called at any time."""

    def __init__(self, ports: Ports, cores: Sequence[tuple[Exchange, FragmentWorker]]) -> None:
        self.ports = ports
        self.fragments = [
            FragmentShell(core, worker, Lane(f"learner lane {p}"), Lane(f"merge lane {p}"))
            for p, (core, worker) in enumerate(cores)
        ]
        self._live: dict[PeerId, None] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="numbers")
        self._tasks: set[asyncio.Task[None]] = set()
        self._hand_ins = HandIns(ports, self._thread)
        self._closed = False
        self._sendings = Sendings(ports, self.feed, self._look_if_left)
        self.handed_over = asyncio.Event()
        """Set when, after LeaveNow, everything is in other hands."""

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the lanes."""
        for shell in self.fragments:
            for lane in (shell.learner_lane, shell.merge_lane):
                self._own(self._run_lane(lane), lane.name)

    async def close(self) -> None:
        """Stop everything; nothing is sent any more."""
        self._closed = True
        for shell in self.fragments:
            if shell.timer is not None:
                shell.timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """While inside, no fragment moves progress: what was begun is done, the rest waits.

        Only between ``start`` and ``close``; inside, nothing may wait for a learner lane. QueueFull
        when one of them has been stuck for long.
        """
        loop, go_on = asyncio.get_running_loop(), asyncio.Event()
        there = [loop.create_future() for _ in self.fragments]

        def stop(arrived: asyncio.Future[None]) -> Callable[[], Awaitable[None]]:
            async def job() -> None:
                if not arrived.done():
                    arrived.set_result(None)
                await go_on.wait()

            return job

        try:
            for shell, arrived in zip(self.fragments, there, strict=True):
                self._queue(shell.learner_lane, stop(arrived))
            await asyncio.gather(*there)
            yield
        finally:
            go_on.set()

    def _own(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        if isinstance(task, asyncio.Task):
            task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.ports.on_fault(error)

    async def _run_lane(self, lane: Lane) -> None:
        while True:
            job = await lane.queue.get()
            try:
                await job()
            except StoreError as error:  # no room on the disk: said, and tried again by the cores
                self.ports.on_note(0, ev.Note("disk", f"{error.reason}; {error.fix}"))

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    # -- events in -----------------------------------------------------------------------------

    def feed(self, p: int, event: ev.Event) -> None:
        """Give an event to the core of fragment ``p`` and carry out what it asks for."""
        if self._closed:
            return
        shell = self.fragments[p]
        for action in shell.core.handle(event, self.ports.clock()):
            self._do(p, action)
        self._arm(p)
        if shell.core.view.leaving and self.left():
            self.handed_over.set()

    def feed_all(self, event: ev.Event) -> None:
        """Give an event to every core."""
        for p in range(len(self.fragments)):
            self.feed(p, event)

    def peer_up(self, peer: PeerId, *, can_home: bool) -> None:
        """A peer is live."""
        self._live[peer] = None
        self.feed_all(ev.PeerUp(peer, can_home))

    def peer_down(self, peer: PeerId) -> None:
        """A peer is lost or gone."""
        self._live.pop(peer, None)
        self.feed_all(ev.PeerDown(peer))

    def message_in(self, sender: PeerId, message: fm.Message) -> None:
        """A control message with valid signatures."""
        match message:
            case fm.Heads(rows, reply):
                for event in ev.heads_in(sender, message):
                    self._feed_known(event.row.fragment, event)
                if reply:
                    self.ports.network.send(sender, self.heads({row.fragment for row in rows}))
            case fm.Announce(commit):
                self._feed_known(commit.header.fragment, ev.CommitIn(sender, commit))
            case fm.Witness(ack):
                self._feed_known(ack.fragment, ev.AckIn(ack))
            case fm.WantCommits(fragment, digest, known):
                self._feed_known(fragment, ev.CommitsWanted(sender, digest, known))
            case fm.Commits(fragment, commits, checkpoint):
                self._feed_known(fragment, ev.CommitsIn(sender, commits, checkpoint))

    def _feed_known(self, fragment: int, event: ev.Event) -> None:
        if 0 <= fragment < len(self.fragments):
            self.feed(fragment, event)

    def heads(self, fragments: set[int] | None = None) -> fm.Heads:
        """My heads (and commits that still want a witness) in one message."""
        rows: list[fm.HeadRow] = []
        for p, shell in enumerate(self.fragments):
            if fragments is None or p in fragments:
                rows.extend(shell.core.follower.heads().rows)
        return fm.Heads(tuple(rows))

    async def contribution_in(
        self, contribution: fm.Contribution, pieces: tuple[fm.UnitPiece, ...], payload: bytes
    ) -> str:
        """A contribution has arrived with a valid signature; the answer to its sender."""
        p = contribution.fragment
        if not 0 <= p < len(self.fragments):
            return "no such fragment"
        shell = self.fragments[p]
        try:
            await self._thread(shell.worker.keep, contribution, pieces, payload)
        except WorkError as fault:
            return fault.reason
        key = (contribution.peer, contribution.seq)
        self.feed(p, ev.ContributionIn(contribution, pieces))
        if key in shell.core.home.inbox or shell.core.view.lineage.listing(shell.core.head, key):
            return ""  # it lies here, or is listed already: sending twice does no harm
        return shell.core.home.refused.get(key, "it cannot be listed any more")

    def _arm(self, p: int) -> None:
        shell = self.fragments[p]
        if shell.timer is not None:
            shell.timer.cancel()
            shell.timer = None
        deadline = shell.core.deadline
        if deadline is not None:
            wait = max(0.0, deadline - self.ports.clock())
            loop = asyncio.get_running_loop()
            shell.timer = loop.call_later(wait, self.feed, p, ev.Timer())

    # -- actions out ---------------------------------------------------------------------------

    def _do(self, p: int, action: ev.Action) -> None:
        shell = self.fragments[p]
        match action:
            case ev.Send(to, message):
                self.ports.network.send(to, message)
            case ev.Broadcast(message):
                self._say(message)
            case ev.Note():
                self.ports.on_note(p, action)
            case ev.HandIn():
                self._queue(shell.learner_lane, lambda: self._hand_in(p, action))
            case ev.Settle(seq, share):
                self._queue(shell.learner_lane, lambda: self._settle(p, seq, share))
            case ev.Forget(seq):
                self._queue(shell.learner_lane, lambda: self._forget(p, seq))
            case ev.Adopt():
                self._queue(shell.learner_lane, lambda: self._adopt(p, action))
            case ev.DropState(digest):
                self._queue(shell.learner_lane, lambda: self._drop_state(p, digest))
            case ev.DropPayload(key, _):
                self._queue(shell.merge_lane, lambda: self._drop_payload(p, key))
            case ev.Forward(key, to):
                self._forward(p, key, to)
            case ev.Merge():
                self._queue(shell.merge_lane, lambda: self._merge(p, action))
            case ev.Join():
                self._queue(shell.merge_lane, lambda: self._join(p, action))
            case ev.Sign():
                self._queue(shell.merge_lane, lambda: self._sign(p, action))
            case ev.Obtain():
                self._own(self._obtain(p, action), f"obtain {p}")
            case ev.SendContribution(seq, to):
                self._send_contribution(p, seq, to)
            case ev.CancelSend(seq, to):
                self._sendings.cancel((p, seq, to))
            case ev.Acknowledge():
                self._own(self._acknowledge(p, action), f"acknowledge {p}")

    def _queue(self, lane: Lane, job: Callable[[], Awaitable[None]]) -> None:
        lane.queue.put_nowait(job)

    async def _hand_in(self, p: int, action: ev.HandIn) -> None:
        shell, kept = self.fragments[p], None
        try:
            if shell.core.view.leaving or not self.ports.codecs.busy(p):
                kept = await self._hand_ins.due(shell, action)
        except StoreError:
            self.feed(p, ev.HandedIn(action.seq, None, ()))
            raise
        made = ev.HandedIn(action.seq, None, ())
        if kept is not None:
            made = ev.HandedIn(action.seq, kept.contribution, kept.pieces)
        self.feed(p, made)

    async def draft(self, p: int, codec: str) -> Kept | None:
        """What the next contribution will hold so far, for a neighbour to keep; None when there is
        nothing new. QueueFull when the lane has been stuck for long."""
        shell = self.fragments[p]
        done: asyncio.Future[Kept | None] = asyncio.get_running_loop().create_future()

        async def job() -> None:
            kept = None
            try:
                kept = await self._hand_ins.draft(shell, codec)
            finally:
                if not done.done():
                    done.set_result(kept)

        self._queue(shell.learner_lane, job)
        return await done

    async def _settle(self, p: int, seq: int, share: float) -> None:
        if share == 1.0:
            self.ports.codecs.listed(p, self.fragments[p].core.view.settings.lineage.staleness)
        await self._thread(self.fragments[p].worker.settle, seq, share)
        self.ports.learner.settled(p, seq, share)

    async def _forget(self, p: int, seq: int) -> None:
        self.fragments[p].worker.forget(seq)
        self.ports.learner.forgotten(p, seq)

    async def _adopt(self, p: int, action: ev.Adopt) -> None:
        shell = self.fragments[p]
        names = [fm.header_digest(one.header, self.ports.run) for one in action.applied]
        delta = await self._thread(shell.worker.adopt, action.digest, action.undone, names)
        node = shell.core.view.lineage.get(action.digest)
        for behind in lateness(action.applied, self.ports.signer.peer):
            self.ports.codecs.listed(p, behind)
        if node is not None and node.record is not None:
            self.ports.on_adopt(p, action, node.record.header)
        try:
            await self.ports.learner.add_in(p, delta)
        except LearnerAway:
            return  # the next learner starts from the anchors

    async def _drop_state(self, p: int, digest: bytes) -> None:
        self.fragments[p].worker.drop_state(digest)

    async def _drop_payload(self, p: int, key: ev.Key) -> None:
        if key not in self.fragments[p].core.home.inbox:
            self.fragments[p].worker.drop_payload(key)

    async def _merge(self, p: int, action: ev.Merge) -> None:
        worker = self.fragments[p].worker
        if action.parent not in worker.states:
            self.feed(p, ev.Merged(action.parent, (), "", b"", 0, b"", b""))
            return
        members = set(self._live) - {self.ports.signer.peer}
        interval_s = self.fragments[p].core.view.interval_s
        codec = self.ports.codecs.commit(p, members, interval_s)
        self.feed(p, await self._thread(worker.merge, action, codec))

    async def _join(self, p: int, action: ev.Join) -> None:
        self.feed(p, await self._thread(self.fragments[p].worker.join, action))

    async def _sign(self, p: int, action: ev.Sign) -> None:
        ports, worker = self.ports, self.fragments[p].worker
        header = action.header
        digest = fm.header_digest(header, ports.run)
        record = fm.CommitRecord(fm.sign_record(header, ports.run, ports.signer), action.inputs)
        payload = worker.made_payload(header)
        if payload is None:
            self.feed(p, ev.SignRefused(header.parent))
            return
        promise = Promise(p, header.parent, header.version, digest, encode(record), payload)
        try:
            allowed = await ports.records.promise_header(promise)
        except StoreError:
            self.feed(p, ev.SignFailed(header.parent))
            raise
        if not allowed:
            self.feed(p, ev.SignRefused(header.parent))
            return
        worker.sealed(digest, header)
        self.feed(p, ev.Signed(record, digest))

    async def _obtain(self, p: int, action: ev.Obtain) -> None:
        shell, network = self.fragments[p], self.ports.network
        size = shell.worker.buffers.size
        header = action.header
        try:
            if action.whole:
                theta, momentum = await network.anchors(action.sources, header, size)
                await self._in_lane(
                    shell.merge_lane, shell.worker.install, action.digest, header, theta, momentum
                )
            else:
                got = await network.payload(action.sources, header, size)
                advance, digest = shell.worker.advance, action.digest
                await self._in_lane(
                    shell.merge_lane, advance, digest, header, got.payload, got.leaves
                )
        except PullError as fault:
            waited = isinstance(fault, OthersTurn)
            self.feed(p, ev.ObtainFailed(action.digest, fault.reason, waited=waited))
        except WorkError as fault:
            self.feed(p, ev.ObtainFailed(action.digest, fault.reason, fault.lied))
        else:
            self.feed(p, ev.Obtained(action.digest))

    async def _in_lane(self, lane: Lane, work: Callable[..., None], *args: object) -> None:
        """Run ``work`` in a thread when it is its turn in the lane; raises what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def job() -> None:
            try:
                await self._thread(work, *args)
            except WorkError as fault:
                if not done.done():
                    done.set_exception(fault)
            else:
                if not done.done():
                    done.set_result(None)

        self._queue(lane, job)
        await done

    def _send_contribution(self, p: int, seq: int, to: PeerId) -> None:
        kept = self.fragments[p].worker.inbox.get((self.ports.signer.peer, seq))
        if kept is not None:
            sending = self._sendings.send(
                (p, seq, to), kept, self.fragments[p].core.view.interval_s
            )
            self._own(sending, f"send {p}/{seq}")

    def _forward(self, p: int, key: ev.Key, to: PeerId) -> None:
        kept = self.fragments[p].worker.inbox.get(key)
        if kept is not None:
            self._own(self._sendings.forward(p, kept, to), f"forward {p}")

    def _look_if_left(self) -> None:
        if self.left():
            self.handed_over.set()

    async def _acknowledge(self, p: int, action: ev.Acknowledge) -> None:
        me = self.ports.signer.peer
        ack = fm.sign_record(
            fm.Ack(me, p, action.version, action.digest), self.ports.run, self.ports.signer
        )
        self.feed(p, ev.AckIn(ack))
        self._say(fm.Witness(ack))

    def _say(self, message: fm.Message) -> None:
        if self.ports.say is not None:
            self.ports.say(message)
            return
        for peer in self._live:
            self.ports.network.send(peer, message)

    # -- what is held --------------------------------------------------------------------------

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        """A commit's payload to serve."""
        if not 0 <= fragment < len(self.fragments):
            return None
        return self.fragments[fragment].worker.commits.get(digest)

    def anchor(self, fragment: int, digest: bytes) -> AnchorState | None:
        """The anchors after a commit to serve."""
        if not 0 <= fragment < len(self.fragments):
            return None
        return self.fragments[fragment].worker.states.get(digest)

    def anchors(self) -> list[AnchorState]:
        """The anchors that each fragment stands at (as last adopted)."""
        return [shell.worker.buffers.anchor for shell in self.fragments]

    def live(self) -> tuple[PeerId, ...]:
        """Live peers, without me."""
        return tuple(self._live)

    def left(self) -> bool:
        """After LeaveNow: whether everything is handed in and in other hands."""
        return not self._sendings.forwarding and all(shell.core.left() for shell in self.fragments)
