"""Which lineage a set of commits tells, without anybody's head: fragment by fragment, a tree.

A peer chooses among heads as they come, with acks; whoever only has commits (a file of receipts, an
observer) has this. Commits are added oldest version first, each judged as a peer judges it. The
choice then follows from the set alone: a commit counts once a later one on top of it has another
home (rule 6 in the form that everybody sees), of such heads the better wins by the lineage's own
comparison (rule 10), and what its last home added alone comes on top. Equal sets, in whatever order
they were found, have equal lineages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.join import JOIN
from dugnad.averaging.lineage import Lineage, LineageRules, flip
from dugnad.averaging.node import Node
from dugnad.averaging.pruning import COST_MAX, VERSIONS_KEPT

NODES_MAX: Final = 200_000
"""Commits of one fragment in one tree, about a kilobyte each: two weeks of one every six
seconds, twice what a store gives as one lineage."""
KEPT_VERSIONS: Final = 64
"""Newest versions whose tables stay: a commit below them can only be added to a new tree
(:data:`LATE`). Readers of a file need one; a watcher whose receipts come late needs some. What was
listed stays as long as at a peer (:mod:`dugnad.averaging.pruning`), since joins are judged by it.
"""
NOT_LINKED: Final = "it is not linked: its parent is not there"
LATE: Final = "it is older than what this tree can still take: a new tree has to be made"

_MANY: Final = b"many"
"""Stands for several homes where one key would stand for one."""


@dataclass(frozen=True, slots=True)
class Row:
    """What of a commit decides where a set begins."""

    digest: bytes
    version: int
    parent: bytes
    tokens_total: int


@dataclass(frozen=True, slots=True)
class Start:
    """The commit (or version 0) on which the first commits of a set stand; itself not in it."""

    version: int
    digest: bytes


def row_of(digest: bytes, record: CommitRecord) -> Row:
    """The row of a commit."""
    header = record.header
    return Row(digest, header.version, header.parent, header.tokens_total)


def start_of(rules: LineageRules, rows: Iterable[Row]) -> Start:
    """Where the part of a set begins that leads to most tokens: version 0, unless the first
    versions of it are not there (receipts are kept for a week) or only of a lighter part.
    """
    known = {row.digest: row for row in rows}
    genesis = Start(0, Lineage(rules).genesis.digest)
    roots: dict[bytes, Start] = {}
    best: tuple[int, bytes] | None = None
    chosen = genesis
    for row in sorted(known.values(), key=lambda one: (one.version, one.digest)):
        below = roots.get(row.parent)
        if below is None:
            below = genesis if row.parent == genesis.digest else Start(row.version - 1, row.parent)
        roots[row.digest] = below
        key = (row.tokens_total, flip(row.digest))
        if best is None or key > best:
            best, chosen = key, below
    return chosen


class CommitTree:
    """One fragment's commits above a start. `add` in ascending order of version; then `chain`."""

    def __init__(self, rules: LineageRules, start: Start, kept: int = KEPT_VERSIONS) -> None:
        self.start = start
        self.newest = start.version
        self._lineage = Lineage(rules)
        self._kept = kept
        self._children: dict[bytes, list[bytes]] = {}
        self._versions: dict[int, list[bytes]] = {}
        self._homes: dict[bytes, bytes] = {}
        self._bare = start.version - 1
        """Nodes up to this version have lost their tables."""
        self._chain: list[bytes] = []
        """The lineage as it was told last: most of it stays."""
        self._forks: set[int] = set()
        self._heavy: deque[Node] = deque()
        """Nodes whose inputs are kept, in the order in which they came, ..."""
        self._cost = 0
        """... and what that costs."""
        self._whole = start.digest == self._lineage.genesis.digest
        if not self._whole:
            node = Node(start.digest, start.version, b"", 0, 0, (), {})
            self._lineage.nodes = {start.digest: node}

    @property
    def whole(self) -> bool:
        """Whether the set begins at version 0, so that all tables can be recomputed."""
        return self._whole

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._homes

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, digest: bytes) -> Node | None:
        """A node; below the kept versions it has no tables, and far below no inputs and record."""
        return self._lineage.get(digest)

    def add(self, digest: bytes, record: CommitRecord) -> str:
        """Take a commit (named by its digest) whose signatures hold; why it cannot be, or ''."""
        header = record.header
        if digest in self._homes:
            return "it is there already"
        if len(self._homes) >= NODES_MAX:
            return f"a fragment has more than {NODES_MAX} commits"
        parent = self._lineage.get(header.parent)
        if parent is None or header.parent == digest:
            return NOT_LINKED
        if parent.version <= self._bare:
            return LATE
        reason = self._lineage.judge(record, header.time_ms, tables=self._whole)
        if reason:
            return reason
        if not self._whole and header.tokens_total < parent.tokens_total:
            return "its token total is below its parent's"
        node = self._lineage.add(record, digest)
        if not self._whole:
            node.tokens_total = header.tokens_total  # what was before is not there to be counted
        self._link(node, header.home)
        return ""

    def _link(self, node: Node, home: bytes) -> None:
        self._homes[node.digest] = home
        siblings = self._children.setdefault(node.parent, [])
        siblings.append(node.digest)
        if len(siblings) > 1:
            self._forks.add(node.version - 1)
        self._versions.setdefault(node.version, []).append(node.digest)
        self.newest = max(self.newest, node.version)
        while self._bare < self.newest - self._kept - 1:
            self._bare += 1
            for digest in self._versions.get(self._bare, ()):
                self._strip(self._lineage.nodes[digest])
        self._heavy.append(node)
        self._cost += node.cost
        low = self.newest - VERSIONS_KEPT
        while self._heavy[0].version <= self._bare and (
            self._heavy[0].version < low or self._cost > COST_MAX
        ):
            self._lighten(self._heavy.popleft())

    def _strip(self, node: Node) -> None:
        """Forget the tables: only a child's judgement needs them."""
        node.seqs = {}
        if len(self._children.get(node.digest, ())) < 2:  # at a fork the members are the voters
            node.members, node.member_keys = (), frozenset()

    def _lighten(self, node: Node) -> None:
        """Forget the inputs, but which head a join took in."""
        self._cost -= node.cost
        node.listed = {}
        if node.record is not None and node.record.header.kind == JOIN:
            node.record = CommitRecord(node.record.header, ())
        else:
            node.record = None

    # -- the choice ----------------------------------------------------------------------------

    @property
    def head(self) -> bytes:
        """The newest commit of the lineage that this set tells; the start where it is empty."""
        low = min(self._forks, default=self.newest)
        order = [d for v in range(self.newest, low, -1) for d in self._versions.get(v, ())]
        if not self._forks:
            newest = self._versions.get(self.newest, [self.start.digest])
            return newest[0]
        base = self._base(low)
        settled = self._tournament(order, base, self._confirmed(order, base))
        return self._tournament(order, settled, set(self._leaves(order, settled)))

    def chain(self) -> tuple[bytes, ...]:
        """The lineage that this set tells, oldest first, without the start."""
        new: list[bytes] = []
        node, base = self._lineage.nodes[self.head], self.start.version + 1
        while node.version >= base:
            at = node.version - base
            if at < len(self._chain) and self._chain[at] == node.digest:
                break
            new.append(node.digest)
            node = self._lineage.nodes[node.parent]
        self._chain[node.version - base + 1 :] = reversed(new)
        return tuple(self._chain)

    def _base(self, low: int) -> bytes:
        """The one node at the version of the lowest fork."""
        return self.start.digest if low <= self.start.version else self._versions[low][0]

    def _confirmed(self, order: list[bytes], base: bytes) -> set[bytes]:
        """The newest nodes that another home built upon; `base` where there is none above it."""
        above: dict[bytes, bytes] = {}
        """Who are the homes of a node's descendants: none, one key, or many."""
        deeper: set[bytes] = set()
        """Nodes below which a confirmed one lies."""
        found: set[bytes] = set()
        for digest in (*order, base):
            homes: set[bytes] = set()
            for child in self._children.get(digest, ()):
                homes |= {self._homes[child], above.get(child, self._homes[child])}
                if child in found or child in deeper:
                    deeper.add(digest)
            if homes:
                above[digest] = homes.pop() if len(homes) == 1 else _MANY
            confirmed = digest in above and above[digest] != self._homes.get(digest)
            if digest not in deeper and (confirmed or digest == base):
                found.add(digest)
        return found

    def _leaves(self, order: list[bytes], root: bytes) -> Iterable[bytes]:
        """Nodes at or above `root` on which nothing stands."""
        inside = {root}
        for digest in (root, *reversed(order)):
            if digest != root and self._lineage.nodes[digest].parent not in inside:
                continue
            inside.add(digest)
            if digest not in self._children:
                yield digest

    def _tournament(self, order: list[bytes], base: bytes, targets: set[bytes]) -> bytes:
        """The best of `targets`, none of which stands on another: the youngest forks are decided
        first, and only the winner stands for its branch (as in `Lineage.best`).
        """
        winners: dict[bytes, bytes] = {}
        for digest in (*order, base):
            if digest in targets:
                winners[digest] = digest
                continue
            rivals = [winners[c] for c in self._children.get(digest, ()) if c in winners]
            if rivals:
                winners[digest] = self._best_at(digest, rivals)
        return winners[base]

    def _best_at(self, fork: bytes, rivals: list[bytes]) -> bytes:
        if len(rivals) == 1:
            return rivals[0]
        at = self._lineage.nodes[fork]

        def weight(digest: bytes) -> tuple[int, bytes]:
            node = self._lineage.nodes[digest]
            if not self._whole:
                return node.tokens_total, flip(digest)
            return self._lineage.weight_since(node, at), flip(digest)

        return max(rivals, key=weight)


def tell(
    rules: LineageRules, commits: Mapping[bytes, CommitRecord]
) -> tuple[Start, tuple[bytes, ...], dict[bytes, str]]:
    """Of a whole set in memory: where it begins, its lineage oldest first, and what of it does not
    fit, with the reasons. Signatures are not judged.
    """
    start = start_of(rules, (row_of(digest, one) for digest, one in commits.items()))
    tree, refused = CommitTree(rules, start, 1), dict[bytes, str]()
    for digest, record in sorted(commits.items(), key=lambda row: (row[1].header.version, row[0])):
        if reason := tree.add(digest, record):
            refused[digest] = reason
    return start, tree.chain(), refused
