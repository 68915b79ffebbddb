"""The end of a run at one peer: it stops training when nothing is to be merged any more.

Whether a fragment has ended is decided by its core, from the lineage alone: the last version is the
first whose token total reaches the budget of the manifest. This only follows what the cores say:
training stops when all fragments have ended, and goes on should a heavier lineage that has not
ended take over. Export, page and transfers go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

FINISHED = "finished"


class RunEnd:
    """Watches the cores of one daemon; ``look`` is called by its slow heartbeat once in sync."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.ended = False

    def reason(self) -> str:
        """Why nothing is trained any more, in one line."""
        if ordered := self.daemon.orders.stop_reason():
            return ordered
        return f"the run has reached its {self.daemon.manifest.token_budget:,} tokens"

    def all_ended(self) -> bool:
        """Whether every fragment has its last version."""
        return all(shell.core.view.ended() for shell in self.daemon.averager.fragments)

    def over(self) -> bool:
        """Whether there is nothing to train for: the run has ended, or the organiser says so."""
        return self.all_ended() or bool(self.daemon.orders.stop_reason())

    def look(self) -> None:
        """Stop or go on training when that has changed."""
        ended = self.over()
        if ended == self.ended or self.daemon.leaving.is_set():
            return
        self.ended = ended
        if ended:
            self.daemon.training.disable()
            self.daemon.state, self.daemon.reason = FINISHED, self.reason()
            self.daemon.note("end", f"{self.reason()}; this peer trains no more")
        else:
            self.daemon.training.enable()
            self.daemon.state, self.daemon.reason = "training", ""
            self.daemon.note("end", "the run goes on: it has not ended")
