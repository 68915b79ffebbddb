"""The numeric mode: the peers of a stage train a real model, and its held-out loss is measured.

The exchange cores, workers, network and people are those of
:class:`dugnad.simulation.stage.Stage`; only the played learner is replaced by one that steps on
real batches. What trains is behind two small ports, :class:`Trainer` and :class:`Learner`: the
numpy model of :mod:`dugnad.simulation.numericmodel`, or, in benchmarks, the peers' own learner.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.credit import CoverageChange
from dugnad.averaging.fragments import FragmentTable, Group
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import FragmentWorker
from dugnad.dht.ids import PeerId
from dugnad.simulation.checks import Violation
from dugnad.simulation.credits import Credits
from dugnad.simulation.ledger import Ledger
from dugnad.simulation.people import SimFragment, SimPeer
from dugnad.simulation.settings import WorldSettings
from dugnad.simulation.stage import Stage

LOOK_S: Final = 0.25
"""How often, after a contact, the heads of both sides are compared."""

LISTS_KEPT: Final = 64
"""Commits, of all fragments, whose lineage's whole list a light ledger keeps: more than any fork's
depth times the fragments of a benchmark."""


class Learner(Protocol):
    """One life of one peer's learner: its optimiser's moments."""

    def step(self, theta: Vector, batch: int) -> Vector:
        """The parameters after one step from ``theta`` on batch number ``batch`` of the run.

        Both are flat, float32 and in the table's order; ``theta`` stays as it is.
        """
        ...


class Trainer(Protocol):
    """What is trained, the same for all peers."""

    @property
    def table(self) -> FragmentTable:
        """How the parameters lie in fragments."""
        ...

    def start(self) -> Vector:
        """Version 0 of all parameters."""
        ...

    def learner(self) -> Learner:
        """A learner with fresh moments."""
        ...

    def evaluate(self, theta: Vector) -> float:
        """Held-out loss in nats a token."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """One measurement of the agreed parameters. Virtual seconds; steps of all peers."""

    at_s: float
    steps: int
    loss: float


@dataclass(slots=True)
class Contact:
    """Two sides that meet again: the better side's loss just before, and all peers' after."""

    at_s: float
    before: float
    after: float | None = None
    """The loss of the first heads that all had in common; None: they never had."""


@dataclass(slots=True)
class LightLedger(Ledger):
    """Of the checks those that cost nothing at real sizes: listed once, equal bits."""

    order: deque[bytes] = field(default_factory=deque)

    def committed(self, record: fm.CommitRecord, digest: bytes) -> None:
        """Check the newest commits only: what all of a long run's lineages list is gigabytes."""
        Ledger.committed(self, record, digest)
        self.order.append(digest)
        while len(self.order) > LISTS_KEPT:
            self.listed.pop(self.order.popleft(), None)

    def handed_in(
        self, sim: SimPeer, p: int, made: fm.Contribution, worker: FragmentWorker
    ) -> None:
        """Count steps; keep no vector."""
        self.holds(sim, p, made)

    def adopted(self, sim: SimPeer, p: int, old: bytes, adopt: ev.Adopt) -> None:
        """Equal digests mean equal bits."""
        state = sim.fragments[p].worker.states[adopt.digest]
        root = state.theta_root + state.momentum_root
        if self.roots.setdefault(adopt.digest, root) != root:
            raise Violation(f"two peers hold different bits of version {adopt.version}")

    def forgotten(self, sim: SimPeer, p: int, seq: int) -> None:
        """Conservation is checked where the vectors are small."""

    def after(self, sim: SimPeer, p: int) -> None:
        """Conservation is checked where the vectors are small."""


class NoCredits(Credits):
    """Numbers the units, and follows no board."""

    def adopted(self, sim: SimPeer, p: int, adopt: ev.Adopt) -> list[CoverageChange]:
        """Credit is checked where runs are short."""
        return []


class NumericStage(Stage):
    """A stage whose learners learn. Fragments are padded with zeros to one size.

    ``evaluate_s`` is the virtual time between two measurements of the anchors, 0 for none; with
    ``batches`` above 0 all stop to train once that many were trained on; ``light`` leaves out the
    checks of conservation, which keeps every contribution's vector, and of credit.
    """

    def __init__(
        self,
        settings: WorldSettings,
        trainer: Trainer,
        *,
        evaluate_s: float = 0.0,
        batches: int = 0,
        light: bool = False,
    ) -> None:
        self.trainer = trainer
        self.batches = batches
        table = trainer.table
        self._parts = [slice(at, at + n) for at, n in zip(table.offsets, table.sizes, strict=True)]
        self._start = trainer.start()
        self._learners: dict[tuple[PeerId, int], Learner] = {}
        self.losses: list[Loss] = []
        self.contacts: list[Contact] = []
        fragments = len(table.fragments)
        super().__init__(replace(settings, fragments=fragments, size=max(table.sizes)))
        if light:
            self.ledger = self.checks = LightLedger(self.settings.size, settings.horizon)
            self.credits = NoCredits(self.ledger, fragments, settings.horizon)
        self._evaluate_s = evaluate_s
        if evaluate_s:
            self.later(evaluate_s, self._measure)

    # -- what is trained -------------------------------------------------------------------------

    def _genesis(self, fragment: int) -> AnchorState:
        padded = np.zeros(self.settings.size, np.float32)
        part = self._start[self._parts[fragment]]
        padded[: part.size] = part
        return AnchorState.fresh(padded)

    def _fragment(self, sim: SimPeer, p: int) -> SimFragment:
        made = super()._fragment(sim, p)
        groups = self.trainer.table.merge_groups(p)
        groups[-1] = Group(groups[-1].start, self.settings.size, groups[-1].kind)
        made.worker.rules = replace(made.worker.rules, groups=tuple(groups))
        return made

    def _piece(self, sim: SimPeer) -> fm.UnitPiece | None:
        if self.batches and self.trained() >= self.batches:
            return None
        return super()._piece(sim)

    def _learn(self, sim: SimPeer) -> None:
        life = (sim.peer, sim.born)
        if life not in self._learners:
            self._learners[life] = self.trainer.learner()
        theta = self._whole([fragment.theta for fragment in sim.fragments])
        moved = self._learners[life].step(theta, self.trained())
        for fragment, part in zip(sim.fragments, self._parts, strict=True):
            after = fragment.theta.copy()
            after[: part.stop - part.start] = moved[part]
            fragment.progress += fragment.theta.astype(np.float64) - after
            fragment.theta = after

    def trained(self) -> int:
        """Batches that were trained on: the steps of all peers."""
        return self.made // self.settings.fragments

    def settled(self) -> bool:
        """Whether all live peers have one head of each fragment, and it lists all that they did."""
        fragments = range(self.settings.fragments)
        return all(len(self.heads(p)) == 1 and not self.pending(p) for p in fragments)

    def _whole(self, padded: list[Vector]) -> Vector:
        """All parameters in one vector, from the fragments' padded ones."""
        parts = zip(padded, self._parts, strict=True)
        return np.concatenate([one[: part.stop - part.start] for one, part in parts])

    # -- how good it is --------------------------------------------------------------------------

    def anchors(self, sim: SimPeer) -> Vector:
        """The agreed parameters as one peer holds them."""
        return self._whole([f.worker.states[f.core.head.digest].theta for f in sim.fragments])

    def residual(self) -> Vector:
        """What of the live peers' progress waits in residuals, summed."""
        total = np.zeros(self.trainer.table.total, np.float32)
        for sim in self.alive():
            total += self._whole([f.worker.buffers.residual for f in sim.fragments])
        return total

    def loss(self) -> float:
        """Held-out loss of the heads that most live peers have; NaN when nobody is alive."""
        heads = self._by_heads()
        if not heads:
            return float("nan")
        return self.trainer.evaluate(self.anchors(max(heads.values(), key=len)[0]))

    def _by_heads(self) -> dict[tuple[bytes, ...], list[SimPeer]]:
        """The live peers by the heads that they have."""
        found: dict[tuple[bytes, ...], list[SimPeer]] = {}
        for sim in self.alive():
            found.setdefault(tuple(f.core.head.digest for f in sim.fragments), []).append(sim)
        return found

    def measured(self) -> Loss:
        """The loss at this moment."""
        return Loss(self.now, self.trained(), self.loss())

    def _measure(self) -> None:
        if self.alive():
            self.losses.append(self.measured())
        self.later(self._evaluate_s, self._measure)

    def join(self, number: int) -> None:
        """Mend a cut; the better side is measured before, and all together after."""
        split = bool(self.walls.get(number))
        if split and self.alive():
            sides = [
                self.trainer.evaluate(self.anchors(one[0])) for one in self._by_heads().values()
            ]
            contact = Contact(self.now, min(sides))
            self.contacts.append(contact)
            self.later(LOOK_S, lambda: self._look(contact, self._tips()))
        super().join(number)

    def _tips(self) -> tuple[frozenset[bytes], ...]:
        return tuple(frozenset(self.heads(p)) for p in range(self.settings.fragments))

    def _look(self, contact: Contact, before: tuple[frozenset[bytes], ...]) -> None:
        """Measure once every fragment has one head that nobody had at the contact."""
        tips = self._tips()
        new = all(not now <= old for now, old in zip(tips, before, strict=True))
        if new and self.alive() and all(len(now) == 1 for now in tips):
            contact.after = self.loss()
        else:
            self.later(LOOK_S, lambda: self._look(contact, before))
