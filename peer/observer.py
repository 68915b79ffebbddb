"""An observer: it watches a run over the network and serves its pages, and takes no part.

Nothing is trained, and torch is never loaded. It keeps the receipts that it reads and the history
of the page in the run's folder, as a peer does, so a restart goes on where it was. Its key lives as
long as the process: nobody is to know it again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from dugnad.averaging.board import machine_rows
from dugnad.dashboard import events as ev
from dugnad.dashboard.app import DashboardError, DashboardServer
from dugnad.dht.addresses import parse_address
from dugnad.dht.identity import FolderLock, FolderLocked, Identity
from dugnad.dht.ids import PeerId, name_of, parse_peer, peer_text, run_text
from dugnad.dht.link import Link, format_link
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.substrate import SeedReport, Substrate, SubstrateConfig
from dugnad.peer import clock
from dugnad.peer.assembly import credit_rules
from dugnad.peer.config import Endpoint
from dugnad.peer.control import ControlServer
from dugnad.peer.errors import UserError
from dugnad.peer.failures import as_user_error, no_seed_error, store_error, substrate_error
from dugnad.peer.journal import Journal
from dugnad.peer.manifest import Manifest, ManifestError, decode_manifest
from dugnad.peer.observernet import Scout
from dugnad.peer.observerview import ObserverView, peer_row
from dugnad.peer.pagehistory import PageHistory
from dugnad.peer.pageviews import Moment
from dugnad.peer.paths import Home, write_private
from dugnad.peer.pull import Puller, PullError
from dugnad.peer.runwatch import RunWatch
from dugnad.peer.sightings import Came, Change, Tick
from dugnad.peer.signals import stop_signals
from dugnad.peer.starting import folder_locked, manifest_error, stored_manifest
from dugnad.peer.store import StoreError
from dugnad.peer.storethread import StoreThread
from dugnad.peer.watchpage import WatchPage

TICK_S: Final = 1.0
AT_ONCE: Final = 4
"""Peers that are being asked at the same time. Once somebody has told the news one more is asked
each second: everybody's adverts are 40 KB in a full mesh, and each peer tells of all."""
COMPARE_S: Final = 15.0
"""Between two comparisons of receipts, one fragment each; as peers do among themselves."""
BOOK_S: Final = 60.0
"""Between two looks into the address book."""
PEERS_S: Final = 3.0
SEEN_S: Final = 15.0
NUMBERS_S: Final = 5.0
HISTORY_S: Final = 15.0
REMEMBER_S: Final = 60.0
KEEP_FOLD_S: Final = 3600.0
RESTART_S: Final = 2.0
LINK_PEERS: Final = 3
"""Peers named in the link that the page shows."""


class Observer:
    """One observer: `run` is its life."""

    def __init__(self, home: Home, endpoint: Endpoint, link: Link) -> None:
        self.home, self.endpoint, self.link = home, endpoint, link
        self.run_id = link.run
        self.journal = Journal()
        self.started_at = clock.now()
        self.stopping = asyncio.Event()
        self.failure: UserError | None = None
        self.store = StoreThread()
        self.manifest: Manifest
        self.scout: Scout
        self.page: WatchPage
        self.address = ""
        self._watch: RunWatch
        self._history: PageHistory
        self._substrate: Substrate
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: set[PeerId] = set()
        self._next: dict[str, float] = {}
        self._told: tuple[tuple[int, float] | None, tuple[int, float] | None] = (None, None)
        self._ended = False

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Watch until somebody says stop; the exit status. UserError."""
        runtime = self.home.runtime()
        key = runtime / "observer.key"
        key.unlink(missing_ok=True)
        self._substrate = Substrate(self._config(key), Identity.create(key))
        try:
            await self._open()
            await self._serve()
        finally:
            await self._shut_down()
            key.unlink(missing_ok=True)
        if self.failure is not None:
            raise self.failure
        return 0

    def _config(self, key: Path) -> SubstrateConfig:
        remembered = self.home.remembered(self.run_id)
        seeds = [*self.link.peers, *(one for one in remembered if one not in self.link.peers)]
        return SubstrateConfig(
            identity=key,
            runtime=self.home.runtime(),
            hosts=("127.0.0.1",),
            seeds=tuple(seeds),
            outbound_only=True,
            quic=False,
        )

    async def _open(self) -> None:
        """Network, manifest, store, and what the disk has of the run."""
        try:
            reports = await self._substrate.start()
        except SubstrateError as error:
            raise substrate_error(error) from error
        for one in reports:
            if not one.ok:
                print(f"seed {one.address}: {one.reason}", file=sys.stderr)
        self.manifest = await self._manifest(reports)
        place = self.home.run(self.run_id)
        try:
            await self.store.open(place.state, self.run_id)
        except StoreError as error:
            raise store_error(error) from error
        rules = credit_rules(self.manifest, self.run_id)
        self.scout = Scout(
            self._substrate, self._substrate, self.store, rules, clock.now, self._changed
        )
        self._watch = RunWatch(self.manifest, self.run_id)
        self.page = WatchPage(self.manifest, self.run_id, self.store)
        self._history = PageHistory(self.store)
        await self._begin_page()
        for one in reports:
            self.scout.know(one.address)

    async def _manifest(self, reports: Sequence[SeedReport]) -> Manifest:
        kept = stored_manifest(self.run_id, self.home)
        if kept is not None:
            return kept
        reached = [parse_address(one.address).peer for one in reports if one.ok]
        peers = [peer for peer in reached if peer is not None]
        if not peers:
            raise no_seed_error([(one.address, one.reason) for one in reports])
        try:
            data = await Puller(self._substrate, self.run_id).manifest(peers, self.run_id)
            manifest = decode_manifest(data, self.run_id)
        except ManifestError as error:
            raise manifest_error(error) from error
        except PullError as error:
            raise UserError(
                "E014",
                f"no peer has the run of this link: {error.reason}",
                "ask whoever gave you the link for a new one",
            ) from error
        place = self.home.run(self.run_id)
        place.create()
        write_private(place.manifest, data)
        return manifest

    async def _begin_page(self) -> None:
        now = clock.wall_ms()
        try:
            history = await self._history.load(now)
        except (StoreError, ValueError) as error:
            self.note("page", f"the kept history cannot be used, a new one begins: {error}")
            history = None
        self.page.begin(history, format_link(self.run_id, self.link.peers[:LINK_PEERS]), now)
        await self._look()

    async def _serve(self) -> None:
        server = DashboardServer(self.page.feed, self.endpoint.host, self.endpoint.port)
        control = ControlServer(ObserverView(self), self.home)
        try:
            await server.start()
            self.address = server.address
            await control.start()
            print(f"page: {server.address}", flush=True)
            self.own(self._beat(), "watching")
            await self.stopping.wait()
        except DashboardError as error:
            raise UserError("E018", error.reason, error.fix) from error
        finally:
            await control.close()
            await server.close()

    def own(self, work: Coroutine[Any, Any, None], name: str) -> None:  # Any: nobody sends
        """Run a task of this observer; its failure ends the observer with the reason."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = as_user_error(error)
            self.stopping.set()

    async def _shut_down(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "page"):
            await self._keep_history()
        await self._substrate.close()
        await self.store.close()

    def note(self, kind: str, text: str) -> None:
        """Something happened: for whoever runs this, and for the control API."""
        row = self.journal.add(kind, text)
        print(f"{kind}: {row.text}", file=sys.stderr, flush=True)

    # -- watching ------------------------------------------------------------------------------

    async def _beat(self) -> None:
        """Do what is due, about once a second, until cancelled."""
        while True:
            await self._tick(clock.now())
            await asyncio.sleep(TICK_S)

    def _due(self, name: str, every: float, now: float) -> bool:
        if now < self._next.get(name, 0.0):
            return False
        self._next[name] = now + every
        return True

    async def _tick(self, now: float) -> None:
        scout = self.scout
        if self._substrate.died.done():
            if self._due("p2pd", RESTART_S, now):
                await self._restart()
            return
        scout.tell(Tick())
        connected = await self._substrate.peers()
        gone = [peer for peer in scout.sightings.answering() if peer not in connected]
        room = min(AT_ONCE - len(self._asking), 1 if scout.news else AT_ONCE)
        for peer in [*gone, *scout.sightings.due(now, max(room, 0))]:
            if peer not in self._asking:
                self.own(self._ask(peer), "ask a peer")
        if self._due("compare", COMPARE_S, now):
            self.own(self._compare(), "compare receipts")
        if self._due("book", BOOK_S, now):
            self.own(self._read_book(), "read the address book")
        if scout.fresh:
            scout.fresh = False
            await self._look()
        self._tell(now)
        if self._due("history", HISTORY_S, now):
            await self._keep_history()
        if self._due("remember", REMEMBER_S, now):
            self._remember()
        if self._due("fold", KEEP_FOLD_S, now) and self.page.standing is not None:
            wall = clock.wall_ms()
            await self.store.call(lambda store: self._watch.keep(store, wall))

    async def _restart(self) -> None:
        self.note("network", "the libp2p daemon ended; it is restarted")
        try:
            await self._substrate.restart()
        except SubstrateError as error:
            self.note("network", f"it does not come back yet: {error}")

    async def _ask(self, peer: PeerId) -> None:
        self._asking.add(peer)
        try:
            await self.scout.ask(peer)
        finally:
            self._asking.discard(peer)

    async def _compare(self) -> None:
        got = await self.scout.compare()
        if got is not None and got.fault:
            self.note("receipts", f"a peer gave no receipts: {got.fault}")
        if fault := await self.scout.compare_statements():
            self.note("statements", f"a peer gave no statements: {fault}")

    async def _read_book(self) -> None:
        await self._substrate.meet(self.scout.sightings.answering())
        await self.scout.look_up()

    async def _look(self) -> None:
        """Read what came into the store, and tell the page."""
        standing = await self.store.call(self._watch.refresh)
        if standing is not None:
            rows = machine_rows(standing.board)
            self.scout.holds(standing.versions, (parse_peer(row.peer) for row in rows))
            known = map(peer_text, self.scout.sightings.peers)
            self.page.stands(standing, known, clock.wall_ms())

    # -- telling -------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        """Somebody came or went."""
        at, text = self._moment(), peer_text(change.peer)
        advert = self.scout.sightings.peers[change.peer].advert
        label = advert.label if advert is not None else name_of(change.peer)
        if isinstance(change, Came):
            self.note("peer", f"{label} is here")
            self.page.came(self._row(change.peer, at), at.wall_ms)
        else:
            self.note("left" if change.left else "lost", f"{label} is gone {change.reason}".strip())
            self.page.went(text, change.left, change.reason, at.wall_ms)

    @staticmethod
    def _moment() -> Moment:
        return Moment(clock.now(), clock.wall_ms())

    def _row(self, peer: PeerId, at: Moment) -> ev.PeerRow:
        sighting = self.scout.sightings.peers[peer]
        codec = self.manifest.exchange.hand_in_codec
        return peer_row(peer, sighting, self.page.listed.get(peer_text(peer), 0), codec, at)

    def _tell(self, now: float) -> None:
        at = self._moment()
        if self._due("peers", PEERS_S, now):
            seen = self.scout.sightings.peers
            rows = [self._row(p, at) for p, one in seen.items() if one.here or one.advert]
            self.page.peers(rows, at.wall_ms, everybody=self._due("seen", SEEN_S, now))
        if self._due("numbers", NUMBERS_S, now):
            self._tell_numbers(at.wall_ms)

    def _tell_numbers(self, now_ms: int) -> None:
        feed, news = self.page.feed, self.scout.news.values()
        here = len(self.scout.sightings.here())
        state = "observing" if here else "alone"
        reason = "" if here else "no peer of the run can be reached at the moment"
        feed.publish(
            ev.Status(at_ms=now_ms, peer="", name="an observer", state=state, reason=reason)
        )
        tokens = max((one.tokens for one in news), default=0)
        losses = [one.train_loss for one in news if one.train_loss is not None]
        newest = max((one.held_out_tokens for one in news), default=0)
        scores = [
            one.held_out_loss
            for one in news
            if one.held_out_loss is not None and one.held_out_tokens == newest
        ]
        train = (tokens, median(losses)) if losses else None
        held_out = (newest, median(scores)) if scores else None
        before, self._told = self._told, (train, held_out)
        self.page.measured(
            now_ms,
            train=train if train != before[0] else None,
            held_out=held_out if held_out != before[1] else None,
            speed=self.speed() if news else None,
        )
        self._tell_words(now_ms)

    def _tell_words(self, now_ms: int) -> None:
        """What the model writes, and the end of the run where most who are asked tell of it."""
        news = list(self.scout.news.values())
        sample = max(news, key=lambda one: one.sample_merges, default=None)
        shown = self.page.feed.state().sample
        if (
            sample is not None
            and sample.sample
            and (shown is None or shown.step < sample.sample_merges)
        ):
            self.page.feed.publish(
                ev.SampleText(
                    at_ms=now_ms,
                    text=sample.sample,
                    step=sample.sample_merges,
                    tokens=sample.sample_tokens,
                )
            )
        reasons = [one.ended for one in news if one.ended]
        if not self._ended and len(reasons) * 2 > len(news):
            self._ended = True
            self.page.feed.publish(ev.RunEnded(at_ms=now_ms, reason=reasons[0]))

    def speed(self) -> float:
        """Tokens a second of all that are here, as they say."""
        seen = self.scout.sightings.peers.values()
        adverts = [one.advert for one in seen if one.here and one.advert is not None]
        return sum(advert.tokens_per_s for advert in adverts)

    # -- the disk ------------------------------------------------------------------------------

    async def _keep_history(self) -> None:
        try:
            await self._history.save(self.page.feed.state().history)
        except StoreError as error:
            self.note("page", f"the history is not kept: {error.reason}; {error.fix}")

    def _remember(self) -> None:
        """Write down where the peers that answer are, and name them in the link of the page."""
        found: list[str] = []
        for peer in self.scout.sightings.answering():
            advert = self.scout.sightings.peers[peer].advert
            found.extend(advert.addresses[:2] if advert is not None else ())
        if found:
            self.home.remember(self.run_id, found)
            self.page.linked(format_link(self.run_id, found[:LINK_PEERS]), clock.wall_ms())


async def observe_run(home: Home, endpoint: Endpoint, link: Link) -> int:
    """Watch a run until a signal says stop; the exit status. UserError."""
    print(f"watching run {run_text(link.run)}; it is not taken part in", flush=True)
    home.create()
    try:
        with FolderLock(home.root):
            observer = Observer(home, endpoint, link)
            with stop_signals(observer.stopping):
                return await observer.run()
    except FolderLocked as error:
        raise folder_locked(error, home) from error
