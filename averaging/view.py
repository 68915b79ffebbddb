"""What the parts of the exchange core share: who I am, what is known, what is to be done.

One fragment of one peer. The contributor, the home and the follower (their own modules) read this
and append to ``out``; :class:`dugnad.averaging.exchange.Exchange` owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dugnad.averaging.events import Action, Note
from dugnad.averaging.lineage import Lineage, LineageRules
from dugnad.averaging.node import Node
from dugnad.averaging.succession import LearnedDelay, home_order, ranked
from dugnad.dht.ids import PeerId

HOLDERS_MAX: Final = 64
"""Peers remembered per commit as having its payload: a full mesh."""
HOLDERS_DIGESTS_MAX: Final = 512
"""Commits whose holders are remembered: a full lineage twice over. Peers may name any digest."""
COMMIT_DELAY_MIN_S: Final = 1.0
"""A home is never passed over sooner: peers on busy cores differ by hundreds of milliseconds."""
COMMIT_DELAY_MAX_S: Final = 30.0
"""Nor later: a fragment stands still meanwhile."""
COMMIT_DELAY_FIRST_S: Final = 2.0
"""What a home takes while nothing is learned yet, where intervals are short."""
GRACE_SHARE: Final = 0.25
"""A home waits for contributions this share of an interval at most: learners lose nothing, they
train on."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """The run's rules for one fragment as this peer follows them."""

    me: PeerId
    lineage: LineageRules
    eta_bits: int
    mu_bits: int
    can_home: bool
    boot: int
    first_seq: int = 1
    """One above the newest seq that this peer ever promised for this fragment."""
    phase: float = 0.0
    """Share of an interval by which this fragment is due later at the start, so that fragments
    take turns."""


@dataclass(slots=True)
class View:
    """Shared state of one fragment's exchange. ``now`` is set before anything is asked."""

    settings: ExchangeSettings
    lineage: Lineage
    head: Node
    now: float = 0.0
    interval_s: float = 10.0
    wall_offset_s: float = 0.0
    live: dict[PeerId, bool] = field(default_factory=dict)
    """Live peers (not me) and whether they can be home."""
    held: set[bytes] = field(default_factory=set)
    """Commits whose anchors the shell holds."""
    getting: bytes | None = None
    """The commit whose payload is being fetched ..."""
    getting_whole: bytes | None = None
    """... the one whose anchors are ..."""
    first_try: bool = True
    """... and whether nobody has failed to serve the newer of the two yet."""
    joining: bytes | None = None
    """The other side's head that a join may need the anchors of."""
    holders: dict[bytes, dict[PeerId, None]] = field(default_factory=dict)
    """Who is known to hold a commit's payload, oldest word first."""
    promised: dict[bytes, bytes] = field(default_factory=dict)
    """Parent -> digest of the one header that I signed on top of it."""
    passed: set[PeerId] = field(default_factory=set)
    """Homes passed over for the version after the head."""
    seen_at: float = 0.0
    """When the head's header was first seen."""
    due_at: float = 0.0
    leaving: bool = False
    stopped: bool = False
    """The organiser stopped the run: nothing is merged here any more; what was merged is
    followed."""
    banned: frozenset[PeerId] = frozenset()
    """Peers whose contributions are not taken and whose duty is skipped. Their commits stand."""
    quiet_until: float = 0.0
    """After a jump of the clock: no duties before the others' heads are known."""
    commit_delay: LearnedDelay = field(
        default_factory=lambda: LearnedDelay(
            low=COMMIT_DELAY_MIN_S, high=COMMIT_DELAY_MAX_S, first=COMMIT_DELAY_FIRST_S
        )
    )
    out: list[Action] = field(default_factory=list)
    _order: tuple[object, list[PeerId]] | None = None
    """The last order of succession and what it was computed from."""

    @property
    def me(self) -> PeerId:
        """My own id."""
        return self.settings.me

    @property
    def wall_ms(self) -> int:
        """Wall clock in milliseconds, corrected by what peers say."""
        return int((self.now + self.wall_offset_s) * 1000.0)

    def note(self, kind: str, text: str) -> None:
        """Tell a person."""
        self.out.append(Note(kind, text))

    def ended(self) -> bool:
        """Whether nothing is to be merged any more: the head is the last version, or the organiser
        stopped the run.
        """
        return self.stopped or self.lineage.final(self.head)

    def may_home(self) -> bool:
        """Whether I can take the duty for the version after the head."""
        if self.stopped or self.me in self.banned:
            return False
        if self.leaving and any(self.live.values()):
            return False  # somebody else can; the last one merges its own last work
        return self.settings.can_home and self.head.digest not in self.promised

    def current_home(self) -> PeerId | None:
        """Who is to merge the version after the head, as far as I can see; None: nobody can."""
        order = self.succession()
        return next((peer for peer in order if peer not in self.passed), None)

    def succession(self) -> list[PeerId]:
        """The order of homes without the lost; where all of it is lost, any live full peer."""
        state = (
            self.head.digest,
            self.may_home(),
            tuple(self.live.items()),
            frozenset(self.passed),
            self.banned,
        )
        if self._order is None or self._order[0] != state:  # asked for several times an event
            self._order = (state, self._succession())
        return self._order[1]

    def _succession(self) -> list[PeerId]:
        run, fragment = self.settings.lineage.run, self.settings.lineage.fragment
        able = [peer for peer, can in self.live.items() if can and peer not in self.banned]
        if self.may_home():
            able.append(self.me)
        order, ruled = home_order(run, fragment, self.head, able)
        order = [peer for peer in order if peer in able]
        if ruled and not [peer for peer in order if peer not in self.passed]:
            order += [
                p for p in ranked(run, fragment, self.head.version + 1, able) if p not in order
            ]
        return order

    def first_choice(self) -> PeerId | None:
        """Who would merge the version after the head if nobody were lost or passed over."""
        order, _ = home_order(
            self.settings.lineage.run,
            self.settings.lineage.fragment,
            self.head,
            [*self.live, self.me],
        )
        return order[0] if order else None

    def holds(self, peer: PeerId, digest: bytes) -> None:
        """Remember that ``peer`` has the payload of a commit."""
        if peer == self.me:
            return
        known = self.holders.setdefault(digest, {})
        while len(self.holders) > HOLDERS_DIGESTS_MAX:
            self.holders.pop(next(iter(self.holders)))
        if len(known) < HOLDERS_MAX:
            known[peer] = None

    def sources(self, node: Node) -> tuple[PeerId, ...]:
        """Live peers that can serve a commit's payload."""
        known = dict(self.holders.get(node.digest, {}))
        for peer in sorted(node.witnesses):
            known[PeerId(peer)] = None
        if node.record is not None:
            known[PeerId(node.record.header.home)] = None
        return tuple(peer for peer in known if peer in self.live)
