"""What the daemon shows of itself: the control API's view, answered from memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dugnad.averaging.board import BoardRow, machine_rows
from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId, name_of, peer_text, run_text
from dugnad.dht.roster import State as PeerIs
from dugnad.peer import clock
from dugnad.peer.leaderboard import board_view
from dugnad.peer.lifecycle import Input, State
from dugnad.peer.limits import QUOTA_DAYS
from dugnad.peer.messenger import MessengerCounts
from dugnad.peer.unitsview import unit_counts, units_view
from dugnad.peer.views import EventRow, PeerRow, Status, printable

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

VERSION = "0.1.0"


class Report:
    """Answers :class:`dugnad.peer.views.DaemonView`."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.link = ""
        self.started_ms = clock.wall_ms()

    def status(self) -> Status:
        """How this daemon is."""
        daemon = self.daemon
        training, vitals, averager = daemon.training, daemon.vitals, daemon.averager
        (state, reason), (sent, received) = self.state(), self._moved()
        roster, larder = daemon.swarm.roster, daemon.larder
        links, mine = daemon.links, daemon.links.newest
        return Status(
            run=run_text(daemon.run_id),
            name=daemon.manifest.name,
            peer=peer_text(daemon.identity.peer),
            state=state,
            reason=reason,
            pid=os.getpid(),
            uptime_s=clock.now() - daemon.started_at,
            started_at_ms=self.started_ms,
            version=VERSION,
            step=training.trainer.step,
            tokens=training.tokens,
            tokens_per_s=training.tokens_per_s,
            swarm_tokens=vitals.swarm_tokens,
            swarm_tokens_per_s=vitals.swarm_tokens_per_s(),
            peers_live=len(averager.live()) + 1,
            versions=[shell.core.head.version for shell in averager.fragments],
            heads=[shell.core.head.digest.hex() for shell in averager.fragments],
            anchor_loss=vitals.anchor_loss,
            train_loss=training.loss,
            merges=vitals.merges,
            interval_s=vitals.interval_s,
            longest_gap_s=vitals.longest_gap_s,
            units=unit_counts(daemon.units.status(clock.now()), daemon.ledger.fold),
            addresses=list(self._addresses(daemon.identity.peer)),
            link=self.link,
            residual_norm_share=vitals.residual_share(),
            bytes_sent=sent,
            bytes_received=received,
            codec=mine.codec or daemon.manifest.exchange.hand_in_codec,
            codec_reason=mine.reason,
            bits_per_param=mine.bits,
            bytes_saved=mine.saved_bytes,
            up_bytes_per_s=links.control.uplink,
            down_bytes_per_s=links.control.down.rate,
            control_p99_s=links.control_p99_s(),
            heartbeats_lost=roster.heartbeats_lost() if roster is not None else 0,
            parameters=daemon.manifest.table.total,
            hand_ins=mine.hand_ins,
            kernels=daemon.kernels,
            learner_s=training.times(),
            slow_followers=[peer_text(peer) for peer in links.behind],
            last_takeover_s=vitals.last_takeover_s,
            join_to_listed_s=vitals.join_to_listed_s,
            clock_offset_s=vitals.clock_offset_s,
            reachable=daemon.reachability.found.reachable,
            reach=daemon.reachability.found.text,
            quota_used=daemon.steward.usage.within(QUOTA_DAYS, clock.wall_ms()),
            evaluated_tokens=daemon.evaluator.tokens,
            prepared_tokens=daemon.preparer.tokens,
            units_before_text=None if larder.whole.is_set() else larder.blocks,
            dashboard=daemon.page.address if daemon.page is not None else "",
        )

    def state(self) -> tuple[str, str]:
        """One word, and why it is not training ('' when it is)."""
        daemon = self.daemon
        if daemon.steward.life.stays and (why := daemon.steward.reason()):
            return "paused", why
        if daemon.steward.life.state is State.FINISHING:
            return "finishing", "its owner asked it to; it takes no new work"
        if daemon.state in ("training", "evaluating"):
            if daemon.training.fault:
                return "error", daemon.training.fault
            if daemon.training.ready is None:
                return "measuring", "the learner is starting"
            if daemon.training.idle and not daemon.training.trainer.outstanding:
                waits = bool(daemon.training.waiting)
                why = "the text of its work has not come yet" if waits else "there is no open work"
                return "idle", why
        return daemon.state, daemon.reason

    def _moved(self) -> tuple[int, int]:
        """Bytes up and down, bulk and messages."""
        traffic, messenger = self.daemon.swarm.traffic, self.daemon.swarm.messenger
        counts = messenger.counts if messenger is not None else MessengerCounts()
        return traffic.sent + counts.sent_bytes, traffic.received + counts.received_bytes

    def _advert(self, peer: PeerId) -> Advert | None:
        roster = self.daemon.swarm.roster
        return roster.advert(peer) if roster is not None else None

    def _addresses(self, peer: PeerId) -> tuple[str, ...]:
        advert = self._advert(peer)
        return advert.addresses if advert is not None else ()

    def peers(self) -> list[PeerRow]:
        """The peers of the swarm, this one included."""
        daemon = self.daemon
        roster = daemon.swarm.roster
        known = (daemon.identity.peer, *(roster.known() if roster is not None else ()))
        listed = {row.peer: row.tokens + row.provisional for row in self._machines()}
        return [self._row(peer, listed.get(peer_text(peer), 0)) for peer in known]

    def _machines(self) -> Iterator[BoardRow]:
        return machine_rows(self.daemon.ledger.board())

    def _row(self, peer: PeerId, listed: int) -> PeerRow:
        daemon, now = self.daemon, clock.now()
        advert, roster = self._advert(peer), daemon.swarm.roster
        mine = peer == daemon.identity.peer
        state = roster.state(peer) if roster is not None and not mine else None
        seen = state.last_seen if state is not None else now
        carried = daemon.links.carried_to(peer)
        return PeerRow(
            peer=peer_text(peer),
            name=printable(advert.label if advert is not None else name_of(peer)),
            state="this peer" if mine else (state.state.value if state is not None else "unknown"),
            speed_class=advert.speed_class if advert is not None else 0,
            tokens_per_s=daemon.training.tokens_per_s
            if mine
            else (advert.tokens_per_s if advert is not None else 0.0),
            link="direct" if advert is not None and advert.reachable != "relayed" else "unknown",
            since_s=now - (daemon.started_at if state is None else max(state.since, 0.0)),
            last_seen_s=0.0 if seen is None else max(0.0, now - seen),
            listed_tokens=listed,
            version=advert.software if advert is not None else "",
            addresses=list(self._addresses(peer)),
            reason=""
            if state is None or state.state is PeerIs.LIVE
            else printable(state.reason, 200),
            roles=[printable(one) for one in advert.roles] if advert is not None else [],
            codec=carried.codec,
            bits_per_param=carried.bits,
            bytes_saved=carried.saved_bytes,
            rate_bytes_per_s=daemon.links.rate(peer),
            rtt_s=None if mine else daemon.links.rtt(peer),
        )

    def leaderboard(self) -> Mapping[str, object]:
        """The board as plain values."""
        return board_view(self.daemon.ledger.board())

    def units(self) -> Mapping[str, object]:
        """The work units: counts by state, and the oldest open ones."""
        return units_view(self.daemon)

    def evaluation(self) -> Mapping[str, object]:
        """The validation curve, and what evaluators and preparers earned."""
        return {**self.daemon.evaluator.view(), **self.daemon.preparer.view()}

    def events(self, since: int) -> list[EventRow]:
        """Events after number ``since``."""
        return self.daemon.journal.since(since)

    def request_leave(self, drain: bool) -> None:
        """Start to leave."""
        self.daemon.request_leave(drain)

    def order(self, data: bytes) -> str:
        """Take signed orders of the organiser; why not, or ''."""
        return self.daemon.orders.take(data)

    def owner_changed(self) -> str:
        """Look again at whose machine this is; what is wrong with it, or ''."""
        return self.daemon.statements.look()

    def steer(self, given: Input, until_ms: int = 0) -> str:
        """Do what its owner says; the answer."""
        return self.daemon.steward.say(given, until_ms=until_ms)
