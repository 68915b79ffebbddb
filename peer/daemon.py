"""The daemon: one peer of one run, from the first connection to the last hand-in.

Order of a life: lock the data folder, start libp2p, get the manifest, open the store, take up the
exchange where the disk left it, meet the others, get the data, start the learner, take part until
somebody says leave. ``Daemon`` wires the parts together and owns their order; each part knows its
own business.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import dugnad.peer.clock as clock
from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.outer import conformance
from dugnad.dht.advert import Advert, Device
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.link import Link
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.protocol import PROTOCOL
from dugnad.dht.records import verify_ed25519
from dugnad.dht.substrate import SubstrateConfig
from dugnad.peer.anchors import AnchorFiles
from dugnad.peer.arithmetic import bring_kernels
from dugnad.peer.assembly import (
    Who,
    credit_rules,
    make_fragments,
    make_units,
    unfinished,
)
from dugnad.peer.averager import Averager
from dugnad.peer.bringup import bring_up_learner
from dugnad.peer.buddy import Buddy
from dugnad.peer.config import Settings
from dugnad.peer.contextkeeper import ContextKeeper
from dugnad.peer.control import ControlServer
from dugnad.peer.corpus import ShardStore
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.departure import leave, request_leave
from dugnad.peer.duty import Duty
from dugnad.peer.errors import UserError
from dugnad.peer.evaluator import Evaluator
from dugnad.peer.exchangeports import Ports
from dugnad.peer.failures import as_user_error, no_seed_error, store_error, substrate_error
from dugnad.peer.happenings import REMEMBER, Happenings
from dugnad.peer.journal import Journal
from dugnad.peer.larder import Larder
from dugnad.peer.ledger import Ledger
from dugnad.peer.links import Links
from dugnad.peer.manifest import Manifest, run_id
from dugnad.peer.neighbours import Neighbours
from dugnad.peer.orderkeeper import OrderKeeper
from dugnad.peer.paths import Home
from dugnad.peer.preparer import Preparer
from dugnad.peer.progress import ProgressLog
from dugnad.peer.pull import PullError
from dugnad.peer.reachability import Reachability
from dugnad.peer.reporting import Report
from dugnad.peer.serving import Serving
from dugnad.peer.starting import accept_manifest
from dugnad.peer.statementkeeper import StatementKeeper
from dugnad.peer.steward import Steward
from dugnad.peer.store import StoreError
from dugnad.peer.storethread import StoreThread
from dugnad.peer.swarm import Swarm, SwarmHooks
from dugnad.peer.training import Training, TrainingHooks
from dugnad.peer.transfer import ContributionServer, PullServer
from dugnad.peer.vitals import Vitals
from dugnad.peer.whereabouts import IN_ADVERT, Whereabouts

if TYPE_CHECKING:  # a daemon without a page does not load it
    from dugnad.peer.publicpage import PublicPage

VERSION: Final = "0.1.0"
WRITE_S: Final = 5.0
"""For what is being written when the daemon ends."""
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Start:
    """What the daemon is started with."""

    home: Home
    settings: Settings
    manifest: Manifest | None
    link: Link | None


class Daemon:
    """One peer. ``run`` is its whole life; everything else answers questions or is called back."""

    def __init__(self, start: Start, identity: Identity) -> None:
        self.home, self.settings = start.home, start.settings
        self.link = start.link
        self.identity = identity
        self.boot = secrets.randbits(62) | 1
        self.started_at = clock.now()
        self.journal = Journal()
        self.store = StoreThread()
        self.state, self.reason = "starting", "connecting"
        self.leaving = asyncio.Event()
        self.drain = False
        self.forced = False
        self.failure: UserError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._main: asyncio.Task[int] | None = None
        self.happenings = Happenings(self)
        self.orders = OrderKeeper(self)
        self.neighbours = Neighbours(self)
        self.whereabouts = Whereabouts(self)
        self.reachability = Reachability(self)
        self.relay = CrowdRelay(self)
        self.steward = Steward(self)
        self.duty = Duty(self)
        self.swarm = Swarm(self._substrate_config(start), identity, self._hooks())
        self.manifest: Manifest
        self.run_id: RunId
        if start.manifest is not None:
            self.manifest = start.manifest
            self.run_id = run_id(start.manifest)
        else:
            assert start.link is not None, "a daemon needs a manifest or a link"
            self.run_id = start.link.run
        self.statements = StatementKeeper(self)
        self.averager: Averager
        self.training: Training
        self.ledger: Ledger
        self.links: Links
        self.vitals: Vitals
        self.evaluator: Evaluator
        self.larder: Larder
        self.preparer: Preparer
        self.report: Report
        self.shards: ShardStore
        self.anchor_files: AnchorFiles
        self.page: PublicPage | None = None
        self.kernels = ""

    def _substrate_config(self, start: Start) -> SubstrateConfig:
        settings, home = start.settings, start.home
        run = run_id(start.manifest) if start.manifest is not None else None
        if run is None and start.link is not None:
            run = start.link.run
        seeds = [*(start.link.peers if start.link is not None else ())]
        if run is not None:
            seeds += [one for one in home.remembered(run) if one not in seeds]
        return SubstrateConfig(
            identity=home.identity_key,
            runtime=home.runtime(),
            hosts=(settings.listen.host,),
            port=settings.listen.port,
            announce=settings.announce,
            seeds=tuple(seeds),
            outbound_only=settings.outbound_only,
            quic=settings.quic,
        )

    def _hooks(self) -> SwarmHooks:
        return SwarmHooks(
            self.happenings.roster_said, self.happenings.message_in, self.happenings.refused
        )

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Take part until somebody says leave; returns the exit status."""
        self._main = asyncio.current_task()
        fault = conformance()
        if fault is not None:
            raise UserError("E005", f"this machine's arithmetic differs: {fault}", "report it")
        try:
            await self._open()
            await self._take_part()
        finally:
            await self._shut_down()
        if self.failure is not None:
            raise self.failure
        return EXIT_INTERRUPTED if self.forced else 0

    async def _open(self) -> None:
        """Network, manifest, store, and the exchange as the disk left it."""
        self.own(bring_kernels(self), "bring the kernels")
        self.steward.limit_rates()
        try:
            reports = await self.swarm.open(self.run_id)
        except SubstrateError as error:
            raise substrate_error(error) from error
        await self.neighbours.open()
        if reports and not self.swarm.seeds():
            await self.neighbours.meet()
        for one in reports:
            if not one.ok:
                print(f"seed {one.address}: {one.reason}", file=sys.stderr)
        if not hasattr(self, "manifest"):
            if not self.swarm.seeds():
                raise no_seed_error([(one.address, one.reason) for one in reports])
            self.manifest = await self._fetch_manifest()
        place = self.home.run(self.run_id)
        place.create()
        try:
            await self.store.open(place.state, self.run_id)
        except StoreError as error:
            raise store_error(error) from error
        self.shards = ShardStore(place.shards, self.manifest.data.index)
        self.anchor_files = AnchorFiles(place.anchors)
        self.duty.decide()
        self.larder = Larder(self)
        self.preparer = Preparer(self)
        await self._assemble()
        self.evaluator = Evaluator(self)

    async def _fetch_manifest(self) -> Manifest:
        assert self.swarm.puller is not None
        try:
            data = await self.swarm.puller.manifest(self.swarm.seeds(), self.run_id)
        except PullError as error:
            raise UserError(
                "E014",
                f"no seed has the run of this link: {error.reason}",
                "ask whoever gave you the link for a new one",
            ) from error
        return accept_manifest(data, self.run_id, self.home, self.identity)

    async def _assemble(self) -> None:
        """Cores, vectors, units and credit."""
        manifest, table = self.manifest, self.manifest.table
        who = Who(self.identity.peer, self.run_id, self.boot, not self.settings.outbound_only)
        cores = await make_fragments(manifest, who, self.store, self.anchor_files, self.note)
        self.units = make_units(manifest, self.run_id, self.identity.peer)
        self.ledger = Ledger(
            credit_rules(manifest, self.run_id),
            self.store,
            self.happenings.coverage_changed,
            self.statements.said,
        )
        log = ProgressLog(len(table.fragments), manifest.data.context)
        hooks = TrainingHooks(
            on_ready=self._learner_ready,
            on_claim=self.happenings.claim,
            on_note=self.note,
            on_failed=lambda why: self.steward.fail(why),
            swarm_tokens=lambda: self.vitals.swarm_tokens,
            still=lambda: self.averager.still(),
            find=lambda: self.keeper.find(),
            has=self.larder.has,
        )
        self.training = Training(
            self.duty.plan(), self.units, log, clock.now, hooks, eligible=who.can_home
        )
        self.links = self.swarm.links = Links(self)
        ports = Ports(
            run=self.run_id,
            signer=self.identity,
            learner=self.training,
            network=self.swarm,
            records=self.store,
            clock=clock.now,
            on_adopt=self.happenings.adopted,
            on_note=self.happenings.core_note,
            on_fault=self._exchange_failed,
            on_made=lambda p: self.keeper.handed_in(p),
            codecs=self.links,
            say=self.relay.say,
        )
        self.averager = Averager(ports, cores)
        self.keeper, self.buddy = ContextKeeper(self), Buddy(self)
        await self.keeper.restore()
        self.orders.load()
        self.vitals = Vitals(self)
        self.report = Report(self)

    async def _take_part(self) -> None:
        """Meet the others, train and merge until told to leave."""
        control = ControlServer(self.report, self.home, self.settings.control_port)
        await control.start()
        try:
            await self._serve_page()
            self.averager.start()
            await self._serve()
            mesh_max = self.settings.mesh_max
            await self.swarm.start(self.run_id, await self._advert(), self._admitted(), mesh_max)
            self.orders.joined()
            await self.ledger.restore()
            await self.statements.load()
            await self._finish_promises()
            for p, shell in enumerate(self.averager.fragments):
                if shell.core.head.version:
                    self.ledger.adopted(p, shell.core.view.lineage, shell.core.head)
            await self.whereabouts.tell()
            self.own(self.neighbours.announce(), "announce on the local network")
            self.own(self.whereabouts.run(), "whereabouts")
            self.own(self.reachability.run(), "reachability")
            self.own(self.steward.run(), "steward")
            self.own(bring_up_learner(self), "bring up the learner")
            self.own(self.vitals.run(), "vitals")
            self.own(self.keeper.run(), "keep the context")
            self.own(self.buddy.run(), "bring drafts to a neighbour")
            self.own(self.evaluator.run(), "evaluate held-out units")
            self.own(self.preparer.run(), "prepare units")
            await self.leaving.wait()
            if not self.forced:
                await leave(self)
        finally:
            await control.close()

    async def _serve(self) -> None:
        bulk, traffic = self.swarm.bulk, self.swarm.traffic
        serving = Serving(self)
        contributions = ContributionServer(
            bulk,
            self.run_id,
            serving.size_of,
            serving.contribution_in,
            verify_ed25519,
            refused=self.happenings.refused,
            traffic=traffic,
            roots=False,  # the worker looks
        )
        await contributions.start()
        await self.buddy.serve()
        await self.reachability.serve(self.swarm.substrate)
        meter = self.links.serving()
        await PullServer(bulk, self.run_id, serving, traffic=traffic, meter=meter).start()

    async def _serve_page(self) -> None:
        """The public page, where the owner asked for one; before anybody is met, so that a port
        that is taken is no loss to others."""
        if self.settings.dashboard is None:
            return
        from dugnad.peer.publicpage import PublicPage  # here: several MB that most never need

        self.page = PublicPage(self, self.settings.dashboard)
        await self.page.start()
        print(f"page: {self.page.address}", flush=True)

    async def _finish_promises(self) -> None:
        """A header that was promised and never announced leaves now (this peer died in between)."""
        for p, shell in enumerate(self.averager.fragments):
            promise = await self.store.call(
                lambda store, core=shell.core: unfinished(core, store)  # type: ignore[misc]
            )
            if promise is None:
                continue
            record = fm.decode_commit(promise.record)
            shell.worker.advance(promise.digest, record.header, promise.payload)
            self.averager.feed(p, ev.Signed(record, promise.digest))

    def _admitted(self) -> frozenset[PeerId] | None:
        manifest = self.manifest
        if not manifest.admission:
            return None
        return frozenset(PeerId(key) for key in (*manifest.admission, manifest.organiser))

    async def _advert(self) -> Advert:
        addresses = tuple(await self.swarm.substrate.addresses())
        return Advert(
            peer=self.identity.peer,
            boot=self.boot,
            at_ms=clock.wall_ms(),
            name=self.settings.name,
            software=VERSION,
            protocol=PROTOCOL,
            devices=(Device("cpu", "", os.cpu_count() or 1),),
            reachable="outbound" if self.settings.outbound_only else "unknown",
            can_home=not self.settings.outbound_only,
            roles=self.duty.advertised(),
            addresses=addresses[:IN_ADVERT],
        )

    def own(self, work: object, name: str) -> None:
        """Run a coroutine as a task of this daemon; its failure ends the daemon with the reason."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # any awaitable
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self.failure = as_user_error(error)
        self.note("fault", f"{task.get_name()}: {error}")
        self.leaving.set()

    def _exchange_failed(self, error: BaseException) -> None:
        self.failure = as_user_error(error)
        self.note("fault", f"the exchange cannot go on: {type(error).__name__}: {error}")
        self.leaving.set()

    # -- the learner ---------------------------------------------------------------------------

    def _learner_ready(self, ready: bool) -> None:
        self.averager.feed_all(ev.LearnerState(ready))

    # -- what happens --------------------------------------------------------------------------

    def note(self, kind: str, text: str, **data: str | int | float) -> None:
        """Something happened: for the person who runs this, and for the page."""
        row = self.journal.add(kind, text, **data)
        print(f"{kind}: {row.text}", file=sys.stderr, flush=True)

    # -- leaving -------------------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether there is something to hand in: before, leaving is stopping."""
        return hasattr(self, "report")

    def cancel(self) -> None:
        """Stop before it takes part."""
        assert self._main is not None, "nobody can ask before the daemon runs"
        self._main.cancel()

    def request_leave(self, drain: bool) -> None:
        """Start to leave; a second request goes at once."""
        request_leave(self, drain)

    async def _shut_down(self) -> None:
        """End every part; nothing is left running."""
        writing = [task for task in self._tasks if task.get_name().startswith(REMEMBER)]
        if writing and not self.forced:  # the last heads and anchors are to be on the disk
            await asyncio.wait(writing, timeout=WRITE_S)
        self.orders.close()
        await self.neighbours.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.page is not None:
            await self.page.close()
        if hasattr(self, "averager"):
            await self.averager.close()
            await self.training.stop()
        await self.swarm.close()
        await self.store.close()
