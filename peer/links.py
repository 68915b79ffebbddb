"""The links of one daemon: what they carried, which codecs follow, and what people see of it.

The shell around :mod:`dugnad.averaging.linkcontrol`. It is the meter of all transfers, tells the
others in its advert what its line gives, and answers the averager before each hand-in and merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.linkcontrol import LINKS_MAX, LinkControl
from dugnad.averaging.linkrate import Delivery
from dugnad.dht.ids import PeerId
from dugnad.peer import clock
from dugnad.peer.flow import Flow, Meter
from dugnad.peer.manifest import leanest_commit
from dugnad.peer.pacedstream import stream_time
from dugnad.peer.ratelimit import BYTES_PER_MBIT

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

AUTO: Final = "auto"
"""The setting `codec` that leaves it to the links."""
MOVING_S: Final = 2.0
"""A push that nobody has heard of for so long holds no hand-in back: its home may be gone."""
SERVED_S: Final = 2.0
"""What others draw from us is measured over this long at least ..."""
SERVED_WEIGHT: Final = 0.3
"""... and this is the weight of the newest measurement."""
TOLD_CHANGE: Final = 0.25
"""A line is told anew when it differs by more than a quarter: adverts are flooded."""
FETCH_TELLS_BYTES: Final = 128 << 10
FETCH_TELLS_S: Final = 2.0
"""What came in while a payload was fetched tells what the line gives if it was so much, or took so
long: else its requests and this machine took most of the time."""
P99: Final = 0.99
PUSHES_MAX: Final = 64
"""Contributions under way at once; more fragments than that take turns in any case."""


@dataclass(slots=True)
class Carried:
    """What hand-ins over one link came to."""

    codec: str = ""
    """The newest one's."""
    bits: float = 0.0
    """Its bits a parameter."""
    hand_ins: int = 0
    sent_bytes: int = 0
    saved_bytes: int = 0
    """Against float32, of what was taken."""
    reason: str = ""


@dataclass(slots=True)
class _Under:
    """A push under way."""

    fragment: int
    flow: Flow
    to: PeerId

    def moves(self, now: float) -> bool:
        """Whether something of it has arrived lately."""
        return now - self.flow.moved_at < MOVING_S


@dataclass(slots=True)
class Links:
    """One daemon's links. Belongs to its event loop."""

    daemon: Daemon
    control: LinkControl = field(init=False)
    carried: dict[PeerId, Carried] = field(default_factory=dict)
    newest: Carried = field(default_factory=Carried)
    """The newest hand-in, over whichever link; its sums are those of all."""
    behind: tuple[PeerId, ...] = ()
    """Members that cannot fetch the last commit of ours before the next is due."""
    _under_way: dict[int, _Under] = field(default_factory=dict)
    _served: tuple[float, int] = (0.0, 0)
    _other: float = 0.0
    _told: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        exchange, settings = self.daemon.manifest.exchange, self.daemon.settings
        self.control = LinkControl(
            self.daemon.manifest.table.sizes,
            richest=exchange.hand_in_codec,
            richest_commit=exchange.commit_codec,
            leanest_commit=leanest_commit(self.daemon.manifest),
            fixed="" if settings.codec == AUTO else settings.codec,
        )
        self.control.up_limit = settings.upload_mbit * BYTES_PER_MBIT
        self._served = (clock.now(), self.daemon.swarm.traffic.served)

    # -- the meter of pushes -------------------------------------------------------------------

    def meter(self, fragment: int) -> Meter:
        """What a push of this fragment is measured with."""
        return _Pushes(self, fragment)

    def serving(self) -> Meter:
        """What answers to those who pull are measured with."""
        return _Answers(self)

    def flow(self, peer: PeerId) -> Flow:
        """A transfer to a peer, by what the link to it gave last."""
        return Flow(self.control.link(peer), self.rtt(peer), stream_time())

    def begin(self, peer: PeerId, fragment: int) -> Flow:
        """A contribution sets out for a peer."""
        flow = self.flow(peer)
        if len(self._under_way) < PUSHES_MAX:
            self._under_way[id(flow)] = _Under(fragment, flow, peer)
        return flow

    def end(self, peer: PeerId, flow: Flow) -> None:
        """It has arrived, or failed."""
        self._under_way.pop(id(flow), None)
        self.control.delivered(peer, flow.delivery(stream_time()))

    def taken(self, peer: PeerId, fragment: int, codec: str, size: int) -> None:
        """A peer has taken a contribution of ours."""
        n = self.control.sizes[fragment]
        saved = CODECS["float32"].encoded_size(n) - size
        row = self.carried.setdefault(peer, Carried())
        while len(self.carried) > LINKS_MAX:
            del self.carried[next(iter(self.carried))]
        for one in (row, self.newest):
            one.codec, one.bits = codec, CODECS[codec].bits_per_param(n)
            one.hand_ins += 1
            one.sent_bytes += size
            one.saved_bytes += saved

    def fetched(self, moved: int, seconds: float) -> None:
        """A whole payload of a commit has arrived here in so many seconds, in which so many bytes
        came in of all kinds: the line may have carried the text of a newcomer besides."""
        telling = moved >= FETCH_TELLS_BYTES or seconds >= FETCH_TELLS_S
        self.control.fetched(Delivery(moved, seconds, telling))

    # -- what the averager asks ----------------------------------------------------------------

    def busy(self, fragment: int) -> bool:
        """Whether the last contribution of a fragment is still under way, and moving: another one
        beside it would make both late, and what is learned meanwhile goes with the next."""
        now, under_way = stream_time(), self._under_way.values()
        return any(one.fragment == fragment and one.moves(now) for one in under_way)

    def moving(self, fragment: int, to: PeerId) -> bool:
        """Whether a contribution of a fragment is on its way to this peer, and moving."""
        now, under_way = stream_time(), self._under_way.values()
        return any(
            one.fragment == fragment and one.to == to and one.moves(now) for one in under_way
        )

    def hand_in(self, fragment: int, home: PeerId | None, interval_s: float) -> str:
        """The codec of the next hand-in of a fragment to its home; None: this peer is."""
        downlink = self._downlink(home) if home is not None else 0.0
        self._see_line()
        chosen = self.control.hand_in(
            fragment, home, interval_s, downlink=downlink, other=self._served_rate()
        )
        self.newest.reason = chosen.reason
        if home is not None:
            self.carried.setdefault(home, Carried()).reason = chosen.reason
        return chosen.codec

    def commit(self, fragment: int, members: Iterable[PeerId], interval_s: float) -> str:
        """The codec of a commit that these members are to fetch."""
        downlinks = {peer: self._downlink(peer) for peer in members}
        chosen = self.control.commit(fragment, downlinks, interval_s)
        if new := set(chosen.behind) - set(self.behind):
            names = ", ".join(sorted(self.daemon.happenings.label(peer) for peer in new)[:3])
            self.daemon.note("link", f"too slow to follow every commit: {names} ({chosen.reason})")
        self.behind = chosen.behind
        return chosen.codec

    def fit_for_home(self, fragment: int, interval_s: float) -> bool:
        """Whether this peer should offer to be home, by its own uplink and what the others say of
        theirs."""
        roster, view = self.daemon.swarm.roster, self.daemon.averager.fragments[fragment].core.view
        able = [peer for peer, can in view.live.items() if can]
        adverts = [roster.advert(peer) if roster is not None else None for peer in able]
        others = [float(one.up_bytes_per_s) if one is not None else 0.0 for one in adverts]
        self._see_line()
        return self.control.fit_for_home(fragment, interval_s, others)

    def listed(self, fragment: int, behind: int) -> None:
        """A contribution was listed so many versions late."""
        self.control.listed(fragment, behind)

    # -- what others hear and people see -------------------------------------------------------

    def tell(self) -> None:
        """Say in the advert what our line gives, when that has changed."""
        found = self.control.uplink, self.control.down.rate
        pairs = zip(found, self._told, strict=True)
        if any(abs(new - old) > TOLD_CHANGE * old for new, old in pairs):
            self._told = found
            up, down = (int(float(f"{rate:.2g}")) for rate in found)
            self.daemon.swarm.advertise(up_bytes_per_s=up, down_bytes_per_s=down)

    def carried_to(self, peer: PeerId) -> Carried:
        """What hand-ins to a peer came to; of this peer itself, all hand-ins."""
        if peer == self.daemon.identity.peer:
            return self.newest
        return self.carried.get(peer, Carried())

    def rate(self, peer: PeerId) -> float:
        """Bytes a second towards a peer, as measured, or of our own uplink; 0 while unknown."""
        if peer == self.daemon.identity.peer:
            return self.control.uplink
        return self.control.up[peer].rate if peer in self.control.up else 0.0

    def rtt(self, peer: PeerId) -> float | None:
        """The usual round trip of heartbeats, seconds."""
        roster = self.daemon.swarm.roster
        return roster.rtt(peer) if roster is not None else None

    def control_p99_s(self) -> float | None:
        """Of the newest round trips of control messages the 99th percentile, in seconds."""
        roster = self.daemon.swarm.roster
        trips = sorted(roster.trips) if roster is not None else []
        return trips[min(len(trips) - 1, int(P99 * len(trips)))] if trips else None

    def _see_line(self) -> None:
        """What the uplink gives, once it has shown its limit."""
        uplink = self.daemon.swarm.traffic.uplink
        self.control.line = uplink.rate if uplink is not None and uplink.full else 0.0

    def _downlink(self, peer: PeerId) -> float:
        """What a peer says of its own line; 0 while it says nothing."""
        roster = self.daemon.swarm.roster
        advert = roster.advert(peer) if roster is not None else None
        return float(advert.down_bytes_per_s) if advert is not None else 0.0

    def _served_rate(self) -> float:
        """Bytes a second that others draw from us, lately."""
        now, total = clock.now(), self.daemon.swarm.traffic.served
        since, before = self._served
        if now - since >= SERVED_S:
            newest = (total - before) / (now - since)
            self._other += SERVED_WEIGHT * (newest - self._other)
            self._served = (now, total)
        return self._other


@dataclass(frozen=True, slots=True)
class _Pushes:
    """The meter of pushes of one fragment."""

    links: Links
    fragment: int

    def begin(self, peer: PeerId) -> Flow:
        return self.links.begin(peer, self.fragment)

    def end(self, peer: PeerId, flow: Flow) -> None:
        self.links.end(peer, flow)


@dataclass(frozen=True, slots=True)
class _Answers:
    """The meter of what others pull."""

    links: Links

    def begin(self, peer: PeerId) -> Flow:
        return self.links.flow(peer)

    def end(self, peer: PeerId, flow: Flow) -> None:
        self.links.control.delivered(peer, flow.delivery(stream_time()))
