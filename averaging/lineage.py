"""The commits of one fragment that a peer knows: validity, tables, weight and fork choice.

A commit node carries the two tables that its header names by root: *members* (who contributed in
the last n versions, how fast, may it be home) and *last seqs* (the newest contribution of each
peer that this lineage lists). Both follow from the parent's tables and the commit's inputs, so
every peer recomputes and checks them (DESIGN.md rules 1, 3, 5, 8 and 10).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.formats import (
    Checkpoint,
    CommitRecord,
    Contribution,
    Input,
    Member,
    SeqRow,
    UnitPiece,
    genesis_digest,
    inputs_root,
    members_root,
    pieces_root,
    seqs_root,
)
from dugnad.averaging.join import JOIN, header_fault, inputs_fault
from dugnad.averaging.node import Node, rows_fault, seq_rows
from dugnad.averaging.pruning import COST_MAX, NODES_MAX, doomed
from dugnad.averaging.speed import class_speed
from dugnad.dht.ids import RunId

CLASS_SLACK: Final = 1.5
"""A class spans a factor of 2^0.5 and changes with hysteresis of 0.75 class: 2^0.375 is 1.3."""
NEWCOMER_INTERVALS: Final = 3
"""A first contribution may hold what a peer trained while it saw this many intervals pass."""
_FLIPPED: Final = bytes(range(255, -1, -1))
CLOCK_AHEAD_MS: Final = 60_000
"""A header may not be dated further ahead of its reader's clock (schedules.md R5)."""
TOKENS_MAX: Final = 1 << 40
"""Tokens of one contribution: an hour of the fastest machines is a thousandth of it. Without a
bound one false claim would carry a lineage's total beyond what a header can hold."""
SEQS_KEPT_MS: Final = 7 * 24 * 3600 * 1000
"""A last-seq row of a peer that is no member any more is kept this long. It cannot be listed twice
by then (staleness ends that after S versions), and the table must not grow with every visitor."""
ENDED: Final = "the run has reached its token budget: nothing is listed any more"


@dataclass(frozen=True, slots=True)
class LineageRules:
    """The run's rules that decide whether a commit is valid. Times in milliseconds."""

    run: RunId
    fragment: int
    staleness: int
    """S: a contribution made on version b may be listed in versions b+1 to b+S."""
    horizon: int
    """F: a commit this deep is settled."""
    member_versions: int
    """n: a member has a contribution in the last n versions."""
    merge_floor_ms: int
    genesis_theta_root: bytes
    genesis_time_ms: int
    sequence_tokens: int
    """Tokens of one sequence: what the pieces of a contribution are worth."""
    token_budget: int = 0
    """The first version whose token total reaches this is a lineage's last; 0: there is none."""


class Lineage:
    """Commits of one fragment, linked by parent, and the judgement over them."""

    def __init__(self, rules: LineageRules) -> None:
        self.rules = rules
        digest = genesis_digest(rules.run, rules.fragment, rules.genesis_theta_root)
        self.genesis = Node(digest, 0, b"", rules.genesis_time_ms, 0, (), {})
        self.nodes: dict[bytes, Node] = {digest: self.genesis}
        self.cost = self.genesis.cost
        self._better: dict[tuple[bytes, bytes], bool] = {}
        """Comparisons made since a node came or went: asked for at every event."""
        self._covered: dict[bytes, frozenset[bytes]] = {}
        """Answers of :meth:`covered` since a node came or went."""

    def get(self, digest: bytes) -> Node | None:
        """The node called ``digest``, if it is known."""
        return self.nodes.get(digest)

    def final(self, node: Node) -> bool:
        """Whether ``node`` is the last version of its lineage: nothing may follow it.

        The first version that reaches the budget, since none is built on such a one. It follows
        from the lineage alone, so all peers that stand at a head agree whether it has ended.
        """
        return 0 < self.rules.token_budget <= node.tokens_total

    def judge(self, record: CommitRecord, wall_ms: int, *, tables: bool = True) -> str:
        """Why ``record`` cannot extend what is known, or '' when it can. Signatures excluded, and
        without ``tables`` what can only be recomputed from version 0 on.
        """
        header = record.header
        parent = self.nodes.get(header.parent)
        if parent is None:
            return "its parent is unknown"
        rules = self.rules
        if header.run != rules.run or header.fragment != rules.fragment:
            return "it belongs to another run or fragment"
        if self.final(parent):
            return "its parent has reached the token budget and is the last version"
        if header.version != parent.version + 1:
            return "its version does not follow its parent's"
        if header.time_ms < parent.time_ms + rules.merge_floor_ms:
            return "it follows its parent sooner than the merge floor allows"
        if header.time_ms > wall_ms + CLOCK_AHEAD_MS:
            return "it is dated more than a minute ahead"
        if not record.inputs:
            return "it lists nothing"
        covered = self.covered(parent) if header.kind == JOIN else frozenset[bytes]()
        reason = header_fault(header, covered) or self._judge_inputs(record, parent)
        return reason or (self._judge_tables(record, parent) if tables else "")

    def _judge_inputs(self, record: CommitRecord, parent: Node) -> str:
        order = [(one.contribution.peer, one.contribution.seq) for one in record.inputs]
        if order != sorted(set(order)):
            return "its inputs are not in ascending order of (peer, seq)"
        joins = record.header.kind == JOIN
        if joins and (reason := inputs_fault(record.inputs, self.listings(parent))):
            return reason
        for one in record.inputs:
            if joins:  # they were judged where they were listed first
                reason = self._judge_work(one.contribution)
            else:
                reason = self.judge_contribution(one.contribution, parent, fresh_seq=True)
            reason = reason or self.judge_pieces(one.contribution, one.pieces)
            if reason:
                return f"one of its inputs is not listable: {reason}"
            if not all(math.isfinite(value) for value in one.coefficients):
                return "an input has a coefficient that is not a number"
            if one.refusal and one.clip and not joins:
                return "a refused input counts in part"
        return ""

    def judge_pieces(self, c: Contribution, pieces: tuple[UnitPiece, ...]) -> str:
        """Why ``pieces`` are not the work of ``c``, or ''."""
        if pieces_root(self.rules.run, pieces) != c.pieces_root:
            return "its units do not match their root"
        if piece_tokens(pieces, self.rules.sequence_tokens) != c.tokens:
            return "its tokens do not follow from its units"
        return ""

    def judge_contribution(self, c: Contribution, parent: Node, *, fresh_seq: bool) -> str:
        """Why ``c`` cannot be listed in the commit after ``parent``, or ''."""
        version = parent.version + 1
        if self.final(parent):
            return ENDED
        if reason := self._judge_work(c):
            return reason
        if c.base >= version:
            return f"its base {c.base} is not older than version {version}"
        if version > c.base + self.rules.staleness:
            return f"it is stale: made on version {c.base}, the next is {version}"
        row = parent.seqs.get(c.peer)
        if fresh_seq and row is not None and c.seq <= row.seq:
            return "a replay: its maker's number, or a later one, is already listed"
        return ""

    def _judge_work(self, c: Contribution) -> str:
        if c.fragment != self.rules.fragment:
            return "it is of another fragment"
        if c.steps < 1 or c.tokens < 1:
            return "it holds no work"
        if c.tokens > TOKENS_MAX:
            return "it claims more tokens than any machine makes"
        return ""

    def _judge_tables(self, record: CommitRecord, parent: Node) -> str:
        header, run = record.header, self.rules.run
        if header.inputs_root != inputs_root(run, record.inputs):
            return "its inputs do not match their root"
        node = self.child(record, b"", parent)
        if header.tokens_total != node.tokens_total:
            return "its token total does not follow from its inputs"
        if header.members_root != members_root(run, node.members):
            return "its member table does not follow from its inputs"
        if header.seqs_root != seqs_root(run, seq_rows(node)):
            return "its last-seq table does not follow from its inputs"
        return ""

    def child(self, record: CommitRecord, digest: bytes, parent: Node) -> Node:
        """The node that ``record`` makes on ``parent``; nothing is judged or stored."""
        header = record.header
        oldest_ms = header.time_ms - SEQS_KEPT_MS
        seqs = {
            peer: row
            for peer, row in parent.seqs.items()
            if row.time_ms >= oldest_ms or parent.member(peer)
        }
        weights: dict[bytes, int] = {}
        listed = {(i.contribution.peer, i.contribution.seq): i for i in record.inputs}
        for one in record.inputs:
            c = one.contribution
            row = seqs.get(c.peer)
            if header.kind != JOIN or (not one.refusal and (row is None or c.seq > row.seq)):
                seqs[c.peer] = SeqRow(c.peer, c.seq, header.time_ms)
            if not one.refusal:  # one cap for all that a maker has in this commit
                cap = self.cap(c, parent, header.time_ms)
                weights[c.peer] = min(weights.get(c.peer, 0) + c.tokens, cap)
        return Node(
            digest=digest,
            version=parent.version + 1,
            parent=parent.digest,
            time_ms=header.time_ms,
            tokens_total=parent.tokens_total + sum(weights.values()),
            members=self._members_after(parent, record.inputs),
            seqs=seqs,
            record=record,
            listed=listed,
            weights=weights,
        )

    def _members_after(self, parent: Node, inputs: Iterable[Input]) -> tuple[Member, ...]:
        version = parent.version + 1
        oldest = version - self.rules.member_versions
        rows = {row.peer: row for row in parent.members if row.version > oldest}
        for one in inputs:
            if one.refusal:
                continue
            c = one.contribution
            rows[c.peer] = Member(c.peer, c.speed_class, c.eligible, version)
        return tuple(rows[peer] for peer in sorted(rows))

    def cap(self, c: Contribution, parent: Node, time_ms: int) -> int:
        """Tokens of the maker of ``c`` that count: its class's speed times the time it had."""
        row = parent.seqs.get(c.peer)
        if row is not None:
            had_ms = time_ms - row.time_ms
        else:
            had_ms = NEWCOMER_INTERVALS * (time_ms - parent.time_ms) + self.rules.merge_floor_ms
        return int(class_speed(c.speed_class) * CLASS_SLACK * max(had_ms, 0) / 1000.0)

    def add(self, record: CommitRecord, digest: bytes) -> Node:
        """Store a judged commit and return its node (the known one when it is not new)."""
        known = self.nodes.get(digest)
        if known is None:
            parent = self.nodes[record.header.parent]
            known = self.child(record, digest, parent)
            self._keep(known)
        known.witnesses.update(ack.peer for ack in record.acks)
        return known

    def _keep(self, node: Node) -> None:
        self.nodes[node.digest] = node
        self.cost += node.cost
        self._changed()

    def _changed(self) -> None:
        self._better.clear()
        self._covered.clear()

    def judge_checkpoint(self, point: Checkpoint) -> str:
        """Why a checkpoint's tables do not match its header, or ''."""
        header, run = point.commit.header, self.rules.run
        if header.run != run or header.fragment != self.rules.fragment:
            return "it belongs to another run or fragment"
        if fault := header_fault(header, ()):
            return fault
        if header.members_root != members_root(run, point.members):
            return "its member table does not match the header"
        if header.seqs_root != seqs_root(run, point.seqs):
            return "its last-seq table does not match the header"
        if header.inputs_root != inputs_root(run, point.commit.inputs):
            return "its inputs do not match their root"
        parent_total = header.tokens_total - sum(i.contribution.tokens for i in point.commit.inputs)
        if 0 < self.rules.token_budget <= parent_total:  # the least that it can have been
            return "its parent had reached the token budget already"
        return rows_fault(point)

    def add_checkpoint(self, point: Checkpoint, digest: bytes) -> Node:
        """Store a judged checkpoint as a node whose parent may be unknown."""
        known = self.nodes.get(digest)
        if known is None:
            header = point.commit.header
            known = Node(
                digest=digest,
                version=header.version,
                parent=header.parent,
                time_ms=header.time_ms,
                tokens_total=header.tokens_total,
                members=point.members,
                seqs={row.peer: row for row in point.seqs},
                record=point.commit,
                listed={(i.contribution.peer, i.contribution.seq): i for i in point.commit.inputs},
            )
            self._keep(known)
        known.witnesses.update(ack.peer for ack in point.commit.acks)
        return known

    def checkpoint(self, node: Node) -> Checkpoint | None:
        """What a peer without history needs to start from ``node`` (None for version 0)."""
        if node.record is None:
            return None
        return Checkpoint(node.record, node.members, seq_rows(node))

    def ancestors(self, node: Node) -> Iterator[Node]:
        """``node`` and its known ancestors, newest first."""
        current: Node | None = node
        while current is not None:
            yield current
            current = self.nodes.get(current.parent)

    def is_ancestor(self, older: Node, newer: Node) -> bool:
        """Whether ``older`` lies on the chain of ``newer`` (or is it)."""
        for node in self.ancestors(newer):
            if node.version <= older.version:
                return node.digest == older.digest
        return False

    def fork_point(self, a: Node, b: Node) -> Node | None:
        """The newest common ancestor of two nodes, if it is known."""
        one: Node | None = a
        two: Node | None = b
        while one is not None and two is not None and one.digest != two.digest:
            if one.version >= two.version:
                one = self.nodes.get(one.parent)
            else:
                two = self.nodes.get(two.parent)
        return one if two is not None else None

    def weight_since(self, node: Node, fork: Node) -> int:
        """Tokens that members of ``fork`` merged between ``fork`` and ``node``.

        Where nobody was a member yet (version 0) everybody's tokens count, else no lineage could
        ever win the first fork.
        """
        voters = {row.peer for row in fork.members}
        total = 0
        for one in self.ancestors(node):
            if one.version <= fork.version:
                break
            total += sum(
                tokens for peer, tokens in one.weights.items() if not voters or peer in voters
            )
        return total

    def better(self, a: Node, b: Node) -> bool:
        """Whether head ``a`` is to be preferred to head ``b`` (rule 10)."""
        if a.digest == b.digest:
            return False
        key = (a.digest, b.digest)
        if key not in self._better:
            self._better[key] = self._judge_heads(a, b)
        return self._better[key]

    def best(self, heads: Sequence[Node]) -> Node:
        """The head to prefer among several; at least one is given.

        The voters differ from fork to fork, so "better" alone may run in a circle: a beats b by the
        members of their fork, b beats c and c beats a by those of an older one. So the youngest
        forks are decided first, and only the winner stands for its branch. Equal sets of heads
        have equal winners, in whatever order they are given.
        """
        left = sorted({node.digest: node for node in heads}.values(), key=lambda n: n.digest)
        while len(left) > 2:
            _, first, second = max(
                ((fork.version if (fork := self.fork_point(a, b)) else -1), i, j)
                for i, a in enumerate(left)
                for j, b in enumerate(left)
                if i < j
            )
            del left[second if self.better(left[first], left[second]) else first]
        return left[0] if len(left) == 1 or self.better(left[0], left[1]) else left[1]

    def _judge_heads(self, a: Node, b: Node) -> bool:
        fork = self.fork_point(a, b)
        if fork is None:
            return (a.tokens_total, flip(a.digest)) > (b.tokens_total, flip(b.digest))
        if fork.digest == b.digest:
            return True
        if fork.digest == a.digest:
            return False
        key_a = (self.weight_since(a, fork), flip(a.digest))
        return key_a > (self.weight_since(b, fork), flip(b.digest))

    def chain(self, head: Node, known: Iterable[bytes]) -> tuple[list[Node], bool]:
        """Nodes after any of ``known`` up to ``head``, oldest first; and whether it connected."""
        stop = set(known)
        found: list[Node] = []
        for node in self.ancestors(head):
            if node.digest in stop:
                return found[::-1], True
            if node.record is None:
                return found[::-1], node.version == 0
            found.append(node)
        return found[::-1], False

    def listing(self, head: Node, key: tuple[bytes, int]) -> Input | None:
        """The input of ``head``'s known chain that is the contribution (peer, seq), if any."""
        for node in self.ancestors(head):
            if key in node.listed:
                return node.listed[key]
        return None

    def listings(self, head: Node) -> dict[tuple[bytes, int], Input]:
        """All that ``head``'s known chain lists: of each contribution what was said last."""
        found: dict[tuple[bytes, int], Input] = {}
        for node in self.ancestors(head):
            for key, one in node.listed.items():
                found.setdefault(key, one)
        return found

    def covered(self, head: Node) -> frozenset[bytes]:
        """Known commits whose inputs ``head``'s lineage lists: it, what it is built on, and what
        joins on it have taken in."""
        if head.digest not in self._covered:
            found, left = set[bytes](), [head.digest]
            while left:
                node = self.nodes.get(left.pop())
                while node is not None and node.digest not in found:
                    found.add(node.digest)
                    if node.record is not None and node.record.header.kind == JOIN:
                        left.append(node.record.header.other)
                    node = self.nodes.get(node.parent)
            self._covered[head.digest] = frozenset(found)
        return self._covered[head.digest]

    def unjoined(self, node: Node, head: Node) -> list[Node]:
        """Commits on ``node``'s known chain, newest first, whose inputs ``head``'s lineage does
        not list as it stands."""
        if self.is_ancestor(node, head):
            return []
        known, found = self.covered(head), list[Node]()
        for one in self.ancestors(node):
            if one.digest in known:
                break
            found.append(one)
        return found

    def beyond(self, node: Node, head: Node) -> list[Node]:
        """All known commits that ``node``'s lineage lists and ``head``'s does not: its chain, and
        what joins on it have taken in."""
        digests = self.covered(node) - self.covered(head)
        return [self.nodes[digest] for digest in sorted(digests)]

    def returned_share(self, head: Node, key: tuple[bytes, int], base: int) -> float:
        """Which share of a contribution made on version ``base`` goes back to its maker (rule 8).

        0 while it may still be listed on ``head``'s chain, 1 - clip once it is, 1 once it cannot
        be (nothing follows a final head). Where the chain down to ``base`` is not known, the
        last-seq table decides, and what it leaves open counts as listed: late is allowed, twice
        is not.
        """
        one = self.listing(head, key)
        if one is not None:
            return 1.0 - one.clip
        row = head.seqs.get(key[0])
        passed = row is not None and row.seq >= key[1]
        if self.oldest_known(head) > base + 1 and passed:
            return 0.0
        closed = head.version >= base + self.rules.staleness or self.final(head)
        return 1.0 if passed or closed else 0.0

    def oldest_known(self, head: Node) -> int:
        """The oldest version from which ``head``'s chain is known without a gap."""
        return min(node.version for node in self.ancestors(head))

    def prune(self, head: Node, keep: Iterable[bytes] = ()) -> list[bytes]:
        """Forget nodes beyond what memory holds, ``keep`` excepted; returns their digests."""
        chain = {node.digest for node in self.ancestors(head)}
        stays = {self.genesis.digest, head.digest, *keep}
        gone = doomed(list(self.nodes.values()), head, chain, stays)
        for digest in gone:
            self.cost -= self.nodes.pop(digest).cost
        if gone:
            self._changed()
        return gone

    def clear(self) -> None:
        """Forget all but version 0."""
        self.nodes = {self.genesis.digest: self.genesis}
        self.cost = self.genesis.cost
        self._changed()

    def overfull(self) -> bool:
        """Whether more is kept than memory should hold: :meth:`prune` helps."""
        return len(self.nodes) > NODES_MAX or self.cost > COST_MAX


def piece_tokens(pieces: Iterable[UnitPiece], sequence_tokens: int) -> int:
    """Tokens that the units of a contribution are worth."""
    return sum(p.stop - p.start for p in pieces) * sequence_tokens


def flip(digest: bytes) -> bytes:
    """Turn 'the lower digest wins' into 'the larger key wins'."""
    return digest.translate(_FLIPPED)
