"""The in-memory swarm of ``dugnad.simulation`` with real learners: each step trains a batch.

The exchange cores, the numeric workers (hand-in, merge, outer step, adopt) and the virtual network
are those of :class:`dugnad.simulation.world.World`; only its played learner is replaced by the
peer's own model, AdamW and step. Hand-ins, merges and adoptions fall between steps, as virtual time
has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.fragments import FragmentTable, build_table
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import FragmentWorker
from dugnad.dht.ids import PeerId
from dugnad.peer.corpus import TokenFile, split
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.schedule import OptimiserSettings, learning_rate
from dugnad.peer.learner.stepper import Stepper
from dugnad.peer.modelconfig import ModelConfig
from dugnad.simulation.checks import Checks, Violation
from dugnad.simulation.world import SimFragment, SimPeer, World, WorldSettings, peer_of

CPU: Final = torch.device("cpu")
EVALUATED_SEQUENCES: Final = 768
"""Held-out sequences of one evaluation, spread over all that is held out."""
EVALUATION_BATCH: Final = 64
SETTLE_INTERVALS: Final = 6
"""Intervals after the last step until all hand-ins are merged: S = 2 versions, and room."""
JITTER_SHARE: Final = 0.2
"""Steps of one peer last 0.9 to 1.1 of its step time (World), so peers end apart by less."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained: everything that the exchange and its baselines have in common."""

    config: ModelConfig
    tokens: TokenFile
    seed: int
    steps: int
    """Optimiser steps of each peer."""
    peers: int = 4
    fragments: int = 4
    batch: int = 8
    """Sequences of one peer's step."""
    rate: float = 3e-3
    """Peak learning rate of AdamW."""
    table: FragmentTable = field(init=False)
    order: npt.NDArray[np.int64] = field(init=False, repr=False)
    held_out: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = split(self.tokens.data.size, self.config.context)
        rng = np.random.default_rng(self.seed)
        wanted = self.steps * self.peers * self.batch
        rounds = -(-wanted // len(parts.train))
        order = np.concatenate([rng.permutation(len(parts.train)) for _ in range(rounds)])
        count = min(EVALUATED_SEQUENCES, len(parts.held_out))
        chosen = np.linspace(parts.held_out.start, parts.held_out.stop - 1, count).astype(np.int64)
        table = build_table(self.config.tensor_specs(), self.fragments)
        for name, value in ("table", table), ("order", order), ("held_out", chosen.tolist()):
            object.__setattr__(self, name, value)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step of all peers together."""
        return self.peers * self.batch * self.config.context

    def start(self) -> Vector:
        """Version 0 of all parameters, in the table's order."""
        return initial_parameters(self.table, self.config, self.seed)

    def settings(self, batch: int) -> OptimiserSettings:
        """AdamW for steps of ``batch`` sequences, over the whole swarm's tokens."""
        total = self.steps * self.step_tokens
        return OptimiserSettings(
            total_tokens=total,
            learning_rate=self.rate,
            warmup_tokens=total // 20,
            batch_sequences=batch,
        )

    def learner(self, batch: int) -> Learner:
        """A learner at version 0 with fresh moments."""
        model = FlatModel(self.config, self.table, CPU)
        model.load(self.start())
        return Learner(
            self, model, Stepper(model, self.settings(batch), self.tokens, torch.float32)
        )

    def evaluate(self, vector: Vector) -> float:
        """Held-out loss, nats a token."""
        anchors = Anchors(self.config, self.table, CPU)
        return anchors.evaluate(vector, self.tokens, self.held_out, EVALUATION_BATCH)


@dataclass(slots=True)
class Learner:
    """One virtual learner: the peer's model, optimiser and step."""

    task: Task
    model: FlatModel
    stepper: Stepper

    def train(self, step: int, sequences: npt.NDArray[np.int64]) -> None:
        """Step number ``step`` (from 0) on these sequences, at the rate the swarm has by then."""
        task = self.task
        rate = learning_rate(task.settings(task.batch), (step + 1) * task.step_tokens)
        self.stepper.step(sequences.tolist(), rate)

    def theta(self) -> Vector:
        """A copy of all parameters, in the table's order."""
        vector = np.empty(self.task.table.total, np.float32)
        for fragment in range(self.task.fragments):
            self.model.copy_out(fragment, vector)
        return vector


def share(task: Task, step: int, peer: int) -> npt.NDArray[np.int64]:
    """The sequences of one peer's step: each is trained on once an epoch, by whom it falls to."""
    at = (step * task.peers + peer) * task.batch
    return task.order[at : at + task.batch]


class RootChecks(Checks):
    """Of the world's checks those that cost nothing at real sizes: listed once, equal bits."""

    def handed_in(
        self, sim: SimPeer, p: int, made: fm.Contribution, worker: FragmentWorker
    ) -> None:
        """Keep no vectors."""

    def adopted(self, sim: SimPeer, p: int, old: bytes, adopt: ev.Adopt) -> None:
        """Equal digests mean equal bits."""
        state = sim.fragments[p].worker.states[adopt.digest]
        root = state.theta_root + state.momentum_root
        if self.roots.setdefault(adopt.digest, root) != root:
            raise Violation(f"two peers hold different bits of version {adopt.version}")

    def after(self, sim: SimPeer, p: int) -> None:
        """Conservation is checked by the simulation's own tests."""


class NumericWorld(World):
    """A world whose peers train ``task``; each stops after its steps and then only settles."""

    def __init__(self, settings: WorldSettings, task: Task) -> None:
        self.task = task
        self._start = task.start()
        self.learners: dict[PeerId, Learner] = {}
        super().__init__(replace(settings, fragments=task.fragments))
        self.checks = RootChecks(settings.size, settings.horizon)

    def train(self) -> Vector:
        """All peers' steps and what follows until everything is merged; the anchors' vector."""
        s, task = self.settings, self.task
        for number in range(task.peers):
            self.learners[peer_of(number)] = task.learner(task.batch)
            self.add(number)
        self.gossip()
        end = task.steps * s.step_s * (1.0 + JITTER_SHARE) + SETTLE_INTERVALS * s.interval_s
        self.run(end)
        if any(sim.step < task.steps for sim in self.alive()):
            raise RuntimeError("a peer has not done its steps in time")
        return self.anchors()

    def anchors(self) -> Vector:
        """The agreed parameters; all live peers must have one head of each fragment."""
        if any(len(self.heads(p)) != 1 for p in range(self.task.fragments)):
            raise RuntimeError("the peers have not settled on one head")
        parts = [f.worker.states[f.core.head.digest].theta for f in self.alive()[0].fragments]
        return np.concatenate(parts)

    def residual_share(self) -> float:
        """What has not reached the anchors, as a share of what all progress moved them by."""
        left = [f.worker.buffers.residual for sim in self.alive() for f in sim.fragments]
        moved = float(np.linalg.norm(self.anchors() - self._start))
        return float(np.sqrt(sum(float(r @ r) for r in left))) / self.task.peers / moved

    def _part(self, p: int) -> slice:
        start = self.task.table.offsets[p]
        return slice(start, start + self.task.table.sizes[p])

    def _genesis(self, fragment: int) -> AnchorState:
        return AnchorState.fresh(self._start[self._part(fragment)])

    def _fragment(self, sim: SimPeer, p: int) -> SimFragment:
        made = super()._fragment(sim, p)
        groups = tuple(self.task.table.merge_groups(p))
        made.worker.rules = replace(made.worker.rules, groups=groups)
        made.rounding = np.zeros(self.task.table.sizes[p], np.float64)
        return made

    def _step(self, sim: SimPeer) -> None:
        if sim.step >= self.task.steps:
            return
        self.learners[sim.peer].train(sim.step, share(self.task, sim.step, sim.number))
        sim.step += 1
        for fragment in sim.fragments:
            index = sim.number * 1_000_000 + sim.step
            fragment.pieces.append(fm.UnitPiece(sim.born, index, 0, 1))

    def _do(self, sim: SimPeer, p: int, action: ev.Action) -> None:
        model, fragment = self.learners[sim.peer].model, sim.fragments[p]
        if isinstance(action, ev.HandIn):
            whole = np.empty(self.task.table.total, np.float32)
            model.copy_out(p, whole)
            fragment.theta = whole[self._part(p)].copy()
        if isinstance(action, ev.Adopt):
            fragment.theta = np.zeros(self.task.table.sizes[p], np.float32)
        super()._do(sim, p, action)
        if isinstance(action, ev.Adopt):  # the world added the change to nothing: it is alone here
            whole = np.zeros(self.task.table.total, np.float32)
            whole[self._part(p)] = fragment.theta
            model.add_in(p, whole)
