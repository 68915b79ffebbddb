"""What all should hear: told to everybody, or in a crowd to the neighbours, who pass it on.

Commits, witnesses, orders, statements, scores and prepared units carry their makers' signatures;
claims get one. A message goes on when it was new here and found good, once
(:mod:`dugnad.averaging.passing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dugnad.averaging import formats as fm
from dugnad.averaging.passing import Passing, name_of_message, sign_claims
from dugnad.dht.ids import PeerId
from dugnad.dht.records import verify_ed25519
from dugnad.peer import clock

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

SPREAD = fm.Announce | fm.Witness | fm.Told | fm.Scores | fm.Prepares | fm.PeerClaims
"""Kinds that are passed on; orders are, too, by whoever takes them (`orderkeeper`)."""


class CrowdRelay:
    """One daemon's part of it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._passing = Passing()
        self.passed = 0
        """Messages of others that were sent on, counted once for each neighbour."""

    @property
    def crowded(self) -> bool:
        """Whether there are more peers than streams."""
        roster = self._daemon.swarm.roster
        return roster is not None and roster.crowded

    def near(self, live: Iterable[PeerId]) -> list[PeerId]:
        """Those of ``live`` to whom one speaks unasked: all, or in a crowd the neighbours."""
        roster = self._daemon.swarm.roster
        if roster is None or not roster.crowded:
            return list(live)
        near = set(roster.neighbours())
        return [peer for peer in live if peer in near]

    def say(self, message: fm.Message) -> None:
        """Tell everybody something of our own."""
        if self.crowded:
            if isinstance(message, fm.Claims):
                run, me = self._daemon.run_id, self._daemon.identity
                message = sign_claims(message.units, clock.wall_ms(), run, me)
            self._passing.take(name_of_message(message))
        for peer in self.near(self._daemon.averager.live()):
            self._daemon.swarm.send(peer, message)

    def hear(
        self, sender: PeerId, message: fm.Message, take: Callable[[PeerId, fm.Message], bool]
    ) -> None:
        """Give a message to ``take`` (whether it was found good), and pass it on."""
        if not self.crowded or not isinstance(message, SPREAD):
            take(sender, message)
            return
        if not self._passing.heard(message, lambda: take(sender, message)):
            return
        for peer in self.near(self._daemon.averager.live()):
            if peer != sender:
                self.passed += 1
                self._daemon.swarm.send(peer, message)

    def good(self, message: fm.Message) -> bool:
        """Whether the exchange found a commit or an ack good that it has just read."""
        match message:
            case fm.Announce(commit):
                fragment = commit.header.fragment
            case fm.Witness(ack):
                fragment = ack.fragment
            case _:
                return False
        shells = self._daemon.averager.fragments
        return 0 <= fragment < len(shells) and shells[fragment].core.found_good(message)

    def claims(self, message: fm.PeerClaims) -> str:
        """Why claims that came along the links are not taken, or ''."""
        return self._passing.claims(
            message,
            self._daemon.averager.live(),
            verify_ed25519,
            self._daemon.run_id,
            wall_ms=clock.wall_ms(),
            now=clock.now(),
        )
