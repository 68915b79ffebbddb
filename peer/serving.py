"""What this daemon gives to others who pull: manifest, payloads, anchors, shards, history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS
from dugnad.averaging.worker import Commit
from dugnad.dht.ids import PeerId
from dugnad.peer import clock
from dugnad.peer.corpus import CorpusError
from dugnad.peer.lentstates import LENT_S, LentStates
from dugnad.peer.manifest import encode_manifest
from dugnad.peer.newswire import encoded_news
from dugnad.peer.store import StoreError

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

DIGESTS_S: Final = 5.0
"""Names of commits are served from memory for so long."""
NEWS_S: Final = 1.0
"""And the same news to all observers."""


class Serving:
    """The donor side of one daemon; ``shard``, ``block`` and ``commits`` block and are called in
    threads."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._manifest = encode_manifest(daemon.manifest)
        self._digests: dict[int, tuple[int, float, list[bytes]]] = {}
        self._news: tuple[float, bytes] | None = None
        self._lent = LentStates()
        self._sweep: asyncio.TimerHandle | None = None

    async def contribution_in(
        self, made: fm.Contribution, pieces: tuple[fm.UnitPiece, ...], payload: bytes
    ) -> str:
        """A contribution for a fragment whose home this peer is; why it is refused, or ''."""
        daemon = self.daemon
        if not daemon.manifest.admits(PeerId(made.peer)):
            return "this run does not admit its maker"
        if refusal := daemon.orders.refusal(PeerId(made.peer)):
            return refusal
        return await daemon.averager.contribution_in(made, pieces, payload)

    def manifest(self) -> bytes | None:
        """The manifest as the run id names it."""
        return self._manifest

    def heads(self) -> tuple[fm.HeadRow, ...]:
        """The heads of all fragments, those of version 0 included."""
        heads = [shell.core.head for shell in self.daemon.averager.fragments]
        return tuple(fm.HeadRow(p, head.version, head.digest) for p, head in enumerate(heads))

    def news(self) -> bytes | None:
        """Who is here and how the run stands; made at most once a second."""
        now = clock.now()
        if self._news is None or now - self._news[0] >= NEWS_S:
            self._news = (now, encoded_news(self.daemon))
        return self._news[1]

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        """A commit's payload."""
        return self.daemon.averager.commit(fragment, digest)

    def anchor(self, fragment: int, digest: bytes) -> AnchorState | None:
        """The anchors after a commit."""
        held, now = self.daemon.averager.anchor(fragment, digest), clock.now()
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(LENT_S, self._let_go)
        return self._lent.find(fragment, digest, held, now)

    def _let_go(self) -> None:
        self._sweep = None
        self._lent.sweep(clock.now())
        if len(self._lent):
            self._sweep = asyncio.get_running_loop().call_later(LENT_S, self._let_go)

    def shard(self, number: int) -> bytes | None:
        """A shard of the data."""
        if not 0 <= number < len(self.daemon.manifest.data.index.hashes):
            return None
        try:
            return self.daemon.shards.get(number)
        except (CorpusError, OSError):
            return None

    def block(self, name: bytes) -> bytes | None:
        """The tokens of a prepared unit, made again from the text that is here: a block costs a few
        reads, and nothing is held for it."""
        return self.daemon.preparer.block(name)

    def commits(self, fragment: int, digest: bytes, count: int) -> tuple[fm.CommitRecord, ...]:
        """A commit and its ancestors, newest first."""
        if not 0 <= fragment < len(self.daemon.averager.fragments):
            return ()
        lineage = self.daemon.averager.fragments[fragment].core.view.lineage
        found: list[fm.CommitRecord] = []
        while len(found) < count:
            node = lineage.get(digest)
            record = node.record if node is not None else self.daemon.store.commit_now(digest)
            if record is None or record.header.fragment != fragment:
                break
            found.append(record)
            digest = record.header.parent
        return tuple(found)

    def digests(self, fragment: int, since_ms: int) -> Sequence[bytes]:
        """Names of the kept commits of a fragment since a time, read at most once in five seconds:
        one reconciliation asks several times.
        """
        if not 0 <= fragment < len(self.daemon.averager.fragments):
            return ()
        now = clock.now()
        kept = self._digests.get(fragment)
        if kept is not None and kept[0] == since_ms and now - kept[1] < DIGESTS_S:
            return kept[2]
        try:
            names = self.daemon.store.digests_now(fragment, since_ms)
        except StoreError:
            return ()
        self._digests[fragment] = (since_ms, now, names)
        return names

    def statement_names(self) -> Sequence[bytes]:
        """Names of the statements that are held, ascending."""
        return self.daemon.statements.held.names()

    def statements(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """The statements of these names that are held."""
        return self.daemon.statements.held.get(names)

    def size_of(self, fragment: int, codec: str) -> int | None:
        """Bytes of a contribution of ``fragment`` in ``codec``, or None."""
        sizes = self.daemon.manifest.table.sizes
        if not 0 <= fragment < len(sizes) or codec not in CODECS:
            return None
        return CODECS[codec].encoded_size(sizes[fragment])
