"""The public page of a run, served by the daemon to anybody: dugnad.dashboard, fed from memory.

Everything is told in the daemon's loop and costs microseconds; what the daemon calls only makes a
note to be told in the next turn of the loop, so that nothing that goes wrong here reaches the
exchange. The page shows what its readers may see: no address, no path of this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dugnad.averaging import events as averaging
from dugnad.averaging.board import machine_rows
from dugnad.dashboard import events as ev
from dugnad.dashboard.app import DashboardError, DashboardServer
from dugnad.dashboard.feed import RunFeed
from dugnad.dht.ids import PeerId, peer_text
from dugnad.peer import clock
from dugnad.peer.config import Endpoint
from dugnad.peer.errors import UserError
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.pagehistory import PageHistory
from dugnad.peer.pagereceipts import DaemonReceipts, PageReceipts
from dugnad.peer.pageviews import (
    Moment,
    adopted_heads,
    lasting,
    own_state,
    peer_row,
    peer_rows,
    run_described,
    standing_head,
    why_gone,
    without_addresses,
)
from dugnad.peer.store import StoreError
from dugnad.peer.training import flat
from dugnad.peer.unitsview import unit_counts

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

TICK_S: Final = 1.0
PEERS_S: Final = 3.0
"""What changed of peers is told this often."""
SEEN_S: Final = 15.0
"""When each peer was last seen is told this often; nothing else of it may have changed."""
NUMBERS_S: Final = 5.0
"""Between two measurements on the charts, two boards, two signs of life."""
UNITS_S: Final = 15.0
"""Looking through the open units takes up to ten milliseconds."""
LOOP_SHARE: Final = 0.01
"""Of the daemon's loop that one kind of news may take: in a large swarm it is told more seldom."""
HISTORY_S: Final = 15.0
"""What a kill costs the charts. A dozen rows are written then, and nothing waits for the disk."""
SAMPLE_S: Final = 60.0
SAMPLE_BYTES: Final = 64
SAMPLE_SHARE: Final = 0.005
"""Of the learner's time: a model that writes slowly writes seldom."""
DUE_CHANGE_MS: Final = 500
"""A merge that is expected so much earlier or later is told anew."""
PUBLIC_KINDS: Final = frozenset({"sync", "listed", "clock", "identity"})
"""Notes of the journal that strangers may read. Others can hold paths of this machine, or a hostile
peer makes as many of them as it likes; who comes and goes is told without the journal."""


class PublicPage:
    """The page of one daemon: `start`, be told, `close`. Belongs to the daemon's loop."""

    def __init__(self, daemon: Daemon, endpoint: Endpoint) -> None:
        self.daemon = daemon
        self.endpoint = endpoint
        self.receipts = PageReceipts(DaemonReceipts(daemon))
        self.history = PageHistory(daemon.store)
        self.feed = RunFeed(self.receipts)
        self._server: DashboardServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._next: dict[str, float] = {}
        self._open = False
        self._noted = 0
        self._top: dict[int, int] = {}
        self._due: dict[int, int] = {}
        self._rows: dict[str, ev.PeerRow] = {}
        self._listed: dict[str, int] = {}
        self._tips: tuple[bytes, ...] = ()
        self._units: tuple[tuple[str, int], ...] = ()
        self._scored: tuple[int, float] | None = None
        self._round = 0
        self._earned: tuple[ev.EvaluatedRow, ...] = ()
        self._prepared: tuple[ev.PreparedRow, ...] = ()
        self._stepped = 0
        self._speed_known = False
        self._sampling = False
        self._restored = 0
        """Tokens of the kept history: until the next merge the daemon counts from nothing."""

    # -- life ----------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where the page is; '' before `start` and after `close`."""
        return self._server.address if self._server is not None else ""

    async def start(self) -> None:
        """`open`, and serve. UserError E018: the port cannot be had."""
        await self.open()
        server = DashboardServer(self.feed, self.endpoint.host, self.endpoint.port)
        try:
            await server.start()
        except DashboardError as error:
            raise UserError("E018", error.reason, error.fix) from error
        self._server = server
        self._next["history"] = clock.now() + HISTORY_S
        self._own(self._watch(), "public page")

    async def open(self) -> None:
        """Take up the kept history, tell what is so already, and from here on what happens."""
        await self._restore()
        self._begin()

    async def close(self) -> None:
        """Stop serving at once, and keep the history. May be called again."""
        begun, self._open = self._open, False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
            self._server = None
        if begun:
            await self._keep()

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:  # Any: nobody sends
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The page may fail; the daemon goes on and says so."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.daemon.note("page", f"the {task.get_name()} is told no more news: {error!r}")

    async def _restore(self) -> None:
        try:
            history = await self.history.load(clock.wall_ms())
        except (StoreError, ValueError) as error:
            self.daemon.note("page", f"the kept history cannot be used, a new one begins: {error}")
            return
        self.feed = RunFeed(self.receipts, history)
        self._restored = self.feed.state().tokens

    async def _keep(self) -> None:
        try:
            await self.history.save(self.feed.state().history)
        except StoreError as error:
            self.daemon.note("page", f"the history is not kept: {error.reason}; {error.fix}")

    def _begin(self) -> None:
        daemon, at = self.daemon, moment()
        self.feed.publish(run_described(daemon.manifest, daemon.run_id, "", at.wall_ms))
        for p, shell in enumerate(daemon.averager.fragments):
            self._top[p] = shell.core.head.version
            head = standing_head(p, shell.core.head, at.wall_ms)
            if head is not None:
                self.feed.publish(head)
        for peer in (daemon.identity.peer, *daemon.averager.live()):
            self._seen(peer, at)
        self._open = True
        self.tick(at)

    # -- what the daemon calls -----------------------------------------------------------------

    def linked(self, link: str) -> None:
        """Others can join by this link."""
        daemon = self.daemon
        self.feed.publish(run_described(daemon.manifest, daemon.run_id, link, clock.wall_ms()))

    def peer_up(self, peer: PeerId) -> None:
        """A peer is here."""
        self._soon(self._came, peer)

    def peer_gone(self, peer: PeerId, kind: str, reason: str, taken: int) -> None:
        """A peer left or is lost, and ``taken`` of its units are this peer's now."""
        self._soon(self._went, peer, kind, reason, taken)

    def adopted(self, p: int, action: averaging.Adopt) -> None:
        """A fragment has a new head."""
        self._soon(self._merged, p, action)

    def _soon(self, tell: Callable[..., None], *args: object) -> None:
        if self._open:
            asyncio.get_running_loop().call_soon(tell, *args)

    def _came(self, peer: PeerId) -> None:
        self._seen(peer, moment())

    def _seen(self, peer: PeerId, at: Moment) -> None:
        row = peer_row(self.daemon, peer, self._listed, at)
        self._rows[row.peer] = row
        self.feed.publish(ev.PeerSeen(at_ms=at.wall_ms, row=row))

    def _went(self, peer: PeerId, kind: str, reason: str, taken: int) -> None:
        now, text = clock.wall_ms(), peer_text(peer)
        self._rows.pop(text, None)
        self.feed.publish(
            ev.PeerGone(
                at_ms=now,
                peer=text,
                how="left" if kind == "left" else "lost",
                reason=why_gone(reason),
            )
        )
        if taken:
            label = self.daemon.happenings.label
            source, target = label(peer), label(self.daemon.identity.peer)
            self.feed.publish(ev.UnitsMoved(at_ms=now, units=taken, source=source, target=target))

    def _merged(self, p: int, action: averaging.Adopt) -> None:
        for head in adopted_heads(self.daemon, p, action, clock.wall_ms()):
            if head.version <= self._top.get(p, 0):  # another lineage was chosen: told once only
                head = msgspec.structs.replace(head, listed=(), sent_bytes=0, plain_bytes=0)
            self._top[p] = max(self._top.get(p, 0), head.version)
            self.feed.publish(head)
        self._tell_due(moment())

    # -- now and then --------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(moment())
            if self._is_due("history", HISTORY_S, clock.now()):
                await self._keep()

    def _is_due(self, name: str, every: float, now: float) -> bool:
        if now < self._next.get(name, 0.0):
            return False
        self._next[name] = now + every
        return True

    def tick(self, at: Moment) -> None:
        """Tell what is due at this moment."""
        self._tell_journal()
        self._tell_due(at)
        for name, every, tell in (
            ("peers", PEERS_S, self._tell_peers),
            ("status", NUMBERS_S, self._tell_status),
            ("measured", NUMBERS_S, self._tell_measured),
            ("board", NUMBERS_S, self._tell_board),
            ("units", UNITS_S, self._tell_units),
        ):
            if self._is_due(name, every, at.now):
                began = clock.now()
                tell(at)
                took = clock.now() - began
                self._next[name] = at.now + max(every, took / LOOP_SHARE)
        if self._may_sample() and self._is_due("sample", SAMPLE_S, at.now):
            self._sampling = True
            self._own(self._sample(), "sample of the public page")

    def _tell_journal(self) -> None:
        while rows := self.daemon.journal.since(self._noted):
            for row in rows:
                self._noted = row.n
                if row.kind in PUBLIC_KINDS:
                    text = without_addresses(row.text)
                    self.feed.publish(ev.Happened(at_ms=row.at_ms, kind=row.kind, text=text))

    def _tell_due(self, at: Moment) -> None:
        for p, shell in enumerate(self.daemon.averager.fragments):
            due = shell.core.view.due_at
            due_ms = at.wall_of(due) if due > 0.0 else 0
            if due_ms and abs(due_ms - self._due.get(p, 0)) >= DUE_CHANGE_MS:
                self._due[p] = due_ms
                self.feed.publish(ev.MergeDue(at_ms=at.wall_ms, fragment=p, due_ms=due_ms))

    def _tell_peers(self, at: Moment) -> None:
        everybody = self._is_due("seen", SEEN_S, at.now)
        rows = {row.peer: row for row in peer_rows(self.daemon, self._listed, at)}
        changed = tuple(
            row
            for row in rows.values()
            if everybody or lasting(row) != lasting(self._rows.get(row.peer))
        )
        self._rows = rows
        if changed:
            self.feed.publish(ev.PeerChanged(at_ms=at.wall_ms, rows=changed))

    def _tell_status(self, at: Moment) -> None:
        me = self.daemon.identity.peer
        state, reason = own_state(self.daemon)
        row = self._rows.get(peer_text(me))
        self.feed.publish(
            ev.Status(
                at_ms=at.wall_ms,
                peer=peer_text(me),
                name=row.name if row is not None else "",
                state=state,
                reason=reason,
            )
        )

    def _tell_measured(self, at: Moment) -> None:
        training, vitals, now = self.daemon.training, self.daemon.vitals, at.wall_ms
        tokens = max(vitals.swarm_tokens, self._restored)
        if training.loss is not None and training.steps != self._stepped:
            self._stepped = training.steps
            self.feed.publish(ev.TrainLoss(at_ms=now, tokens=tokens, loss=training.loss))
        self._tell_evaluated(at)
        scored = vitals.anchor_losses[-1] if vitals.anchor_losses else None
        if scored is not None and scored is not self._scored and not self._round:
            self._scored = scored
            scored_at = max(scored[0], self._restored)
            self.feed.publish(ev.HeldOutLoss(at_ms=now, tokens=scored_at, loss=scored[1]))
        speed = vitals.swarm_tokens_per_s()
        self._speed_known = self._speed_known or speed > 0.0
        if self._speed_known:  # before, nobody has measured anything: that is no zero
            self.feed.publish(ev.Throughput(at_ms=now, tokens_per_s=speed))

    def _tell_evaluated(self, at: Moment) -> None:
        """Rounds that are over, and what evaluators earned. Once there are rounds they are the
        curve: they score much more text than this peer alone."""
        core = self.daemon.evaluator.core
        done = core.curve()[:-1]
        for point in done:
            if point.version > self._round:
                self._round = point.version
                tokens = max(point.total, self._restored)
                loss = ev.HeldOutLoss(at_ms=at.wall_ms, tokens=tokens, loss=point.loss)
                self.feed.publish(loss)
        rows = tuple(
            ev.EvaluatedRow(peer_text(PeerId(r.peer)), r.confirmed, r.pending, r.disputed)
            for r in core.earned()
        )
        if rows != self._earned:
            self._earned = rows
            self.feed.publish(ev.Evaluations(at_ms=at.wall_ms, rows=rows))
        prepared = tuple(
            ev.PreparedRow(peer_text(PeerId(r.peer)), r.confirmed, r.pending, r.disputed)
            for r in self.daemon.preparer.core.earned()
        )
        if prepared != self._prepared:
            self._prepared = prepared
            self.feed.publish(ev.Preparations(at_ms=at.wall_ms, rows=prepared))

    def _tell_units(self, at: Moment) -> None:
        daemon = self.daemon
        units = daemon.units.status(at.now)
        numbers = unit_counts(units, daemon.ledger.fold)
        shown = ("open", "claimed", "trained", "listed", "settled")
        counts = (
            *((state, numbers[state]) for state in shown),
            ("done twice", numbers["twice"]),
            ("given up", numbers["lost"]),
        )
        if counts != self._units:
            self._units = counts
            self.feed.publish(ev.UnitCounts(at_ms=at.wall_ms, counts=counts))

    def _tell_board(self, at: Moment) -> None:
        daemon = self.daemon
        fold = daemon.ledger.fold
        tips = tuple(fold.tip(p)[1] for p in range(len(daemon.averager.fragments)))
        if tips == self._tips:
            return
        self._tips = tips
        board = daemon.ledger.board()
        self._listed = {row.peer: row.tokens + row.provisional for row in machine_rows(board)}
        roster = daemon.swarm.roster
        met = {peer_text(peer) for peer in (roster.known() if roster is not None else ())}
        known = len({*self._listed, *met, peer_text(daemon.identity.peer)})
        heard = len(self._listed)
        self.feed.publish(
            ev.BoardComputed(at_ms=at.wall_ms, board=board, peers_heard=heard, peers_known=known)
        )

    # -- what the model writes -----------------------------------------------------------------

    def _may_sample(self) -> bool:
        daemon = self.daemon
        ready = daemon.training.ready is not None and daemon.vitals.synced
        merged = any(shell.core.head.version for shell in daemon.averager.fragments)
        return ready and merged and not self._sampling and not daemon.leaving.is_set()

    async def _sample(self) -> None:
        daemon = self.daemon
        began = clock.now()
        merges = sum(shell.core.head.version for shell in daemon.averager.fragments)
        tokens = max(daemon.vitals.swarm_tokens, self._restored)
        anchors = flat([state.theta for state in daemon.averager.anchors()])
        try:
            text = await daemon.training.trainer.sample(anchors, b"", SAMPLE_BYTES, merges)
        except LearnerGone:
            return
        finally:
            self._sampling = False
            took = clock.now() - began
            self._next["sample"] = began + max(SAMPLE_S, took / SAMPLE_SHARE)
        self.feed.publish(
            ev.SampleText(
                at_ms=clock.wall_ms(),
                text=text.decode("utf-8", "replace"),
                step=merges,
                tokens=tokens,
            )
        )


def moment() -> Moment:
    """Now, on both clocks."""
    return Moment(clock.now(), clock.wall_ms())
