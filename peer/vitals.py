"""The daemon's slow heartbeat: pace, adverts, participants, anti-entropy, evaluation, statistics.

Everything here happens about once a second and may be late without harm.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.leaf import squared
from dugnad.averaging.speed import class_speed
from dugnad.dht.advert import ROWS_MAX, Device, Speed
from dugnad.dht.ids import PeerId
from dugnad.peer import clock
from dugnad.peer.addressbook import SHARDS, look_up, publish
from dugnad.peer.config import usable_cores
from dugnad.peer.examination import LOOK_S, Examination
from dugnad.peer.exchangeports import LearnerAway
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.probe import Probe, ProbeError, cached, measure
from dugnad.peer.receiptsync import ReceiptSync
from dugnad.peer.roles import sharing
from dugnad.peer.runend import RunEnd
from dugnad.peer.store import StoreError
from dugnad.peer.training import flat
from dugnad.peer.units import Interval, SwarmSpeed, WasAway

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

TICK_S: Final = 0.5
HEADS_S: Final = 3.0
"""Between two comparisons of heads with a peer drawn by lot: repairs whatever was missed."""
ADVERT_S: Final = 5.0
"""Adverts follow the measured speed no faster."""
ADVERT_CHANGE: Final = 0.1
PACE_CHANGE: Final = 0.1
"""A new merge interval is told when it differs by more than a tenth."""
EVALUATE_S: Final = 15.0
EVALUATE_SEQUENCES: Final = 16
"""Held-out sequences scored: a few percent of what is trained in the same time."""
ALONE_S: Final = 4.0
"""A peer that hears nobody begins alone after this long; whoever joins by a link waits longer."""
JOIN_ALONE_S: Final = 20.0
ASK_HEADS_S: Final = 1.0
"""A newcomer asks those it has not heard this often where they stand."""
SILENT_S: Final = 5.0
"""A newcomer waits this long for all answers; then for most: one frozen peer, or one that is just
starting itself, held a restarted peer back for 20 s (benchmarks/churn.py)."""
REMEMBER_S: Final = 30.0
"""Peers met are written down this often."""
BOOK_S: Final = 120.0
"""Between two looks into the address book, and two renewals of our own entry."""
SHARDS_A_LOOK: Final = 4
"""Shards read in one look; all 16 in eight minutes."""
PROBE_AFTER_S: Final = 120.0
"""A machine that was never measured is measured once training has run this long."""
STATEMENTS_S: Final = 20.0
"""Between two looks at what somebody else holds: sixty-four peers have heard in two minutes."""
CREDITS_S: Final = 60.0
"""Between two writings of what receipts were credited, and of statements that changed."""
RECEIPTS_S: Final = 15.0
"""Between two looks for receipts that another peer has and this one lacks; one fragment each."""
KEEP_FOLD_S: Final = 3600.0
"""Between two looks for receipts that are old enough to be forgotten."""
GAPS_KEPT: Final = 64


def enough_heard(live: int, silent: int, waited_s: float) -> bool:
    """Whether a newcomer knows where the swarm stands, though some have not said it."""
    return not silent or (waited_s >= SILENT_S and 2 * silent < live)


class Vitals:
    """Periodic duties of one daemon, and the numbers that come of them."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.rng = random.Random(daemon.boot)
        self.clock_offset_s = 0.0
        self.swarm_tokens = max(shell.core.head.tokens_total for shell in daemon.averager.fragments)
        self.merges = 0
        self.last_takeover_s: float | None = None
        self.join_to_listed_s: float | None = None
        self.anchor_loss: float | None = None
        self.anchor_losses: deque[tuple[int, float]] = deque(maxlen=1024)
        self.synced = False
        self.met_at = clock.now()
        """When the first of the others was met: since then they leave us our share."""
        self.end = RunEnd(daemon)
        self.interval_s = 0.0
        self.longest_gap_s = 0.0
        self.heard: dict[PeerId, dict[int, int]] = {}
        fragments = len(daemon.manifest.table.fragments)
        self._merged_at: list[float | None] = [None] * fragments
        self._gaps: list[deque[float]] = [deque(maxlen=GAPS_KEPT) for _ in range(fragments)]
        self._next: dict[str, float] = {}
        self._advertised = 0.0
        self._roles = daemon.duty.advertised()
        self._roster_changed = True
        self._members: bytes = b""
        self._evaluating = False
        self._evaluated: tuple[bytes, ...] = ()
        self._probed = False
        self._shard = daemon.identity.peer[0] % SHARDS
        self._next["book"] = clock.now() + 5.0
        self._next["receipts"] = clock.now() + RECEIPTS_S
        self.receipts = ReceiptSync(daemon, random.Random(daemon.boot))
        self.examination = Examination(daemon)

    async def run(self) -> None:
        """Do what is due, until cancelled."""
        self._probed = self._advertise_probe(cached(self.daemon.home.root, usable_cores()))
        while True:
            self._tick(clock.now())
            await asyncio.sleep(TICK_S)

    def _due(self, name: str, every: float, now: float) -> bool:
        if now < self._next.get(name, 0.0):
            return False
        self._next[name] = now + every
        return True

    def _tick(self, now: float) -> None:
        daemon = self.daemon
        self._pace()
        self._participants(now)
        if not self.synced:
            self._check_synced(now)
        if self.synced:
            self.end.look()
        if self._due("heads", HEADS_S, now):
            self._compare_heads()
        first = not self._advertised and daemon.training.tokens_per_s > 0.0
        if self._due("advert", ADVERT_S, now) or first:
            self._advertise()
            daemon.links.tell()
        fresh = self._evaluated != self._standing()
        if (
            self.synced
            and fresh
            and daemon.larder.whole.is_set()
            and self._due("evaluate", EVALUATE_S, now)
            and not self._evaluating
        ):
            daemon.own(self._evaluate(), "evaluate")
        if self._due("remember", REMEMBER_S, now):
            self.remember_peers()
        if not self._probed and now - daemon.started_at > PROBE_AFTER_S:
            self._probed = True
            daemon.own(self._probe(), "probe")
        if self._due("book", BOOK_S, now):
            daemon.own(self._use_address_book(), "address book")
        if daemon.ledger.lacking and self._due("history", 2.0, now):
            daemon.own(self._complete_history(), "history")
        substrate = daemon.swarm.substrate
        if substrate.died.done() and self._due("p2pd", 2.0, now):
            daemon.note("network", f"p2pd ended: {substrate.died.result()[-200:]}; it is restarted")
            daemon.own(daemon.swarm.restart(daemon.note), "restart p2pd")
        if self._due("receipts", RECEIPTS_S, now):
            daemon.own(self.receipts.once(), "exchange of receipts")
        if self.synced and self._due("challenge", LOOK_S, now):
            self.examination.look()
        if self._due("statements", STATEMENTS_S, now):
            daemon.own(daemon.statements.once(), "exchange of statements")
        if self._due("credits", CREDITS_S, now):
            daemon.own(self._write_credits(), "write credits")
        if self._due("history kept", KEEP_FOLD_S, now):
            daemon.own(self._keep_fold(), "keep the fold")

    async def _use_address_book(self) -> None:
        """Renew our entry, and learn of peers that nobody named yet."""
        daemon = self.daemon
        roster, substrate = daemon.swarm.roster, daemon.swarm.substrate
        if roster is None or not daemon.averager.live():
            return
        await substrate.meet(daemon.relay.near(daemon.averager.live()))
        await publish(substrate, daemon.run_id, roster.my_advert)
        await daemon.orders.use_book(substrate)
        for _ in range(SHARDS_A_LOOK):
            self._shard = (self._shard + 1) % SHARDS
            for advert in await look_up(substrate, daemon.run_id, self._shard):
                if advert.peer != daemon.identity.peer and advert.peer not in roster.known():
                    for address in advert.addresses:
                        daemon.swarm.know(address, "address book")

    async def _probe(self) -> None:
        """Measure a machine that was never measured, and say so in the advert."""
        try:
            found = await measure(self.daemon.home.root, usable_cores())
        except ProbeError as error:
            self.daemon.note("probe", f"this machine could not be measured: {error}")
            return
        self._advertise_probe(found)

    def _advertise_probe(self, found: Probe | None) -> bool:
        """Put measured devices and speeds into the advert; whether there were any."""
        if found is None:
            return False
        devices = tuple(
            Device(one.kind, one.name[:48], one.count, one.memory_bytes) for one in found.devices
        )
        speeds = tuple(Speed(name, value) for name, value in sorted(found.flops.items()))
        self.daemon.swarm.advertise(
            devices=devices[:ROWS_MAX],
            speeds=speeds[:ROWS_MAX],
            memory_bytes=found.memory_total,
        )
        return True

    async def _write_credits(self) -> None:
        """Write what receipts were credited, and the statements that are held."""
        try:
            await self.daemon.ledger.flush()
            await self.daemon.statements.keep()
        except StoreError as error:
            self.daemon.note("disk", f"{error.reason}; {error.fix}")

    async def _keep_fold(self) -> None:
        """Keep the base of the credit fold, and forget receipts older than a week."""
        try:
            await self.daemon.ledger.keep(clock.wall_ms())
        except StoreError as error:
            self.daemon.note("disk", f"{error.reason}; {error.fix}")

    # -- pace ----------------------------------------------------------------------------------

    def merge_interval(self) -> float:
        """Seconds between merges of a fragment, from tokens a merge and the swarm's speed."""
        manifest, daemon = self.daemon.manifest, self.daemon
        speeds = self.speeds()
        total = sum(speeds)
        exchange = manifest.exchange
        tokens = exchange.tokens_per_merge
        if not tokens:
            batch = manifest.batch_sequences * manifest.data.context
            tokens = exchange.steps_per_merge * batch * max(1, len(speeds))
        floor = exchange.merge_floor_ms / 1000.0
        if total <= 0.0:
            return max(floor, daemon.averager.fragments[0].core.view.interval_s)
        return max(floor, tokens / total)

    def speeds(self) -> list[float]:
        """Tokens a second of me and of every live peer that says it trains."""
        daemon = self.daemon
        found = [daemon.training.tokens_per_s]
        roster = daemon.swarm.roster
        if roster is not None:
            adverts = [roster.advert(peer) for peer in daemon.averager.live()]
            found += [one.tokens_per_s for one in adverts if one is not None]
        return [one for one in found if one > 0.0]

    def _pace(self) -> None:
        daemon = self.daemon
        wanted = self.merge_interval()
        offset = clock.wall_ms() / 1000.0 - clock.now() + self.clock_offset_s
        for p, shell in enumerate(daemon.averager.fragments):
            view = shell.core.view
            pace = abs(wanted - view.interval_s) > PACE_CHANGE * view.interval_s
            if pace or abs(offset - view.wall_offset_s) > 0.05:
                interval = wanted if pace else view.interval_s
                daemon.averager.feed(p, ev.Pace(interval, offset))
        now = clock.now()
        if self._due("unit pace", 5.0, now):
            daemon.units.handle(Interval(self.interval_s or wanted), now)
            daemon.units.handle(SwarmSpeed(sum(self.speeds())), now)

    # -- who shares the work -------------------------------------------------------------------

    def roster_changed(self) -> None:
        """Somebody came, went, or changed speed."""
        self._roster_changed = True
        self._participants(clock.now())
        self.daemon.evaluator.peers_changed()
        self.daemon.preparer.peers_changed()

    def _participants(self, now: float) -> None:
        daemon = self.daemon
        head = daemon.averager.fragments[0].core.head
        if head.digest == self._members and not self._roster_changed:
            return
        self._members, self._roster_changed = head.digest, False
        members = tuple((PeerId(row.peer), row.speed_class) for row in head.members)
        # A learner that is just starting counts as fast as the fastest member, me included:
        # its share is left for it, and who has the same adverts shares in the same way.
        fastest = max((speed for _, speed in members), default=daemon.training.own_class or 0)
        live: list[tuple[PeerId, int]] = []
        if (roster := daemon.swarm.roster) is not None:
            adverts = [roster.my_advert, *map(roster.advert, daemon.averager.live())]
            for one in adverts:
                if one is not None:
                    known = one.tokens_per_s > 0.0
                    live.append((one.peer, one.speed_class if known else fastest))
        event = sharing(head.digest, members, live, daemon.duty.takes_units)
        daemon.units.handle(event, now)

    def _advertise(self) -> None:
        daemon = self.daemon
        speed = daemon.training.tokens_per_s
        roles = daemon.duty.advertised()
        same = abs(speed - self._advertised) <= ADVERT_CHANGE * self._advertised
        if (speed <= 0.0 or same) and roles == self._roles:
            return
        self._advertised, self._roles = speed, roles
        daemon.swarm.advertise(
            tokens_per_s=float(f"{speed:.3g}"),
            speed_class=daemon.training.own_class or 0,
            roles=roles,
        )
        daemon.evaluator.peers_changed()
        daemon.preparer.peers_changed()
        self._roster_changed = True

    # -- getting level with the swarm ----------------------------------------------------------

    def heard_heads(self, sender: PeerId, heads: fm.Heads) -> None:
        """A peer said where it stands."""
        mine = self.heard.setdefault(sender, {})
        for row in heads.rows:
            if row.fragment < len(self._merged_at):
                mine[row.fragment] = row.version

    def _check_synced(self, now: float) -> None:
        """Train once the anchors are the swarm's (or there is nobody to take them from)."""
        daemon = self.daemon
        waits = daemon.duty.learns or not daemon.larder.whole.is_set()
        if daemon.training.ready is None and waits:
            return
        live = daemon.averager.live()
        waited = now - daemon.started_at
        near = daemon.relay.near(live)
        if not live:
            alone = JOIN_ALONE_S if daemon.link is not None else ALONE_S
            if waited < alone:
                return
        elif waited < JOIN_ALONE_S and (silent := [one for one in near if one not in self.heard]):
            if self._due("ask heads", ASK_HEADS_S, now):
                for peer in silent:
                    daemon.swarm.send(peer, fm.Heads(daemon.averager.heads().rows, reply=True))
            if not enough_heard(len(near), len(silent), waited):
                return
        for p, shell in enumerate(daemon.averager.fragments):
            ahead = max((self.heard.get(peer, {}).get(p, 0) for peer in live), default=0)
            if shell.core.head.version + 1 < ahead or (ahead and not shell.core.head.version):
                return
        if daemon.ledger.lacking and live and waited < 2 * JOIN_ALONE_S:
            return
        self.synced = True
        if self.end.over():
            return  # a newcomer to a run that is over trains nothing
        daemon.state, daemon.reason = daemon.duty.state()
        if any(map(daemon.duty.takes_units, live)):  # who only prepares has begun no unit
            daemon.units.handle(WasAway(now - self.met_at), now)
        daemon.training.enable()
        daemon.note("sync", f"level with the swarm after {waited:.1f} s; {daemon.state}")

    def _compare_heads(self) -> None:
        near = self.daemon.relay.near(self.daemon.averager.live())
        if near:
            peer = near[self.rng.randrange(len(near))]
            heads = self.daemon.averager.heads()
            self.daemon.swarm.send(peer, fm.Heads(heads.rows, reply=True))

    async def _complete_history(self) -> None:
        daemon = self.daemon
        puller = daemon.swarm.puller
        if puller is None:
            return
        for p in sorted(daemon.ledger.lacking):
            head = daemon.averager.fragments[p].core.head
            if head.record is None:
                continue
            peers = list(daemon.averager.live())
            await daemon.ledger.catch_up(p, (head.digest, head.parent), peers, puller.commits)
            newest = daemon.averager.fragments[p].core.head
            daemon.ledger.adopted(p, daemon.averager.fragments[p].core.view.lineage, newest)

    def remember_peers(self) -> None:
        """Write down where the live peers were reached, for the next start."""
        daemon = self.daemon
        roster = daemon.swarm.roster
        if roster is None:
            return
        found: list[str] = []
        for peer in daemon.averager.live():
            found.extend(roster.addresses(peer)[:2])
        if found:
            daemon.home.remember(daemon.run_id, found)

    # -- what came of it -----------------------------------------------------------------------

    def merged(self, p: int, action: ev.Adopt, header: fm.Header) -> None:
        """A fragment has a new head."""
        daemon, now = self.daemon, clock.now()
        node = daemon.averager.fragments[p].core.view.lineage.get(action.digest)
        if node is not None:
            self.swarm_tokens = max(self.swarm_tokens, node.tokens_total)
            listed = any(key[0] == daemon.identity.peer for key in node.listed)
            if listed and self.join_to_listed_s is None:
                self.join_to_listed_s = now - daemon.started_at
                daemon.note(
                    "listed", f"first contribution listed after {self.join_to_listed_s:.1f} s"
                )
        self.merges += len(action.applied)
        last = self._merged_at[p]
        self._merged_at[p] = now
        if last is None or action.gap or len(action.applied) != 1 or not self.synced:
            return
        self._gaps[p].append(now - last)
        self.longest_gap_s = max(self.longest_gap_s, now - last)
        everything = [gap for gaps in self._gaps for gap in gaps]
        self.interval_s = median(everything)

    def _standing(self) -> tuple[bytes, ...]:
        """The roots of the anchors: equal ones need not be scored again."""
        return tuple(state.theta_root for state in self.daemon.averager.anchors())

    async def _evaluate(self) -> None:
        """Score the anchors on held-out text."""
        daemon = self.daemon
        data = daemon.manifest.data
        held_out = range(data.held_out_start, data.sequences)
        count = min(EVALUATE_SEQUENCES, len(held_out))
        numbers = [held_out[i * len(held_out) // count] for i in range(count)]
        self._evaluating, standing = True, self._standing()
        try:
            anchors = flat([state.theta for state in daemon.averager.anchors()])
            loss = await daemon.training.trainer.evaluate(anchors, numbers)
        except (LearnerGone, LearnerAway):
            return
        finally:
            self._evaluating = False
        self.anchor_loss, self._evaluated = loss, standing
        self.anchor_losses.append((self.swarm_tokens, loss))

    def residual_share(self) -> float:
        """Norm of what is not handed in yet, as a share of the typical hand-in's."""
        left = norm = 0.0
        for shell in self.daemon.averager.fragments:
            buffers = shell.worker.buffers
            left += squared(buffers.residual)
            norm += buffers.typical_progress() ** 2
        return float(np.sqrt(left / norm)) if norm > 0.0 else 0.0

    def swarm_tokens_per_s(self) -> float:
        """Tokens a second of the whole swarm, as its peers say."""
        return sum(self.speeds())

    def class_of(self, peer: PeerId) -> float:
        """A peer's speed by its class."""
        roster = self.daemon.swarm.roster
        advert = roster.advert(peer) if roster is not None else None
        return class_speed(advert.speed_class) if advert is not None else 0.0
