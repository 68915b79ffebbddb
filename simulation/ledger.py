"""The checkers' ledger with what a report needs: steps made and listed, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dugnad.averaging import formats as fm
from dugnad.averaging.join import AMENDED, counts
from dugnad.averaging.worker import FragmentWorker
from dugnad.simulation.checks import Checks, Key
from dugnad.simulation.people import SimPeer

Listed = Mapping[tuple[bytes, int], float]
"""(peer, seq) -> clip factor of all that a lineage lists of one fragment."""


@dataclass(slots=True)
class Ledger(Checks):
    """Counts in steps, not in claimed tokens: a false claim earns nothing here.

    Work that came back goes with a later contribution, and after a switch of lineage both may be
    listed. So each step counts for the contribution that held it first, its *source*.
    """

    steps: dict[Key, int] = field(default_factory=dict)
    """Source -> steps that no earlier contribution held."""
    sources: dict[Key, tuple[Key, ...]] = field(default_factory=dict)
    """Contribution -> the sources of its steps: itself, and what it carries again."""
    carriers: dict[Key, list[Key]] = field(default_factory=dict)
    """Source -> the contributions that hold its steps."""
    carried: set[Key] = field(default_factory=set)
    """Contributions that went along with a later one."""
    listed_steps: dict[bytes, int] = field(default_factory=dict)
    """Digest -> steps that its lineage lists, each once."""
    listed_now: list[tuple[bytes, int]] = field(default_factory=list)
    """(peer, fragment) of inputs of new commits, until the stage has taken them."""

    def handed_in(
        self, sim: SimPeer, p: int, made: fm.Contribution, worker: FragmentWorker
    ) -> None:
        """Remember the steps of a contribution, too."""
        Checks.handed_in(self, sim, p, made, worker)
        self.holds(sim, p, made)

    def holds(self, sim: SimPeer, p: int, made: fm.Contribution) -> None:
        """A contribution holds new steps, and those of others that have come back since."""
        key = (made.peer, p, made.seq)
        back = [(made.peer, p, seq) for seq, one in sim.log.sent[p].items() if one.carried]
        again = [source for one in back if one not in self.carried for source in self.sources[one]]
        self.carried.update(back)
        self.steps[key] = max(0, made.steps - sum(self.steps[one] for one in again))
        self.sources[key] = (key, *again)
        for source in self.sources[key]:
            self.carriers.setdefault(source, []).append(key)

    def committed(self, record: fm.CommitRecord, digest: bytes) -> None:
        """Add up the steps that a lineage lists, too."""
        Checks.committed(self, record, digest)
        total = self.listed_steps.get(record.header.parent, 0)
        listed = dict(self.listed.get(record.header.parent, {}))
        for one in record.inputs:
            maker, seq = one.contribution.peer, one.contribution.seq
            sources = self.sources[(maker, record.header.fragment, seq)]
            before = self._count(sources, listed)
            listed[(maker, seq)] = one.clip if counts(one) else 0.0
            total += self._count(sources, listed) - before
            if one.refusal != AMENDED:  # that was listed before
                self.listed_now.append((maker, record.header.fragment))
        self.listed_steps[digest] = total

    def _count(self, sources: tuple[Key, ...], listed: Listed) -> int:
        return sum(self.steps[one] for one in sources if self._lists(listed, one))

    def _lists(self, listed: Listed, source: Key) -> bool:
        """Whether any contribution with these steps is listed."""
        return any(listed.get((one[0], one[2]), 0.0) > 0.0 for one in self.carriers[source])

    def pending(self, sim: SimPeer, p: int, listed: Listed) -> int:
        """Steps of fragment ``p`` that a peer has handed in to nobody, or that may yet be listed
        or come back."""
        log = sim.log
        fresh = sum(one.step > log.place[p] for one in log.steps) + log.waiting[p][0]
        sent = {source for seq in log.sent[p] for source in self.sources[(sim.peer, p, seq)]}
        return fresh + sum(self.steps[one] for one in sent if not self._lists(listed, one))

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
