"""Following the others: which commits to get, to witness, and to take as the head.

Rules 6, 7, 10 and 12 of DESIGN.md section 8. A commit becomes the head when its anchors are held
and match its roots, when a member other than its home vouches for it, and when it is better than
the present head.
"""

from __future__ import annotations

from typing import Final

from dugnad.averaging.chains import answer, named
from dugnad.averaging.events import (
    AckIn,
    Acknowledge,
    Adopt,
    CommitsIn,
    CommitsWanted,
    DropState,
    HeadIn,
    Obtain,
    ObtainFailed,
    Send,
)
from dugnad.averaging.formats import (
    ACKS_MAX,
    DIGEST_BYTES,
    Ack,
    CommitRecord,
    HeadRow,
    Heads,
    WantCommits,
    header_digest,
)
from dugnad.averaging.join import JOIN
from dugnad.averaging.joiner import Joiner
from dugnad.averaging.lineage import CLOCK_AHEAD_MS
from dugnad.averaging.node import Node
from dugnad.averaging.view import View
from dugnad.averaging.witness import lone, witnessed
from dugnad.dht.ids import PeerId

CATCH_UP_MAX: Final = 8
"""Further behind than this, whole anchors are cheaper than payload after payload."""
WITNESSES_ENOUGH: Final = 3
"""Nobody adds an ack to a commit that has this many."""
WHOLE_AFTER: Final = 2
"""A payload that nobody served so often may be gone with its maker: every other try asks for whole
anchors, else two peers that need each other's word would wait for ever."""
SEEN_MAX: Final = 512
"""Commits whose first sight is remembered: a full lineage twice over."""
ASK_AGAIN_S: Final = 2.0
"""A chain that was asked for and did not come is asked for again after this."""
BAD_MAX: Final = 256
"""Digests remembered as refused."""
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 8.0
"""Between tries to get a payload that nobody served: 0.5, 1, 2, 4, 8 s."""
STATES_KEPT: Final = 2
"""Anchors kept: the head's and its parent's, so that a sibling can be computed without a fetch."""


class Follower:
    """Decides what to fetch, witness and adopt; reads and writes the shared view."""

    def __init__(self, view: View, joiner: Joiner) -> None:
        self.view = view
        self.joiner = joiner
        self.bad: dict[bytes, str] = {}
        self.asked: dict[bytes, tuple[float, PeerId]] = {}
        """Digest -> when its chain was asked for last, and of whom."""
        self.failed: dict[bytes, tuple[float, int]] = {}
        """Digest -> (try again at, tries so far)."""
        self.acks: dict[bytes, dict[bytes, Ack]] = {}
        self.acknowledged: dict[bytes, None] = {}
        self.seen: dict[bytes, float] = {}
        self.looked_at = 0.0
        """When :meth:`act` last looked for something to fetch."""
        self.dirty = True

    def commit_in(self, sender: PeerId, record: CommitRecord) -> bool:
        """Judge and keep a commit; ask for its chain when its parent is unknown."""
        view = self.view
        digest = header_digest(record.header, view.settings.lineage.run)
        if digest in self.bad:
            return False
        self._holds(sender, digest)
        self._saw(digest, view.now)
        if view.lineage.get(digest) is None:
            if view.lineage.get(record.header.parent) is None:
                self._ask(sender, digest)
                return False
            if self._ahead(record):
                return False
            reason = self._rates_fault(record) or view.lineage.judge(record, view.wall_ms)
            if reason:
                self._refuse(digest, f"a commit is refused: {reason}")
                return False
            view.lineage.add(record, digest)
            self._bound()
        self._keep_acks(digest, record.acks)
        self.dirty = True
        return True

    def commits_in(self, event: CommitsIn) -> None:
        """An answer with a chain, oldest first, maybe on top of a checkpoint."""
        view = self.view
        if event.checkpoint is not None:
            self._checkpoint(event)
        known, last = len(view.lineage.nodes), b""
        for record in event.records:
            digest = header_digest(record.header, view.settings.lineage.run)
            if view.lineage.get(digest) is None:
                if view.lineage.get(record.header.parent) is None:
                    return
                self._saw(digest, self._made_at(record))
            if not self.commit_in(event.sender, record):
                return
            last = digest
        if len(view.lineage.nodes) == known:
            return
        # more may follow what fitted into one answer
        for digest, (_, peer) in list(self.asked.items()):
            if peer == event.sender and view.lineage.get(digest) is None:
                self._ask(peer, digest, (last or view.head.digest,))

    def _holds(self, peer: PeerId, digest: bytes) -> None:
        """Remember a source; a new one is tried at once, an old one after its back-off."""
        if peer not in self.view.holders.get(digest, ()):
            self.failed.pop(digest, None)
        self.view.holds(peer, digest)

    def _saw(self, digest: bytes, when: float) -> None:
        self.seen.setdefault(digest, when)
        while len(self.seen) > SEEN_MAX:
            self.seen.pop(next(iter(self.seen)))

    def _ahead(self, record: CommitRecord) -> bool:
        """Whether a commit is dated too far ahead: not taken now, but its time may come."""
        if record.header.time_ms <= self.view.wall_ms + CLOCK_AHEAD_MS:
            return False
        self.view.note("clock", "a commit is dated more than a minute ahead of this clock")
        return True

    def _rates_fault(self, record: CommitRecord) -> str:
        ours, its = self.view.settings, record.header
        if its.kind == JOIN:
            return ""  # it has rates of its own
        same = (ours.eta_bits, ours.mu_bits) == (its.eta_bits, its.mu_bits)
        return "" if same else "its outer rates are not those of the run"

    def _bound(self) -> None:
        """Forget the least useful commits when somebody floods this peer with them."""
        if self.view.lineage.overfull():
            self._forget(self.view.lineage.prune(self.view.head, self.view.held))

    def _forget(self, digests: list[bytes]) -> None:
        for digest in digests:
            for table in (self.view.holders, self.acks, self.seen, self.failed, self.acknowledged):
                table.pop(digest, None)

    def _made_at(self, record: CommitRecord) -> float:
        """When a commit that is fetched later was made, in local time: by its header, but within
        the last interval, since clocks differ."""
        view = self.view
        made = record.header.time_ms / 1000.0 - view.wall_offset_s
        return min(max(made, view.now - view.interval_s), view.now)

    def _checkpoint(self, event: CommitsIn) -> None:
        """A lineage without the history down to mine: taken when its head is heavier (rule 12)."""
        view, sender, point = self.view, event.sender, event.checkpoint
        assert point is not None
        digest = header_digest(point.commit.header, view.settings.lineage.run)
        if view.lineage.get(digest) is not None or digest in self.bad or self._ahead(point.commit):
            return
        reason = self._rates_fault(point.commit) or view.lineage.judge_checkpoint(point)
        if reason:
            self._refuse(digest, f"a checkpoint is refused: {reason}")
            return
        # the checkpoint lies some versions below the head that was asked for
        heaviest = max(one.header.tokens_total for one in (point.commit, *event.records))
        if view.head.version and heaviest <= view.head.tokens_total:
            return
        view.lineage.add_checkpoint(point, digest)
        view.holds(sender, digest)
        self._saw(digest, self._made_at(point.commit))
        self._keep_acks(digest, point.commit.acks)
        self.dirty = True
        self._bound()

    def ack_in(self, event: AckIn) -> None:
        """A witness: it holds the payload, too."""
        view, ack = self.view, event.ack
        peer = PeerId(ack.peer)
        self._holds(peer, ack.digest)
        node = view.lineage.get(ack.digest)
        if node is None:
            if peer in view.live and ack.digest not in self.bad:
                self._ask(peer, ack.digest)
            return
        self._keep_acks(ack.digest, (ack,))
        self.dirty = True

    def head_in(self, event: HeadIn) -> None:
        """A peer's head: ask for what is unknown.

        A peer that holds a commit has computed its roots: its own word, over its own connection, is
        worth as much here as its signed ack, which may have been lost.
        """
        view, row = self.view, event.row
        if len(row.digest) != DIGEST_BYTES:
            return
        self.joiner.head_in(event)
        self._holds(event.sender, row.digest)
        node = view.lineage.get(row.digest)
        if node is None and row.digest not in self.bad:
            self._ask(event.sender, row.digest)
        elif node is not None:
            if node.member(event.sender):
                node.witnesses.add(event.sender)
            self.dirty = True

    def wanted(self, event: CommitsWanted) -> None:
        """Serve a chain; a checkpoint when it does not reach what the asker knows."""
        view = self.view
        node = view.lineage.get(event.digest)
        if node is None or node.record is None:
            return
        reply = answer(view.lineage, node, event.known, self._with_acks)
        view.out.append(Send(event.sender, reply))

    def _with_acks(self, node: Node) -> CommitRecord:
        assert node.record is not None
        acks = self.acks.get(node.digest, {})
        rows = tuple(acks[peer] for peer in sorted(acks))[:ACKS_MAX]
        return CommitRecord(node.record.header, node.record.inputs, rows)

    def _keep_acks(self, digest: bytes, acks: tuple[Ack, ...]) -> None:
        node = self.view.lineage.get(digest)
        kept = self.acks.setdefault(digest, {})
        for ack in acks:
            if ack.digest != digest:
                continue
            self.view.holds(PeerId(ack.peer), digest)
            # a stranger's word counts for nothing, and many strangers would fill the table
            if node is not None and node.member(ack.peer) and len(kept) < ACKS_MAX:
                kept[ack.peer] = ack
                node.witnesses.add(ack.peer)

    def _ask(self, peer: PeerId, digest: bytes, above: tuple[bytes, ...] = ()) -> None:
        """Ask for a chain down to what is known; again at once ``above`` the last one that came."""
        view = self.view
        last, _ = self.asked.get(digest, (-ASK_AGAIN_S, peer))
        if not above and view.now < last + ASK_AGAIN_S:
            return
        self.asked.pop(digest, None)
        while len(self.asked) >= BAD_MAX:
            self.asked.pop(next(iter(self.asked)))
        self.asked[digest] = (view.now, peer)
        known = named(view.lineage, view.head, above)
        view.out.append(Send(peer, WantCommits(view.settings.lineage.fragment, digest, known)))

    def _refuse(self, digest: bytes, reason: str) -> None:
        while len(self.bad) >= BAD_MAX:
            self.bad.pop(next(iter(self.bad)))
        self.bad[digest] = reason
        self.view.note("refused", reason)

    def obtained(self, digest: bytes) -> None:
        """The anchors after a commit are here."""
        self.joiner.obtained(digest)
        self.view.held.add(digest)
        self._fetched(digest)
        self.failed.pop(digest, None)
        self._drop_states(below=False)
        self.dirty = True

    def obtain_failed(self, event: ObtainFailed) -> None:
        """Nobody served it, or it is not what its header says."""
        self.joiner.obtain_failed(event)
        self._fetched(event.digest)
        if event.waited:
            pass  # the newest is chosen anew, at once
        elif event.lied:
            self._refuse(event.digest, f"a commit is refused: {event.reason}")
        else:
            tries = self.failed.get(event.digest, (0.0, 0))[1] + 1
            wait = min(BACKOFF_FIRST_S * 2 ** min(tries - 1, 8), BACKOFF_MAX_S)
            self.failed[event.digest] = (self.view.now + wait, tries)
        self.dirty = True

    def _fetched(self, digest: bytes) -> None:
        """A fetch is over, one way or the other."""
        view = self.view
        view.getting = None if view.getting == digest else view.getting
        view.getting_whole = None if view.getting_whole == digest else view.getting_whole

    def act(self) -> bool:
        """Adopt what can be adopted, fetch what is missing; True when the head changed."""
        changed = False
        retry_at = self.deadline()
        if not self.dirty and (retry_at is None or retry_at > self.view.now):
            return False
        self.dirty = False
        node = self._adoptable()
        if node is not None:
            self._adopt(node)
            changed = True
        if self.view.getting is None:
            self._get()
        self.looked_at = self.view.now
        return changed

    def _tips(self) -> list[Node]:
        """Usable nodes that nothing usable is built on, best first."""
        nodes = self.view.lineage.nodes
        usable = {d: n for d, n in nodes.items() if not self._spoiled(n)}
        inner = {node.parent for node in usable.values()}
        tips = [node for digest, node in sorted(usable.items()) if digest not in inner]
        best: list[Node] = []
        for node in tips:
            at = next((i for i, o in enumerate(best) if self.view.lineage.better(node, o)), None)
            best.insert(len(best) if at is None else at, node)
        return best

    def _spoiled(self, node: Node) -> bool:
        return bool(self.bad) and any(
            one.digest in self.bad for one in self.view.lineage.ancestors(node)
        )

    def _path(self, tip: Node) -> tuple[list[Node], bool]:
        """Nodes not held on the way to ``tip``, newest first; whether a held one is below."""
        path: list[Node] = []
        for node in self.view.lineage.ancestors(tip):
            if node.digest in self.view.held:
                return path, True
            path.append(node)
        return path, False

    def _get(self) -> None:
        """Fetch what leads to the best tip that can be had. Whole anchors may take long, or be with
        nobody any more: a payload that builds on what is held does not wait for them.
        """
        view = self.view
        alone = lone(view)
        for tip in sorted(self._tips(), key=lambda t: alone and not witnessed(view, t)):
            if view.lineage.better(view.head, tip) and not (alone and witnessed(view, tip)):
                continue
            path, based = self._path(tip)
            if not path:
                continue
            whole = not based or len(path) > CATCH_UP_MAX
            coming = view.getting_whole
            if coming is not None and (whole or any(node.digest == coming for node in path)):
                continue
            tries = self.failed.get(path[-1].digest, (0.0, 0))[1]
            gone = not whole and tries >= WHOLE_AFTER and tries % 2 == 0
            if gone and coming is None and self._obtain(path, alone):
                return
            if self._obtain(path, alone) if whole else self._obtain(path[-1:], alone, whole=False):
                return

    def _obtain(self, path: list[Node], alone: bool, *, whole: bool = True) -> bool:
        """Ask for the newest of ``path`` that can be had; False when none can."""
        view = self.view
        for node in path:
            if node.record is None or self.failed.get(node.digest, (0.0, 0))[0] > view.now:
                continue
            if whole and not alone and not witnessed(view, node):
                continue
            if sources := view.sources(node):
                if whole:
                    view.getting_whole = node.digest
                else:
                    view.getting = node.digest
                view.first_try = node.digest not in self.failed
                view.out.append(Obtain(node.digest, node.record.header, sources, whole))
                return True
        return False

    def _adoptable(self) -> Node | None:
        view = self.view
        alone = lone(view)
        heads: list[Node] = []
        for digest in sorted(view.held):
            node = view.lineage.get(digest)
            if node is None or node.record is None or self._spoiled(node):
                continue
            if digest not in self.acknowledged:
                self._acknowledge(node)
            if node is view.head or not witnessed(view, node) or self.joiner.premature(node):
                continue
            if view.lineage.better(node, view.head) or (
                alone and not view.lineage.is_ancestor(node, view.head)
            ):
                heads.append(node)
        if not alone:
            heads.append(view.head)
        best = view.lineage.best(heads) if heads else view.head
        return None if best is view.head else best

    def _acknowledge(self, node: Node) -> None:
        """Witness a commit whose anchors I computed, unless enough have."""
        view = self.view
        assert node.record is not None
        home = node.record.header.home
        if home == view.me or not node.member(view.me):
            return
        self.acknowledged[node.digest] = None
        while len(self.acknowledged) > BAD_MAX:
            self.acknowledged.pop(next(iter(self.acknowledged)))
        if len(node.witnesses - {home}) < WITNESSES_ENOUGH:
            view.out.append(Acknowledge(node.version, node.digest))

    def _adopt(self, node: Node) -> None:
        view, old = self.view, self.view.head
        first = view.first_choice()
        fork, undone = view.lineage.fork_point(node, old), list[bytes]()
        applied: list[CommitRecord] = []
        if fork is not None:
            undone = [one.digest for one in view.lineage.unjoined(old, node)]
            for one in view.lineage.ancestors(node):
                if one.digest == fork.digest:
                    break
                if one.record is not None:
                    applied.append(self._with_acks(one))
        view.head = node
        if node.version > old.version:
            self._learn_delay(node, first if node.parent == old.digest else None)
        view.out.append(
            Adopt(node.digest, node.version, tuple(undone), tuple(applied[::-1]), fork is None)
        )
        self._drop_states(below=True)
        self._forget(view.lineage.prune(node, view.held))

    def _learn_delay(self, node: Node, first: PeerId | None) -> None:
        """Learn how long a home takes: from those that had the duty first, else every succession
        would make the next one later."""
        view = self.view
        seen = self.seen.get(node.digest, view.now)
        assert node.record is not None
        if node.record.header.kind == JOIN:  # between two merges: what is due stays due
            view.seen_at, view.due_at = seen, min(view.due_at, seen + view.interval_s)
            return
        if node.record.header.home == first and seen >= view.due_at > 0.0:
            view.commit_delay.add(seen - view.due_at)
        view.seen_at = seen
        view.due_at = seen + view.interval_s

    def _drop_states(self, *, below: bool) -> None:
        """Let go of anchors that are joined or lie deep below others that are held (a side that
        waits follows another lineage without standing on it), and of all ``below`` the head."""
        view = self.view
        keep = {node.digest for node in list(view.lineage.ancestors(view.head))[:STATES_KEPT]}
        keep |= {view.head.digest, view.joining or b""}
        joined = view.lineage.covered(view.head)
        nodes = {digest: view.lineage.get(digest) for digest in sorted(view.held)}
        inner = {node.parent for node in nodes.values() if node is not None}
        deep = {n.parent for digest, n in nodes.items() if n is not None and digest in inner}
        for digest, node in nodes.items():
            if digest in keep:
                continue
            old = node is None or node.version < view.head.version
            if (below and old) or digest in joined or digest in deep:
                view.held.discard(digest)
                view.out.append(DropState(digest))

    def heads(self, *, reply: bool = False) -> Heads:
        """My head as a message; and the commits I hold that still want a witness."""
        view = self.view
        nodes = [view.head]
        for digest in sorted(view.held):
            node = view.lineage.get(digest)
            if node is not None and view.lineage.better(node, view.head):
                nodes.append(node)
        fragment = view.settings.lineage.fragment
        return Heads(tuple(HeadRow(fragment, n.version, n.digest) for n in nodes), reply)

    def deadline(self) -> float | None:
        """When a failed fetch is tried again."""
        return min((at for at, _ in self.failed.values() if at > self.looked_at), default=None)
