"""What an observer shows of itself and of others: rows of the page, and the control API's view."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dugnad.averaging.board import Board
from dugnad.dashboard import events as ev
from dugnad.dht.ids import PeerId, name_of, peer_text, run_text
from dugnad.peer import clock
from dugnad.peer.leaderboard import board_view
from dugnad.peer.lifecycle import Input
from dugnad.peer.pageviews import Moment, devices_text, without_addresses
from dugnad.peer.sightings import Sighting
from dugnad.peer.views import EventRow, PeerRow, Status

if TYPE_CHECKING:
    from dugnad.peer.observer import Observer

VERSION: Final = "0.1.0"
NOTHING_TO_STEER: Final = "an observer trains nothing; `dugnad leave` ends it"


def standing_of(sighting: Sighting) -> tuple[str, str]:
    """State and reason of a peer, in the words of the pages."""
    if not sighting.here:
        return "lost" if sighting.seen > 0.0 else "unreachable", sighting.reason
    advert = sighting.advert
    if not sighting.answers and sighting.reason:
        return "here", f"others see it; from here: {sighting.reason}"
    if advert is None or advert.tokens_per_s <= 0.0:
        return "here", "it has told no speed yet"
    return "training", ""


def peer_row(peer: PeerId, seen: Sighting, listed: int, codec: str, at: Moment) -> ev.PeerRow:
    """One peer, as an observer sees it now."""
    advert = seen.advert
    state, reason = standing_of(seen)
    link: ev.Link = advert.reachable if advert is not None else "unknown"
    if link == "unknown" and seen.answers:
        link = "direct"
    return ev.PeerRow(
        peer=peer_text(peer),
        name=advert.label if advert is not None else name_of(peer),
        roles=advert.roles if advert is not None else (),
        device=devices_text(advert),
        tokens_per_s=advert.tokens_per_s if advert is not None and seen.here else 0.0,
        link=link,
        codec=codec,
        state=state,
        reason=without_addresses(reason),
        since_ms=at.wall_of(seen.since),
        last_seen_ms=at.wall_of(seen.seen) if seen.seen > 0.0 else 0,
        listed_tokens=listed,
        version=advert.software if advert is not None else "",
        region=advert.region if advert is not None else "",
        gone_ms=0 if seen.here else at.wall_of(seen.since),
    )


class ObserverView:
    """Answers :class:`dugnad.peer.views.DaemonView` for an observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._started_ms = clock.wall_ms()

    def status(self) -> Status:
        """How it is. What only a peer has is zero or unknown."""
        one = self._observer
        page, scout = one.page, one.scout
        state = page.feed.state()
        held, train = state.history.held_out.last, state.history.train.last
        run = state.run
        standing = page.standing
        here = len(scout.sightings.here())
        fragments = len(one.manifest.table.fragments)
        return Status(
            run=run_text(one.run_id),
            name=one.manifest.name,
            peer="",
            state="observing",
            reason="it trains nothing" if here else "no peer of the run can be reached",
            pid=os.getpid(),
            uptime_s=clock.now() - one.started_at,
            started_at_ms=self._started_ms,
            version=VERSION,
            step=0,
            tokens=0,
            tokens_per_s=0.0,
            swarm_tokens=state.tokens,
            swarm_tokens_per_s=one.speed(),
            peers_live=here,
            versions=standing.versions if standing is not None else [0] * fragments,
            heads=[n.digest.hex() if n else "" for n in (standing.heads if standing else ())],
            anchor_loss=held.value if held is not None else None,
            train_loss=train.value if train is not None else None,
            merges=state.merges,
            interval_s=0.0,
            longest_gap_s=0.0,
            units={},
            addresses=[],
            link=run.link if run is not None else "",
            residual_norm_share=0.0,
            bytes_sent=scout.traffic.sent,
            bytes_received=scout.traffic.received,
            codec=one.manifest.exchange.hand_in_codec,
            last_takeover_s=None,
            join_to_listed_s=None,
            reachable="outbound",
            dashboard=one.address,
        )

    def peers(self) -> list[PeerRow]:
        """The peers that it has heard of."""
        one, now = self._observer, clock.now()
        return [self._row(p, seen, now) for p, seen in one.scout.sightings.peers.items()]

    def _row(self, peer: PeerId, seen: Sighting, now: float) -> PeerRow:
        advert = seen.advert
        state, reason = standing_of(seen)
        return PeerRow(
            peer=peer_text(peer),
            name=advert.label if advert is not None else name_of(peer),
            state=state,
            speed_class=advert.speed_class if advert is not None else 0,
            tokens_per_s=advert.tokens_per_s if advert is not None else 0.0,
            link=advert.reachable if advert is not None else "unknown",
            since_s=max(now - seen.since, 0.0),
            last_seen_s=max(now - seen.seen, 0.0) if seen.seen > 0.0 else 0.0,
            listed_tokens=self._observer.page.listed.get(peer_text(peer), 0),
            version=advert.software if advert is not None else "",
            addresses=list(advert.addresses) if advert is not None else [],
            reason=reason,
        )

    def leaderboard(self) -> Mapping[str, object]:
        """The board of the receipts that it holds."""
        standing = self._observer.page.standing
        return board_view(standing.board if standing is not None else EMPTY)

    def evaluation(self) -> Mapping[str, object]:
        """Nothing: scores are told among peers."""
        why = "an observer is told no scores; ask a peer"
        return {"curve": [], "earned": [], "prepared": [], "why": why}

    def units(self) -> Mapping[str, object]:
        """It has no units."""
        return {"rows": []}

    def events(self, since: int) -> list[EventRow]:
        """Events after number `since`."""
        return self._observer.journal.since(since)

    def request_leave(self, drain: bool) -> None:
        """Stop."""
        self._observer.stopping.set()

    def order(self, data: bytes) -> str:
        """Orders are for peers."""
        return "an observer takes no orders; give them to a peer of the run"

    def owner_changed(self) -> str:
        """It is nobody's machine."""
        return "an observer earns nothing for an owner"

    def steer(self, given: Input, until_ms: int = 0) -> str:
        """There is nothing to steer."""
        return NOTHING_TO_STEER


EMPTY: Final = Board(
    formula="credit/1",
    as_of_ms=0,
    receipts=0,
    refused=0,
    versions=(),
    settled=(),
    tokens=0,
    provisional=0,
    twice=0,
    units_covered=0,
    rows=(),
)
"""The board before any receipt was read."""
