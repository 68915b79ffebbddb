"""Which codec a hand-in or a commit goes in: what each link can carry, learned from what it did.

A pure core, one for all fragments of a peer. The shell tells it what reached whom and how quickly
(:mod:`dugnad.averaging.linkrate`) and asks it before each hand-in and each merge. A hand-in to a
home may take GAMMA of what the link carries until the next one, less what else the uplink has to
carry; the richest codec whose size, known before encoding, fits that wins. What a lean codec
leaves out stays in its maker's residual. A commit has one codec for everybody: the richest that
the slowest quarter of the members can fetch in time.

Every choice carries the sentence that says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.codecs import CODECS, commit_codecs
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.linkrate import Delivery, LinkRate
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.dht.ids import PeerId

GAMMA: Final = 0.2
"""Share of what a link carries until the next hand-in. A home waits a quarter of an interval at
most, and what arrives early is merged early. On simulated lines of 2 to 100 Mbit/s (two sizes of a
model, two seeds) a target was reached 5 to 11 % sooner with 0.2 than with 0.35, and 1 to 14 % with
0.12 (by turns better and worse than 0.2)."""
SHARE_MIN: Final = 0.2
"""Of that, what hand-ins keep however much else the uplink carries: a peer that serves others all
the time would else never hand in."""
HOME_SHARE: Final = 0.25
"""Of an interval: what a home's uplink may take to send the others a payload."""
BETTER: Final = 1.5
"""Another uplink is better when it is so many times as quick: measurements differ by a quarter."""
QUARTILE: Final = 0.25
"""A commit's codec follows the downlink at the upper end of the slowest quarter."""
LATE_WEIGHT: Final = 0.3
"""Of the newest contribution in the mean of how many versions late they are listed."""
LATE_MAX: Final = 4.0
"""A contribution that is later than this is never listed (S = 2), or a bug in its maker."""
LINKS_MAX: Final = 256
"""Peers whose links are remembered, longest unused forgotten first: four full meshes."""


@dataclass(frozen=True, slots=True)
class HandInChoice:
    """The codec of one hand-in: its bytes, what it might have taken, and why it was chosen.

    `fits` is False when even the leanest codec is more than the link carries in time.
    """

    codec: str
    size: int
    budget: float
    fits: bool
    reason: str


@dataclass(frozen=True, slots=True)
class CommitChoice:
    """The codec of one commit, and the members that cannot fetch it before the next is due."""

    codec: str
    behind: tuple[PeerId, ...]
    reason: str


def richest(names: Sequence[str], sizes: Sequence[int], budget: float) -> str | None:
    """The first of the codecs `names`, from the richest down, in which fragments of `sizes`
    parameters take at most `budget` bytes together; None when none does."""
    for name in names:
        if sum(CODECS[name].encoded_size(size) for size in sizes) <= budget:
            return name
    return None


def lateness(applied: Sequence[CommitRecord], me: PeerId) -> list[int]:
    """By how many versions each contribution of ``me`` in these commits is late: 0 when the first
    version that could list it does."""
    return [
        one.header.version - 1 - row.contribution.base
        for one in applied
        for row in one.inputs
        if row.contribution.peer == me
    ]


class LinkControl:
    """The links of one peer, and the codecs that follow from them. Bytes and seconds."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        richest: str = "float32",
        richest_commit: str = "float32",
        leanest_commit: str = "int8",
        fixed: str = "",
    ) -> None:
        """`sizes` are the fragments' parameters. No hand-in is richer than `richest`, no commit
        than `richest_commit` (the run's own codecs: what is richer costs bytes and gains nothing
        there), or leaner than `leanest_commit`. `fixed` is what the owner has set for every hand-in
        of this peer.
        """
        self.sizes = tuple(sizes)
        self.up: dict[PeerId, LinkRate] = {}
        self.line = 0.0
        """What our own uplink carries to all peers together, bytes a second; 0: unknown."""
        self.down = LinkRate()
        """This peer's downlink, as whole commits arrive."""
        self.up_limit = 0.0
        """The owner's limit, bytes a second; 0: none."""
        self.late = [0.0] * len(self.sizes)
        """Mean number of versions by which contributions are listed late, by fragment."""
        self.fixed = fixed
        names = list(CODECS)
        self._names = names[names.index(richest) :]
        self._commit_names = commit_codecs(leanest_commit, richest_commit)

    # -- what is learned -----------------------------------------------------------------------

    def link(self, peer: PeerId) -> LinkRate:
        """The link to a peer; made when it is first asked for."""
        found = self.up.pop(peer, None) or LinkRate()
        self.up[peer] = found  # the newest last
        while len(self.up) > LINKS_MAX:
            del self.up[next(iter(self.up))]
        return found

    def delivered(self, peer: PeerId, found: Delivery) -> None:
        """Bytes of ours reached a peer."""
        self.link(peer).learn(found)

    def fetched(self, found: Delivery) -> None:
        """A commit's payload reached us, from however many peers."""
        self.down.learn(found)

    def listed(self, fragment: int, behind: int) -> None:
        """A contribution of ours was listed `behind` versions after the one that it was made for,
        or has passed the last that could list it.
        """
        known = self.late[fragment]
        self.late[fragment] = known + LATE_WEIGHT * (min(max(behind, 0), LATE_MAX) - known)

    @property
    def uplink(self) -> float:
        """This peer's own uplink, or what its quickest link carries; 0 while unknown."""
        return self.line or max((link.rate for link in self.up.values()), default=0.0)

    def rate_to(self, peer: PeerId, downlink: float = 0.0) -> float:
        """Bytes a second to reckon with towards a peer.

        A link that carried nothing yet is as quick as our uplink and the peer's own word of its
        `downlink` allow, where both are known; else slow.
        """
        known = self.up[peer].rate if peer in self.up else 0.0
        if not known:
            both = self.uplink > 0.0 and downlink > 0.0
            known = min(self.uplink, downlink) if both else float(SLOW_BYTES_PER_S)
        return min(rate for rate in (known, self.line, self.up_limit) if rate)

    # -- what is chosen ------------------------------------------------------------------------

    def hand_in(
        self,
        fragment: int,
        home: PeerId | None,
        interval_s: float,
        *,
        downlink: float = 0.0,
        other: float = 0.0,
    ) -> HandInChoice:
        """The codec of a hand-in of `fragment` to `home`; None: it stays on this machine.

        `interval_s` is the time until the next one of the same fragment, in which all fragments
        have their turn; `downlink` what the home says of itself; `other` the bytes a second that
        the uplink carries besides hand-ins.
        """
        n = self.sizes[fragment]
        if self.fixed:
            return self._chosen(self.fixed, n, 0.0, True, "its owner has set it")
        if home is None:
            return self._chosen(self._names[0], n, 0.0, True, "it stays on this machine")
        rate = self.rate_to(home, downlink)
        free = max(GAMMA * rate - other, SHARE_MIN * GAMMA * rate)
        budget = free * interval_s * self._part(fragment) / (1.0 + self.late[fragment])
        said = f"{rate * 8e-6:.3g} Mbit/s, {interval_s:.3g} s until the next"
        if self.late[fragment] >= 0.5:
            said += f", listed {self.late[fragment]:.1f} versions late"
        name = richest(self._names, (n,), budget)
        if name is not None:
            return self._chosen(name, n, budget, True, said)
        return self._chosen(self._names[-1], n, budget, False, f"{said}: even that is too much")

    def commit(
        self, fragment: int, downlinks: Mapping[PeerId, float], interval_s: float
    ) -> CommitChoice:
        """The codec of a commit of `fragment` that members with these downlinks (bytes a second;
        0: unknown, so slow) fetch within an interval.

        Never coarser than the leanest that commits may have; who is known not to fetch it in time
        is named.
        """
        n, seconds = self.sizes[fragment], interval_s * self._part(fragment)
        rates = {peer: rate or float(SLOW_BYTES_PER_S) for peer, rate in downlinks.items()}
        if not rates:
            return CommitChoice(self._commit_names[0], (), "nobody has to fetch it")
        slowest = sorted(rates.values())[int(QUARTILE * (len(rates) - 1))]
        budget = GAMMA * seconds * slowest
        name = richest(self._commit_names, (n,), budget) or self._commit_names[-1]
        size = CODECS[name].encoded_size(n)
        behind = tuple(sorted(p for p, rate in downlinks.items() if 0.0 < seconds * rate < size))
        return CommitChoice(name, behind, f"the slowest quarter has {slowest * 8e-6:.3g} Mbit/s")

    def fit_for_home(self, fragment: int, interval_s: float, others: Sequence[float]) -> bool:
        """Whether this peer should offer to be home of a fragment: it is unless its uplink takes
        longer than HOME_SHARE of an interval to send everybody the payload, and half of all peers
        have a better one (the `others`' uplinks in bytes a second; 0: unknown).

        So at least half of a swarm is, and on equal lines everybody.
        """
        mine = min(rate for rate in (self.uplink, self.up_limit) if rate) if self.uplink else 0.0
        if not mine or not others:
            return True
        size = CODECS[self._commit_names[-1]].encoded_size(self.sizes[fragment])
        if len(others) * size <= HOME_SHARE * interval_s * mine:
            return True
        return sum(rate > BETTER * mine for rate in others) < (len(others) + 1) / 2.0

    def _part(self, fragment: int) -> float:
        """Its part of what is handed in between two hand-ins of one fragment."""
        return self.sizes[fragment] / sum(self.sizes)

    @staticmethod
    def _chosen(name: str, n: int, budget: float, fits: bool, reason: str) -> HandInChoice:
        return HandInChoice(name, CODECS[name].encoded_size(n), budget, fits, reason)
