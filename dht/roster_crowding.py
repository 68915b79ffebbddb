"""From mesh to crowd and back: the part of the roster that keeps a swarm of any size in view.

Up to `mesh_max` peers hold a stream with everybody, and this part only counts. When a peer counts
more it goes over to the crowd (`roster_crowd`), and so does whoever hears a peer of a crowd speak
of more than three quarters of `mesh_max`; spare streams end in peace. When no more than those
three quarters are left for a minute, each dials all others again: two bounds and a delay, so that
a swarm on the border does not flap.

The control streams, their hellos and heartbeats stay what they are, and `roster_liveness` goes on
to judge them; what it finds becomes events of the crowd's core. A peer counts as here when either
our own stream or the crowd says so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Final

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import FULL, Adverts, Gone, Talk, WantAdverts
from dugnad.dht.roster_crowdlife import CrowdLife
from dugnad.dht.roster_events import Action, Note
from dugnad.dht.roster_gossip import Gossip
from dugnad.dht.roster_liveness import Liveness
from dugnad.dht.roster_own import Own
from dugnad.dht.roster_presence import Presence
from dugnad.dht.roster_table import Entry, Table

DOWN_S: Final = 60.0
"""So few are left for so long: a mesh again. Those that restart are back by then."""
FADE_S: Final = 20.0
"""Back in the mesh, the crowd's word is believed for so long: two dials of the slowest kind."""
ALONE_S: Final = 15.0
"""Without any stream for so long the crowd's word is too old to be believed."""


class Crowding:
    """Owns the crowd while there is one. Appends to `out`; its owner calls `settle`."""

    def __init__(
        self,
        own: Own,
        table: Table,
        liveness: Liveness,
        gossip: Gossip,
        out: list[Action],
        rng: random.Random,
    ) -> None:
        self._own = own
        self._table = table
        self._liveness = liveness
        self._gossip = gossip
        self._out = out
        self._rng = rng
        self._presence = Presence(own, table, out)
        self.life: CrowdLife | None = None
        self._few_since: float | None = None
        self._alone_since: float | None = None
        self._fade_at: float | None = None

    # --- questions

    @property
    def up(self) -> dict[PeerId, Advert]:
        """Who was told to be up, with the advert that was told."""
        return self._presence.up

    def advert(self, peer: PeerId) -> Advert | None:
        """The newest advert that a member of the crowd proved itself with."""
        member = self.life.members.of(peer) if self.life is not None else None
        return member.advert if member is not None else None

    def member(self, peer: PeerId) -> bool:
        """Whether the crowd sees to a peer: nobody else dials it."""
        if self.life is None or not self._own.crowded:
            return False
        member = self.life.members.of(peer)
        return member is not None and member.gone is None

    def deadlines(self) -> Iterator[float]:
        """When `settle` has something to do."""
        if self.life is None:
            return
        if self._fade_at is not None:
            yield self._fade_at
            return
        yield from self.life.deadlines()
        if self._few_since is not None:
            yield self._few_since + DOWN_S
        if self._alone_since is not None:
            yield self._alone_since + ALONE_S

    # --- events

    def message(
        self, entry: Entry, message: Talk | WantAdverts | Adverts, now: float
    ) -> str | None:
        """A message of the crowd on an established stream; the fault for which to refuse it."""
        if isinstance(message, Talk) and not self._own.crowded:
            self._invited(message, entry, now)
        if self.life is None or not self._own.crowded:
            return None
        return self.life.message(entry, message, now)

    def _invited(self, talk: Talk, entry: Entry, now: float) -> None:
        """A peer of a crowd speaks to one of a mesh."""
        config = self._own.config
        if config.links and talk.members > config.mesh_low:
            self._begin(now)
        elif talk.kind == FULL:  # it needs no stream with us: tried again later, as any peer
            self._liveness.part(entry, "it has neighbours enough", now, again=True)

    def settle(self, now: float) -> None:
        """After everything else of an event: links, dials, rumours, and what is to be told."""
        if self.life is None:
            self._presence.mesh()
            if self._wanted():
                self._begin(now)
        if self.life is not None:
            self._settle(self.life, now)
        self._presence.done()

    def _settle(self, life: CrowdLife, now: float) -> None:
        ended = self._presence.intercept()
        if self._own.crowded:
            life.act(now)
            self._size_up(life, now)
        elif self._fade_at is not None:
            for peer in ended:
                self._ended_in_mesh(life, peer)
            if self._fade_at <= now:
                self._end("not reached after the crowd became a mesh")
        self._presence.tell(self.life.members if self.life is not None else None, now)

    def judge_again(self, peers: Iterable[PeerId]) -> None:
        """Whether these are admitted has changed."""
        if self.life is not None:
            for peer in peers:
                self._presence.touch(peer)

    def jumped(self, now: float) -> None:
        """We stood still: nobody is lost by what we did not hear meanwhile."""
        if self.life is not None:
            self.life.jumped(now)
        if self._alone_since is not None:
            self._alone_since = now

    def leave(self) -> None:
        """Signed word that we go, to each neighbour."""
        if self.life is not None and self._own.crowded:
            self.life.leave()
            self._own.crowded = False

    # --- from mesh to crowd and back

    def _wanted(self) -> bool:
        config = self._own.config
        return config.links > 0 and len(self.up) + 1 > config.mesh_max and not self._own.leaving

    def _begin(self, now: float) -> None:
        """The swarm is a crowd: everybody known is a member, all streams are links."""
        if self.life is None:
            self._presence.mesh()
        self._fade_at = self._few_since = self._alone_since = None
        self._own.crowded = True
        self.life = CrowdLife(
            self._own,
            self._table,
            self._liveness,
            self._gossip,
            self._presence,
            self._out,
            self._rng,
        )
        many = len(self.up) + 1
        self.life.start(self.up, now, whole=many > self._own.config.mesh_low)
        for entry in self._table:
            self._liveness.crowded(entry, now)
        self._out.append(Note("crowd", f"{many} peers: streams with some of them"))

    def _size_up(self, life: CrowdLife, now: float) -> None:
        """Whether the crowd is a mesh again, or we are out of it."""
        few = len(self.up) + 1 <= self._own.config.mesh_low
        life.core.roomy = few
        self._few_since = (self._few_since if self._few_since is not None else now) if few else None
        if life.core.links:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        if self._alone_since is not None and now >= self._alone_since + ALONE_S:
            self._end("no neighbour is left")
        elif self._few_since is not None and now >= self._few_since + DOWN_S:
            self._become_mesh(life, now)

    def _become_mesh(self, life: CrowdLife, now: float) -> None:
        """Everybody is dialled; until they had time to answer the crowd's word counts, too."""
        self._own.crowded = False
        self._fade_at = now + FADE_S
        for _, member in life.members.here():
            entry = self._table.ensure(member.advert.peer, now)
            if entry is None:
                continue
            self._gossip.adopt_quietly(entry, member.advert)
            stream = entry.main()
            if stream is not None:
                self._gossip.catch_up(entry, stream, now)
            else:
                self._liveness.named(entry, now)
        self._out.append(Note("crowd", f"{len(self.up) + 1} peers: streams with all of them"))

    def _ended_in_mesh(self, life: CrowdLife, peer: PeerId) -> None:
        """While the crowd fades, who ends in the mesh has ended."""
        member, entry = life.members.of(peer), self._table.get(peer)
        if member is not None and (entry is None or not entry.counted):
            member.gone = Gone(peer, member.advert.incarnation, self._own.peer)

    def _end(self, reason: str) -> None:
        """Nothing but our own streams counts any more."""
        self._own.crowded = False
        self.life = None
        self._fade_at = self._few_since = self._alone_since = None
        for peer in self.up:
            self._presence.touch(peer, reason)
