"""Which codecs a simulated peer hands in and merges with, where the run leaves that to its links.

Each life of a peer has a link controller of its own (`averaging.linkcontrol`), told what its line
took for each contribution, how late they are listed, and asked before each hand-in and merge, as
`peer.links` does it in the daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dugnad.averaging import events as ev
from dugnad.averaging.linkcontrol import LinkControl, lateness
from dugnad.averaging.linkrate import Delivery
from dugnad.dht.ids import PeerId
from dugnad.simulation.people import SimPeer

if TYPE_CHECKING:
    from dugnad.simulation.stage import Stage

AUTO: Final = "auto"
"""The codec of a swarm whose peers' links decide."""
RICHEST: Final = "int8"
"""No hand-in of such a swarm is richer, nor a commit."""
MOVES_S: Final = 0.5
"""How often a peer sees that a contribution of its own moves on."""


class LinkChoices:
    """The controllers of one stage's peers."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.chosen: dict[str, int] = {}
        """How often each codec was chosen."""
        self._controls: dict[tuple[PeerId, int], LinkControl] = {}
        self._under_way: dict[tuple[PeerId, int, int], float] = {}
        """(peer, life, fragment) -> until when its line carries the last contribution."""

    def of(self, sim: SimPeer) -> LinkControl:
        """The controller of a peer's present life."""
        life = (sim.peer, sim.born)
        if life not in self._controls:
            settings = self.stage.settings
            sizes = (settings.size,) * settings.fragments
            self._controls[life] = LinkControl(
                sizes, richest=RICHEST, richest_commit=RICHEST, leanest_commit="int4"
            )
        return self._controls[life]

    def hand_in(self, sim: SimPeer, p: int) -> str | None:
        """The codec of the next hand-in; None: the last one is still under way."""
        if self.stage.now < self._under_way.get((sim.peer, sim.born, p), 0.0):
            return None
        view = sim.fragments[p].core.view
        home = view.current_home()
        to = None if home == sim.peer else home
        codec = self.of(sim).hand_in(p, to, view.interval_s).codec
        self.chosen[codec] = self.chosen.get(codec, 0) + 1
        return codec

    def commit(self, sim: SimPeer, p: int) -> str:
        """The codec of a merge: the others' downlinks are those of the weather, 0 without end."""
        view, down = sim.fragments[p].core.view, self.stage.settings.weather.down_bytes_s
        if not down:
            return RICHEST
        downlinks = dict.fromkeys((peer for peer in view.live if peer != sim.peer), down)
        return self.of(sim).commit(p, downlinks, view.interval_s).codec

    def sent(self, sim: SimPeer, p: int, action: ev.SendContribution, found: Delivery) -> None:
        """A contribution sets out, and its line will take so long for it."""
        stage, born = self.stage, sim.born
        self._under_way[(sim.peer, born, p)] = stage.now + found.seconds

        def moves() -> None:
            if sim.born == born and sim.alive:
                stage.tell(sim, p, ev.SendMoves(action.seq, action.to))

        for n in range(1, int(found.seconds / MOVES_S) + 1):
            stage.later(n * MOVES_S, moves)
        control = self.of(sim)
        stage.later(found.seconds, lambda: control.delivered(action.to, found))

    def became(self, sim: SimPeer, p: int, action: ev.Adopt | ev.Settle) -> None:
        """How late contributions are listed, or that nobody will list one."""
        control = self.of(sim)
        if isinstance(action, ev.Adopt):
            for behind in lateness(action.applied, sim.peer):
                control.listed(p, behind)
        elif action.share == 1.0:
            control.listed(p, self.stage.settings.staleness)
