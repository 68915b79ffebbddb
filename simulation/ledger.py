"""The checkers' ledger with what a report needs: steps made and listed, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from dugnad.averaging import formats as fm
from dugnad.averaging.join import AMENDED
from dugnad.averaging.worker import FragmentWorker
from dugnad.simulation.checks import Checks, Key
from dugnad.simulation.people import SimPeer


@dataclass(slots=True)
class Ledger(Checks):
    """Counts in steps, not in claimed tokens: a false claim earns nothing here."""

    steps: dict[Key, int] = field(default_factory=dict)
    """Contribution -> steps in it."""
    listed_steps: dict[bytes, int] = field(default_factory=dict)
    """Digest -> steps that its lineage lists."""
    listed_now: list[tuple[bytes, int]] = field(default_factory=list)
    """(peer, fragment) of inputs of new commits, until the stage has taken them."""

    def handed_in(
        self, sim: SimPeer, p: int, made: fm.Contribution, worker: FragmentWorker
    ) -> None:
        """Remember the steps of a contribution, too."""
        Checks.handed_in(self, sim, p, made, worker)
        self.steps[(made.peer, p, made.seq)] = made.steps

    def committed(self, record: fm.CommitRecord, digest: bytes) -> None:
        """Add up the steps that a lineage lists, too."""
        Checks.committed(self, record, digest)
        total = self.listed_steps.get(record.header.parent, 0)
        for one in record.inputs:
            made, p = one.contribution, record.header.fragment
            steps = self.steps[(made.peer, p, made.seq)]
            if one.refusal == AMENDED:  # listed before; what came back to its maker came again
                total -= steps if one.clip == 0.0 else 0
                continue
            total += steps
            self.listed_now.append((made.peer, p))
        self.listed_steps[digest] = total

    def chain(self, digest: bytes) -> list[fm.CommitRecord]:
        """The commits of a lineage, newest first."""
        found: list[fm.CommitRecord] = []
        while (record := self.commits.get(digest)) is not None:
            found.append(record)
            digest = record.header.parent
        return found

    def line(self, digest: bytes) -> set[bytes]:
        """The digests of a lineage, its head's included."""
        found = {digest}
        while (record := self.commits.get(digest)) is not None:
            digest = record.header.parent
            found.add(digest)
        return found
