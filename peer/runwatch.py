"""A run as its receipts alone tell it: lineages, credit and what is new, read out of a store.

For whoever has no exchange of its own: an observer, whose store others' receipts come into, and a
page made of what lies on this machine's disk. Everything here is called in the store's thread and
gives values that nobody changes afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dugnad.averaging.board import Board
from dugnad.averaging.committree import (
    KEPT_VERSIONS,
    LATE,
    NOT_LINKED,
    CommitTree,
    Start,
    row_of,
    start_of,
)
from dugnad.averaging.credit import UNDO_MAX
from dugnad.averaging.creditchain import CreditError
from dugnad.averaging.dispute import Said
from dugnad.averaging.foldstate import FoldState
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.setboard import PAGE, fold_from
from dugnad.dht.ids import RunId
from dugnad.dht.records import RecordError
from dugnad.peer.assembly import credit_rules, lineage_rules
from dugnad.peer.manifest import Manifest
from dugnad.peer.statementsync import stored_said, stored_statements
from dugnad.peer.store import Store

BACK: Final = UNDO_MAX - 2
"""Commits handed to the fold when the lineage was switched: as far as it can undo."""
MERGES_MAX: Final = 20_000
"""Merges told of at once, the newest: a start with a long history; older ones are in no chart."""


@dataclass(frozen=True, slots=True)
class Merge:
    """A version of a fragment that came since the last look."""

    fragment: int
    node: Node
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands by its receipts. `chains`: each fragment's newest versions, by number."""

    board: Board
    merges: tuple[Merge, ...]
    """What is new, in the order of commit time."""
    chains: tuple[Mapping[int, Node], ...]
    settled: tuple[int, ...]
    starts: tuple[int, ...]
    """Versions on which the receipts begin; 0 where all are there."""

    @property
    def versions(self) -> list[int]:
        """The newest version of each fragment."""
        return [max(chain, default=start) for chain, start in self._parts()]

    @property
    def heads(self) -> list[Node | None]:
        """The head of each fragment; None where it is not known."""
        return [chain[max(chain)] if chain else None for chain in self.chains]

    def _parts(self) -> Iterator[tuple[Mapping[int, Node], int]]:
        return zip(self.chains, self.starts, strict=True)


class RunWatch:
    """Follows one store. `refresh` again and again, always in the store's thread."""

    def __init__(self, manifest: Manifest, run: RunId) -> None:
        self._credit = credit_rules(manifest, run)
        self._rules = [lineage_rules(manifest, run, p) for p in range(self._credit.fragments)]
        self._trees = [
            CommitTree(one, Start(0, Lineage(one).genesis.digest)) for one in self._rules
        ]
        self._starts: list[Start] = [tree.start for tree in self._trees]
        self._fold = fold_from(self._credit, self._starts)
        self._base: FoldState | None = None
        """What a peer kept of receipts that were forgotten since."""
        self._row = 0
        self._chains: list[tuple[bytes, ...]] = [()] * len(self._rules)
        self._told = [0] * len(self._rules)
        self._stated: tuple[bytes, ...] = ()
        self._said = Said()

    def refresh(self, store: Store) -> Standing | None:
        """How the run stands with what came since the last time; None when nothing came."""
        said = self._read_statements(store)
        changed = self._take(store)
        if not changed and not said:
            return None
        for p in changed:
            self._chains[p] = self._trees[p].chain()
        chains = self._chains
        starts = [tree.start for tree in self._trees]
        if starts == self._starts:
            try:
                for p in changed:
                    self._follow(store, p, chains[p])
            except CreditError:  # another lineage was chosen, further back than can be undone
                self._fold_anew(store, starts, chains)
        else:
            self._fold_anew(store, starts, chains)
        return Standing(
            board=self._fold.board(self._said),
            merges=self._news(store, chains),
            chains=tuple(map(self._newest, self._trees, chains)),
            settled=tuple(self._fold.settled(p) for p in range(len(chains))),
            starts=tuple(start.version for start in starts),
        )

    def keep(self, store: Store, now_ms: int) -> None:
        """Keep the base of the fold, then forget receipts that are older than a week."""
        store.save_fold(self._fold.snapshot())
        store.prune(now_ms)

    def holds(self, fragment: int, digest: bytes) -> bool:
        """Whether a commit is in the tree of its fragment."""
        return digest in self._trees[fragment]

    def _read_statements(self, store: Store) -> bool:
        """Read what is said of peers, besides receipts; whether that has changed."""
        try:
            stated = stored_statements(store)
            if stated == self._stated:
                return False
            self._stated, self._said = stated, stored_said(store, self._credit.run)
        except RecordError:
            return False  # damaged: whoever keeps them says so
        return True

    def _take(self, store: Store) -> set[int]:
        """Take the new commits into the trees; the fragments that they are of."""
        late: set[int] = set()
        came: set[int] = set()
        if not self._row:
            self._base = store.load_fold()
        while rows := store.commits_after(self._row):
            for row, digest, commit in rows:
                self._row = row
                p = commit.header.fragment
                if p >= len(self._trees):
                    continue
                came.add(p)
                if p in late:
                    continue
                if self._trees[p].add(digest, commit) in (NOT_LINKED, LATE):
                    late.add(p)
        for p in sorted(late):
            self._trees[p] = self._planted(store, p)
        return came

    def _planted(self, store: Store, p: int) -> CommitTree:
        """The tree of all that the store has of a fragment."""
        start = start_of(self._rules[p], (row_of(*row) for row in store.commits(p)))
        if start.version and self._base is not None and p < len(self._base.fragments):
            kept = self._base.fragments[p]
            if kept.version > start.version:
                start = Start(kept.version, kept.digest)
        tree = CommitTree(self._rules[p], start)
        for digest, commit in store.commits(p):
            tree.add(digest, commit)
        return tree

    def _follow(self, store: Store, p: int, chain: Sequence[bytes]) -> None:
        version, digest = self._fold.tip(p)
        at = version - self._starts[p].version
        shared = at == 0 or (at <= len(chain) and chain[at - 1] == digest)
        first = at if shared else max(min(at, len(chain)) - BACK, 0)
        for begin in range(first, len(chain), PAGE):
            names = chain[begin : begin + PAGE]
            self._fold.follow(p, [(name, self._record(store, p, name)) for name in names])

    def _fold_anew(
        self, store: Store, starts: list[Start], chains: Sequence[Sequence[bytes]]
    ) -> None:
        self._starts = starts
        self._fold = fold_from(self._credit, starts, self._base)
        for p, chain in enumerate(chains):
            self._follow(store, p, chain)

    def _record(self, store: Store, p: int, digest: bytes) -> CommitRecord:
        node = self._trees[p].get(digest)
        record = node.record if node is not None else None
        record = record if record is not None else store.commit(digest)
        if record is None:
            raise CreditError("a receipt was forgotten meanwhile")
        return record

    def _news(self, store: Store, chains: Sequence[Sequence[bytes]]) -> tuple[Merge, ...]:
        found: list[Merge] = []
        most = MERGES_MAX // len(chains)
        for p, chain in enumerate(chains):
            new = chain[max(self._told[p] - self._trees[p].start.version, 0) :]
            for digest in new[-most:]:
                node, record = self._trees[p].get(digest), self._record(store, p, digest)
                assert node is not None, "a chain is of nodes"
                found.append(Merge(p, replace(node), record))
            self._told[p] = max(self._told[p], self._trees[p].start.version + len(chain))
        return tuple(sorted(found, key=lambda one: (one.node.time_ms, one.fragment)))

    @staticmethod
    def _newest(tree: CommitTree, chain: Sequence[bytes]) -> Mapping[int, Node]:
        """Copies, since the tree strips its nodes while others read these."""
        nodes = (tree.get(digest) for digest in chain[-KEPT_VERSIONS:])
        return {node.version: replace(node) for node in nodes if node is not None}
