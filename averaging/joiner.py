"""Two sides that went on apart for long: who takes the other in, and who waits for it (rule 11).

Further apart than F versions, changing sides would leave behind work that its makers have settled
for good. So the side whose head counts for less waits: it merges nothing and takes no head that
does not list its work, for a bounded time. Of the other side the home of the next version gets the
waiting side's anchors and joins it. Which side is which, follows from the heads alone.
"""

from __future__ import annotations

from typing import Final

from dugnad.averaging.events import HeadIn, Join, Obtain, ObtainFailed
from dugnad.averaging.joinplan import JoinPlan, plan
from dugnad.averaging.node import Node
from dugnad.averaging.view import View
from dugnad.averaging.witness import lone, witnessed
from dugnad.dht.ids import PeerId

STANDS_MAX: Final = 256
"""Peers whose head is remembered: four full meshes, as peers may name themselves before they are
live."""
WAIT_INTERVALS: Final = 6.0
"""A side waits so many intervals to be joined: in each, another home may try."""
WAIT_MIN_S: Final = 20.0
"""And at least so long: whole anchors have to travel first."""
PLANS_KEPT: Final = 16
"""Joins worked out and remembered: a few sides and the last heads of each."""
RETRY_S: Final = 1.0
"""Anchors that nobody served are asked for again after this."""


class Joiner:
    """Decides about joining and waiting; reads the shared view, appends actions."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.stands: dict[PeerId, bytes] = {}
        """The head that each peer named last."""
        self.target: Node | None = None
        """The other side's head that my lineage should take in."""
        self.since: float | None = None
        """Since when I wait to be joined."""
        self.getting: bytes | None = None
        self.retry_at = 0.0
        self._head = view.head.digest
        self._waited = False
        self._plans: dict[tuple[bytes, bytes], JoinPlan | None] = {}

    # -- what is heard -------------------------------------------------------------------------

    def head_in(self, event: HeadIn) -> None:
        """A peer named its head."""
        if event.stands:
            self.stands.pop(event.sender, None)
            self.stands[event.sender] = event.row.digest
            while len(self.stands) > STANDS_MAX:
                self.stands.pop(next(iter(self.stands)))

    def peer_down(self, peer: PeerId) -> None:
        """A peer is gone: nobody knows what it stands at when it comes back."""
        self.stands.pop(peer, None)

    def obtained(self, digest: bytes) -> None:
        """Anchors are here."""
        if self.getting == digest:
            self.getting = None

    def obtain_failed(self, event: ObtainFailed) -> None:
        """Nobody served them."""
        if self.getting == event.digest:
            self.getting = None
            self.retry_at = self.view.now + (0.0 if event.waited else RETRY_S)

    # -- which side I am on --------------------------------------------------------------------

    def look(self) -> bool:
        """Compare my head with those that live peers stand at; True when a wait is over."""
        view = self.view
        stood = self._stood()
        if view.head.digest != self._head:
            old = view.lineage.get(self._head)
            self._head = view.head.digest
            if old is None or not view.lineage.is_ancestor(old, view.head):
                self.since = None  # I went over
        target, awaited, others = None, False, self._elsewhere()
        mine_alone = bool(others) and lone(view)
        for node in others:
            if self._ahead(node, mine_alone):
                awaited = awaited or self._far(view.head, node)
            elif mine_alone or node.digest not in stood or not self._far(node, view.head):
                continue
            elif target is None or node.version > target.version:
                target = node
        self.target = target
        view.joining = target.digest if target is not None else None
        if not awaited:
            self.since = None
        elif self.since is None:
            self.since = view.now
            view.note("join", "another lineage counts for more: waiting to be joined to it")
        waited, self._waited = self._waited, self.waits()
        if waited and not self._waited and awaited:
            view.note("given up", f"no join came within {self._patience_s():.0f} s")
        return waited and not self._waited

    def _stood(self) -> set[bytes]:
        return {digest for peer, digest in self.stands.items() if peer in self.view.live}

    def _elsewhere(self) -> list[Node]:
        """Known heads of live peers, and what I hold of such, that my lineage does not contain, nor
        they my head."""
        view = self.view
        known = view.lineage.covered(view.head)
        nodes = (view.lineage.get(one) for one in sorted((self._stood() | view.held) - known))
        return [
            node
            for node in nodes
            if node is not None and view.head.digest not in view.lineage.covered(node)
            if node.digest not in view.held or view.sources(node)
        ]

    def _ahead(self, node: Node, mine_alone: bool) -> bool:
        """Whether ``node`` is to be preferred to my head (rules 6 and 10)."""
        better = self.view.lineage.better(node, self.view.head)
        vouched = witnessed(self.view, node)
        return (vouched or better) if mine_alone else (vouched and better)

    def _far(self, node: Node, head: Node) -> bool:
        """Whether more than F versions up to ``node`` are not listed by ``head``'s lineage and can
        be: the fork is known, and something may follow on ``head`` that lists them."""
        lineage = self.view.lineage
        if self.view.stopped or lineage.final(head):
            return False
        if len(lineage.beyond(node, head)) <= lineage.rules.horizon:
            return False
        return self._plan(head, node) is not None

    def _plan(self, head: Node, other: Node) -> JoinPlan | None:
        """The join of ``other`` on ``head``; asked for at every event while the two are apart."""
        lineage, key = self.view.lineage, (head.digest, other.digest)
        if lineage.fork_point(head, other) is None:
            return None  # not known yet, or not any more
        if key not in self._plans:
            while len(self._plans) >= PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan(lineage, head, other)
        return self._plans[key]

    # -- waiting -------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        return max(WAIT_MIN_S, WAIT_INTERVALS * self.view.interval_s)

    def waits(self) -> bool:
        """Whether I wait to be joined: nothing is merged here meanwhile."""
        return self.since is not None and self.view.now < self.since + self._patience_s()

    def premature(self, node: Node) -> bool:
        """Whether taking ``node`` as the head now would leave behind work that a join may save."""
        return self.waits() and self._far(self.view.head, node)

    # -- joining -------------------------------------------------------------------------------

    def act(self) -> Join | None:
        """I am home and nothing is under way: the join to make now, if there is one."""
        view, target = self.view, self.target
        if target is None or target.record is None:
            return None
        if target.digest not in view.held:
            self._obtain(target)
            return None
        if view.now < self._open_at():
            return None
        made = self._plan(view.head, target)
        if made is None:
            return None
        if made.left_out:
            text = f"{made.left_out} contributions of the other side are too many for one join"
            view.note("given up", text)
        return Join(view.head.digest, made.other, made.alpha_bits, made.inputs)

    def _obtain(self, target: Node) -> None:
        view = self.view
        if self.getting is not None or view.now < self.retry_at:
            return
        assert target.record is not None
        there = [p for p, digest in self.stands.items() if digest == target.digest]
        sources = tuple(p for p in dict.fromkeys([*there, *view.sources(target)]) if p in view.live)
        if sources:
            self.getting = target.digest
            view.out.append(Obtain(target.digest, target.record.header, sources, whole=True))

    def failed(self) -> None:
        """The join could not be made: its numbers are not there any more, or do not fit."""
        self.retry_at = self.view.now + RETRY_S

    def _open_at(self) -> float:
        """When the next version may follow my head at the earliest."""
        floor = self.view.settings.lineage.merge_floor_ms / 1000.0
        return max(self.view.seen_at + floor, self.retry_at)

    def deadline(self) -> float | None:
        """When something may be done without any event."""
        view = self.view
        if self.waits() and self.since is not None:
            return self.since + self._patience_s()
        if self.target is None or self.getting is not None or view.current_home() != view.me:
            return None
        wait = self._open_at() if self.target.digest in view.held else self.retry_at
        return max(wait, view.quiet_until)
