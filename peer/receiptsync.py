"""Receipts that others hold and this peer lacks: found by ranges of hashes, pulled, judged, kept.

Each peer asks a random live one now and then, one fragment at a time, so that all end with the same
commits. What comes is judged alone (`receiptcheck`) and must hang together with what is here. It
changes no head: which lineage counts, and so the board, stays the exchange's matter.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.formats import CommitRecord, header_digest
from dugnad.averaging.receiptcheck import commit_reason, with_true_acks
from dugnad.averaging.reconcile import Reconciliation
from dugnad.dht.ids import PeerId, short
from dugnad.dht.records import verify_ed25519
from dugnad.peer import clock
from dugnad.peer.pull import Puller, PullError
from dugnad.peer.store import Store, StoreError
from dugnad.peer.storethread import StoreThread
from dugnad.peer.transferwire import COMMITS_MAX

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

WINDOW_DAYS: Final = 6
"""Commits of so many days are compared. Full lists are kept for seven, so nobody misses what
another has just forgotten; whole days, so that two clocks ask for the same."""
FORKS_MAX: Final = 1024
"""Commits of a fragment kept beyond one for each version: anybody can sign any number of headers,
and a swarm that forks so often has other worries."""
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What one look at one fragment of one peer brought. ``fault``: why the peer was not heard."""

    found: int = 0
    kept: int = 0
    rounds: int = 0
    complete: bool = False
    fault: str = ""


def window_start(wall_ms: int) -> int:
    """The first moment whose commits are compared at this one."""
    return max(0, (wall_ms // _DAY_MS - WINDOW_DAYS) * _DAY_MS)


async def sync_fragment(
    puller: Puller, store: StoreThread, rules: CreditRules, peer: PeerId, fragment: int
) -> SyncResult:
    """Pull from `peer` the commits of `fragment` that are not here. StoreError for the own disk."""
    since = window_start(clock.wall_ms())
    own = await store.call(lambda one: one.digests(fragment, since))
    search = Reconciliation(own)
    try:
        while asked := search.request():
            told = await puller.summaries(peer, fragment, since, asked)
            fault = search.answer(told)
            if fault:
                return SyncResult(rounds=search.rounds, fault=fault)
        fetched, fault = await _fetch(puller, rules, peer, fragment, search.missing)
    except PullError as error:
        return SyncResult(len(search.missing), rounds=search.rounds, fault=error.reason)
    kept = await store.call(lambda one: keep_connected(one, fragment, fetched))
    return SyncResult(len(search.missing), kept, search.rounds, search.complete, fault)


async def _fetch(
    puller: Puller, rules: CreditRules, peer: PeerId, fragment: int, missing: list[bytes]
) -> tuple[dict[bytes, CommitRecord], str]:
    """The missing commits that are true, by digest; and the first fault, at which it ends."""
    wanted, found = set(missing), dict[bytes, CommitRecord]()
    for name in missing:
        if name in found:
            continue
        count = min(COMMITS_MAX, len(wanted) - len(found))
        commits = await puller.commits([peer], fragment, name, count)
        for commit in commits:
            digest = header_digest(commit.header, rules.run)
            if digest in found or digest not in wanted:
                continue
            sound, fault = await asyncio.to_thread(judged, commit, rules)
            if fault:
                return found, f"a commit of it is refused: {fault}"
            found[digest] = sound
    return found, ""


def judged(commit: CommitRecord, rules: CreditRules) -> tuple[CommitRecord, str]:
    """The commit with the acks that hold, and why it cannot be kept, or ''."""
    run, now = rules.run, clock.wall_ms()
    if fault := commit_reason(commit, run, rules.sequence_tokens, verify_ed25519, now):
        return commit, fault
    return with_true_acks(commit, run, verify_ed25519), ""


def keep_connected(store: Store, fragment: int, fetched: dict[bytes, CommitRecord]) -> int:
    """Keep what hangs together with what is here, while there is room for forks; how many are
    new.
    """
    held = set(store.digests(fragment, 0))
    chosen = connected(held, fetched)
    room = FORKS_MAX + store.versions(fragment) - len(held)
    versions = {commit.header.version for commit in chosen.values()}
    room += len(versions)
    return store.add_commits(list(chosen.items())[: max(room, 0)])


def connected(
    held: Iterable[bytes], fetched: dict[bytes, CommitRecord]
) -> dict[bytes, CommitRecord]:
    """Those of `fetched`, oldest first, that follow version 0 or a held commit, directly or through
    each other; all where nothing is held. What lies below the held ones is the ledger's to fetch,
    which walks down the chain by its digests.
    """
    known = set(held)
    order = sorted(fetched.items(), key=lambda row: (row[1].header.version, row[0]))
    if not known:
        return dict(order)
    chosen: set[bytes] = set()
    for digest, commit in order:
        if commit.header.version == 1 or commit.header.parent in known:
            known.add(digest)
            chosen.add(digest)
    return {digest: commit for digest, commit in order if digest in chosen}


class ReceiptSync:
    """The duty of one daemon: one fragment of one live peer at each call."""

    def __init__(self, daemon: Daemon, rng: random.Random) -> None:
        self._daemon = daemon
        self._rng = rng
        self._fragment = 0
        self._busy = False
        self.kept = 0
        """Commits that came this way since the start."""

    async def once(self) -> None:
        """Look at the next fragment of a random peer; what goes wrong is noted."""
        daemon, puller = self._daemon, self._daemon.swarm.puller
        live = list(daemon.averager.live())
        if self._busy or puller is None or not live:
            return
        peer, rules = self._rng.choice(live), daemon.ledger.fold.rules
        fragment, self._fragment = self._fragment, (self._fragment + 1) % rules.fragments
        self._busy = True
        try:
            got = await sync_fragment(puller, daemon.store, rules, peer, fragment)
        except StoreError as error:
            daemon.note("disk", f"{error.reason}; {error.fix}")
            return
        finally:
            self._busy = False
        self.kept += got.kept
        if got.fault:
            daemon.note("receipts", f"{short(peer)} gave no receipts: {got.fault}")
