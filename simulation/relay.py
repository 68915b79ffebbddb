"""Messages that all should hear, in a simulated crowd: from neighbour to neighbour, each once.

As the daemon's: what a core found good goes on, claims are signed by their maker, heads compared
with neighbours only. What is meant for one peer goes to it directly (it is dialled for that).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dugnad.averaging import formats as fm
from dugnad.averaging.passing import Passing, name_of_message, sign_claims
from dugnad.dht.ids import PeerId
from dugnad.simulation.people import SimPeer, SimSigner, seal
from dugnad.simulation.settings import RUN, WALL_START_S

if TYPE_CHECKING:
    from dugnad.simulation.fates import Fates


class Relay:
    """What each simulated peer has passed on."""

    def __init__(self, stage: Fates) -> None:
        self.stage = stage
        self.passed = 0
        """Messages sent on, by all."""
        self._passing: dict[tuple[PeerId, int], Passing] = {}

    def of(self, sim: SimPeer) -> Passing:
        """One life's memory."""
        return self._passing.setdefault((sim.peer, sim.born), Passing())

    def begin(self, sim: SimPeer, message: fm.Message) -> fm.Message:
        """The form in which a peer's own message goes to its neighbours."""
        if isinstance(message, fm.Claims):
            message = sign_claims(message.units, self._wall_ms(), RUN, SimSigner(sim.peer))
        self.of(sim).take(name_of_message(message))
        return message

    def read(self, sender: PeerId, to: PeerId, message: fm.Message, p: int) -> None:
        """A message from a neighbour, when its reader is awake."""
        sim = self.stage.peers[to]
        wait = max(0.0, sim.frozen_until - self.stage.now)
        self.stage.later(wait, partial(self._take, sim, sender, message, p))

    def _take(self, sim: SimPeer, sender: PeerId, message: fm.Message, p: int) -> None:
        stage = self.stage
        if not sim.alive or stage.peers[sim.peer] is not sim:
            return
        if not self.of(sim).heard(message, partial(self._good, sim, sender, message, p)):
            return
        if stage.members is None:
            return
        for peer in stage.members.near(sim):
            if peer != sender:
                self.passed += 1
                stage.send_one(sim, peer, message, p)

    def _good(self, sim: SimPeer, sender: PeerId, message: fm.Message, p: int) -> bool:
        """Read a message; whether it is found good."""
        stage = self.stage
        if isinstance(message, fm.PeerClaims):
            wall_ms, judge = self._wall_ms(), self.of(sim).claims
            if judge(message, sim.live, _sealed, RUN, wall_ms=wall_ms, now=stage.now):
                return False
            stage.take(message.peer, sim, fm.Claims(message.units), p)
            return True
        stage.take(sender, sim, message, p)
        core = sim.fragments[p].core
        return not isinstance(message, fm.Announce | fm.Witness) or core.found_good(message)

    def _wall_ms(self) -> int:
        return round((WALL_START_S + self.stage.now) * 1000)


def spreads(message: fm.Message) -> bool:
    """Whether a message is meant for everybody."""
    return isinstance(message, fm.Announce | fm.Witness | fm.PeerClaims)


def _sealed(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return seal(peer, message) == signature
