"""An observer among the peers of a run: whom it reaches, what they tell, which receipts it lacks.

It opens pull streams, as whoever fetches something does, and no control stream: nobody counts it,
waits for it or sends it work. What it is told of others it checks: adverts and receipts carry their
makers' signatures.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.formats import CommitRecord, HeadRow, header_digest
from dugnad.averaging.statements import StatementSet
from dugnad.dht.addresses import parse_address
from dugnad.dht.advert import Advert, advert_fault, verify_advert
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import AddressBook, DialError, Transport, TransportError
from dugnad.dht.records import verify_ed25519
from dugnad.peer.addressbook import SHARDS, look_up
from dugnad.peer.clock import wall_ms
from dugnad.peer.newswire import News
from dugnad.peer.pull import Puller, PullError
from dugnad.peer.receiptsync import SyncResult, judged, keep_connected, sync_fragment
from dugnad.peer.sightings import Change, Event, Known, Named, Sightings, Silent, Told
from dugnad.peer.statementsync import keep_statements, stored_statements, take_statements
from dugnad.peer.storethread import StoreThread
from dugnad.peer.transferwire import COMMITS_MAX, Traffic

DIAL_S: Final = 5.0
HISTORY_MAX: Final = 20_000
"""Commits of a fragment fetched in one walk down from a head; the exchange of receipts, which
compares the last days, brings the rest."""
SHARDS_A_LOOK: Final = 4
"""Shards of the address book read in one look."""
ADVERTS_MAX: Final = 1024
"""Adverts remembered as verified: as many as peers."""


class Scout:
    """Asks the peers of one run. Belongs to one event loop; the store has its own thread.

    `on_change` hears who came and went.
    """

    def __init__(
        self,
        transport: Transport,
        book: AddressBook,
        store: StoreThread,
        rules: CreditRules,
        clock: Callable[[], float],
        on_change: Callable[[Change], None],
    ) -> None:
        self.sightings = Sightings()
        self.news: dict[PeerId, News] = {}
        """What each peer told last; of those that are here."""
        self.fresh = False
        """Whether receipts came since somebody looked."""
        self._transport, self._book = transport, book
        self._store, self._rules = store, rules
        self.traffic = Traffic()
        self._puller = Puller(transport, rules.run, traffic=self.traffic)
        self._clock, self._on_change = clock, on_change
        self._places: dict[PeerId, tuple[str, ...]] = {}
        self._verified: dict[PeerId, Advert] = {}
        self._fetching: set[tuple[int, bytes]] = set()
        self._versions = [0] * rules.fragments
        self._rng = random.Random()  # which peer is asked for receipts; nothing depends on it
        self._fragment = 0
        self._shard = 0
        self._statements = StatementSet(rules.run, lambda peer: peer in self._listed)
        self._listed: frozenset[PeerId] = frozenset()

    def know(self, address: str) -> None:
        """An address that a link, or an earlier life, names."""
        try:
            peer = parse_address(address).peer
        except ValueError:
            return
        if peer is not None:
            self._places[peer] = (*self._places.get(peer, ()), address)
            self.tell(Known(peer))

    def holds(self, versions: Sequence[int], listed: Iterable[PeerId]) -> None:
        """The newest versions that are here (what is above them is asked for), and the peers that
        have receipts: others have little to say.
        """
        self._versions, self._listed = list(versions), frozenset(listed)

    def tell(self, event: Event) -> None:
        """Something was seen or heard."""
        for change in self.sightings.handle(event, self._clock()):
            self._on_change(change)
        seen = self.sightings.peers
        self.news = {p: one for p, one in self.news.items() if p in seen and seen[p].here}

    # -- asking --------------------------------------------------------------------------------

    async def ask(self, peer: PeerId) -> None:
        """Ask one peer who is here and where it stands; fetch the receipts that lead there."""
        try:
            try:
                news, heads = await self._answers(peer)
            except PullError:  # once is an accident: it may have been busy
                news, heads = await self._answers(peer)
        except (PullError, TransportError) as error:
            self.tell(Silent(peer, _why(error)))
            return
        adverts = self._true(news.adverts if news is not None else ())
        self.tell(Told(peer, adverts, news.left if news is not None else ()))
        if news is not None:
            self.news[peer] = news
        for row in heads:
            if row.version and 0 <= row.fragment < self._rules.fragments:
                await self._follow(peer, row)

    async def _answers(self, peer: PeerId) -> tuple[News | None, tuple[HeadRow, ...]]:
        """What a peer tells and its heads. PullError, TransportError."""
        await self._transport.dial(peer, self._addresses(peer), DIAL_S)
        return await self._news(peer), await self._puller.heads([peer])

    async def _news(self, peer: PeerId) -> News | None:
        """None of a peer of an older version, which knows no such request. PullError of one that
        told some before.
        """
        try:
            return await self._puller.news(peer)
        except PullError as error:
            if peer in self.news or any(one.lied for one in error.blame):
                raise
            return None

    def _addresses(self, peer: PeerId) -> list[str]:
        advert = self.sightings.peers[peer].advert if peer in self.sightings.peers else None
        said = advert.addresses if advert is not None else ()
        return list(dict.fromkeys([*self._places.get(peer, ()), *said]))

    def _true(self, adverts: Iterable[Advert]) -> tuple[Advert, ...]:
        """Those that their makers signed for this run."""
        found: list[Advert] = []
        for advert in adverts:
            known = self._verified.get(advert.peer)
            if known != advert:
                if advert_fault(advert) or not verify_advert(
                    advert, self._rules.run, verify_ed25519
                ):
                    continue
                self._verified.pop(advert.peer, None)
                self._verified[advert.peer] = advert
                while len(self._verified) > ADVERTS_MAX:
                    del self._verified[next(iter(self._verified))]
            found.append(advert)
        return tuple(found)

    # -- receipts ------------------------------------------------------------------------------

    async def _follow(self, peer: PeerId, row: HeadRow) -> None:
        """Fetch what leads from a head down to what is held. StoreError for the own disk."""
        key = (row.fragment, row.digest)
        if key in self._fetching or await self._held(row.digest):
            return
        self._fetching.add(key)
        try:
            fetched = await self._walk(peer, row)
        finally:
            self._fetching.discard(key)
        kept = await self._store.call(lambda store: keep_connected(store, row.fragment, fetched))
        self.fresh = self.fresh or kept > 0

    async def _walk(self, peer: PeerId, row: HeadRow) -> dict[bytes, CommitRecord]:
        """The commits from a head down to one that is held, those that are true; none below the
        first that is not.
        """
        found: dict[bytes, CommitRecord] = {}
        digest, due = row.digest, max(row.version - self._versions[row.fragment], 1)
        while len(found) < HISTORY_MAX:
            try:
                page = await self._puller.commits(
                    [peer], row.fragment, digest, min(due, COMMITS_MAX)
                )
            except PullError:
                break  # what is here so far may be linked all the same
            for commit in page:
                sound, fault = await asyncio.to_thread(judged, commit, self._rules)
                if fault:
                    self.tell(Silent(peer, f"a receipt of it is refused: {fault}"))
                    return found
                found[header_digest(commit.header, self._rules.run)] = sound
            last = page[-1].header
            digest, due = last.parent, COMMITS_MAX
            if last.version == 1 or await self._held(digest):
                break
        return found

    async def _held(self, digest: bytes) -> bool:
        return await self._store.call(lambda store: store.commit(digest)) is not None

    async def compare(self) -> SyncResult | None:
        """Compare the receipts of the next fragment with a random peer; None: nobody is there."""
        peers = self.sightings.answering()
        if not peers:
            return None
        peer, fragment = self._rng.choice(peers), self._fragment
        self._fragment = (fragment + 1) % self._rules.fragments
        got = await sync_fragment(self._puller, self._store, self._rules, peer, fragment)
        self.fresh = self.fresh or got.kept > 0
        return got

    async def compare_statements(self) -> str:
        """Take the statements that a random peer holds; its fault, or ''."""
        peers = self.sightings.answering()
        if not peers:
            return ""
        held = self._statements
        if not held.changes:  # what an earlier life kept
            now = wall_ms()
            for record in await self._store.call(stored_statements):
                held.take(record, now)
        before = held.changes
        try:
            fault = await take_statements(held, self._puller, self._rng.choice(peers), self._rng)
        except PullError as error:
            fault = error.reason
        if held.changes != before:
            await self._store.call(lambda store: keep_statements(store, held))
            self.fresh = True
        return fault

    async def look_up(self) -> None:
        """Read the next shards of the run's entries in the address book."""
        for _ in range(SHARDS_A_LOOK):
            self._shard = (self._shard + 1) % SHARDS
            self.tell(Named(tuple(await look_up(self._book, self._rules.run, self._shard))))


def _why(error: PullError | TransportError) -> str:
    """Why a peer did not answer, in a few words."""
    if isinstance(error, DialError):
        return "; ".join(why for _, why in error.reasons) or "no address of it is known"
    if isinstance(error, PullError):
        return error.reason
    return str(error)
