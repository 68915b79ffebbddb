"""Our exchange in the simulator's numeric stage, and the ways of training it is compared with.

The exchange cores, the numeric workers (hand-in, merge, outer step, adopt), the virtual network and
the people are those of :mod:`dugnad.simulation`. What trains is a *task*: the peers' own model and
AdamW (`_torchtask`), or a numpy model that costs a tenth (`_mlptask`). All ways start at the same
parameters and see the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.fragments import FragmentTable
from dugnad.averaging.outer import OuterState, Rates, bits_of, step
from dugnad.averaging.tree import Vector
from dugnad.simulation.numericstage import NumericStage
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import Weather, WorldSettings

SETTLE_INTERVALS: Final = 12
"""Intervals after the last step until all is merged, at most: S = 2 versions, succession, room."""


class TaskLearner(Protocol):
    """A learner with parameters of its own, besides what the stage asks of one."""

    def step(self, theta: Vector, batch: int) -> Vector:
        """The parameters after one step from ``theta`` on batch number ``batch``."""
        ...

    def train(self, batch: int, count: int = 1) -> None:
        """One step of its own parameters on ``count`` batches together, from ``batch`` on."""
        ...

    def load(self, theta: Vector) -> None:
        """Take these parameters."""
        ...

    def theta(self) -> Vector:
        """A copy of its parameters."""
        ...


class Task(Protocol):
    """What is trained: everything that the exchange and its baselines have in common."""

    @property
    def seed(self) -> int:
        """Draws version 0 and the order of the data."""
        ...

    @property
    def steps(self) -> int:
        """Optimiser steps of each peer, when all are equally fast."""
        ...

    @property
    def peers(self) -> int:
        """How many share the tokens."""
        ...

    @property
    def table(self) -> FragmentTable:
        """How the parameters lie in fragments."""
        ...

    def start(self) -> Vector:
        """Version 0 of all parameters, in the table's order."""
        ...

    def learner(self, count: int = 1) -> TaskLearner:
        """A learner at version 0 with fresh moments, for steps of ``count`` batches."""
        ...

    def evaluate(self, theta: Vector) -> float:
        """Held-out loss, nats a token."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How our exchange is run. Virtual seconds; steps."""

    h: float = 8.0
    """Steps of a peer of speed 1 between two merges of a fragment."""
    eta: float = 1.0
    mu: float = 0.0
    codec: str = "int8"
    warmup_codec: str = ""
    """The hand-in codec of the first ``warmup`` of all steps; '' means ``codec`` from the start."""
    commit_codec: str = field(default="", repr=False)
    """That of merges; '': int8, or float32 where hand-ins are."""
    warmup: float = 0.2
    rule: str = "mean"
    step_s: float = 1.0
    speeds: tuple[float, ...] = ()
    """Steps of peer i in the time of one step of speed 1; none: all 1."""
    dropped: float = 0.0
    """Share of contributions whose stream breaks before they arrive."""
    kill_each_s: float = 0.0
    """A peer is killed this often on average, and comes back with its disk after ``away_s``."""
    away_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run of our exchange."""

    theta: Vector
    merges: int
    """Commits of fragment 0 in the final lineage."""
    hand_ins: int
    """Contributions of all peers that fragment 0's lineage lists."""
    steps_a_merge: float
    """Steps of one peer per commit: the H that came of it."""
    residual_share: float
    """What has not reached the anchors, as a share of what all progress moved them by."""
    listed_share: float
    """Steps that the lineage lists, of all that were made."""
    bits: float
    """Bits a parameter of a contribution."""


def batches_of(task: Task) -> int:
    """Steps of all peers together."""
    return task.steps * task.peers


def exchange(task: Task, plan: Plan) -> Outcome:
    """Ours: the anchors after all batches are trained on and merged."""
    settings = WorldSettings(
        seed=task.seed,
        peers=task.peers,
        interval_s=plan.h * plan.step_s,
        step_s=plan.step_s,
        codec=plan.codec,
        commit_codec=plan.commit_codec,
        rule=plan.rule,
        eta=plan.eta,
        mu=plan.mu,
        weather=Weather(send_loss=min(1.0, 2.0 * plan.dropped)),
    )
    stage = NumericStage(settings, task, batches=batches_of(task), light=True)
    for number in range(task.peers):
        speed = plan.speeds[number % len(plan.speeds)] if plan.speeds else 1.0
        stage.add(number, step_s=plan.step_s / speed)
    stage.gossip()
    if plan.kill_each_s:
        _churn(stage, task, plan)
    if plan.warmup_codec:
        _hand_in_with(stage, plan.warmup_codec)
    while stage.trained() < batches_of(task):
        stage.run(stage.now + settings.interval_s)
        if stage.trained() >= plan.warmup * batches_of(task):
            _hand_in_with(stage, plan.codec)
    end = stage.now + SETTLE_INTERVALS * settings.interval_s
    while stage.now < end and not stage.settled():
        stage.run(stage.now + settings.interval_s / 2.0)
    if any(len(stage.heads(p)) != 1 for p in range(len(task.table.fragments))):
        raise RuntimeError("the peers have not settled on one head")
    return _outcome(stage, task, plan)


def _hand_in_with(stage: NumericStage, codec: str) -> None:
    """From now on live peers encode their contributions with this codec."""
    for sim in stage.alive():
        for fragment in sim.fragments:
            fragment.worker.rules = replace(fragment.worker.rules, hand_in_codec=codec)


def _outcome(stage: NumericStage, task: Task, plan: Plan) -> Outcome:
    theta = stage.anchors(stage.alive()[0])
    chain = stage.ledger.chain(stage.best(0))
    moved = float(np.linalg.norm(theta - task.start()))
    listed = [
        stage.ledger.listed_steps.get(stage.best(p), 0) for p in range(len(task.table.fragments))
    ]
    size = stage.settings.size
    return Outcome(
        theta=theta,
        merges=len(chain),
        hand_ins=sum(len(record.inputs) for record in chain),
        steps_a_merge=task.steps / max(1, len(chain)),
        residual_share=float(np.linalg.norm(stage.residual())) / task.peers / moved,
        listed_share=sum(listed) / (len(task.table.fragments) * stage.trained()),
        bits=8.0 * CODECS[plan.codec].encoded_size(size) / size,
    )


def _churn(stage: NumericStage, task: Task, plan: Plan) -> None:
    """Kill a peer now and then for as long as there is something to train on; two always stay."""
    rng = random.Random(task.seed)

    def back(victim: SimPeer) -> Callable[[], None]:
        return lambda: None if victim.alive else _restart(stage, victim)

    def strike() -> None:
        if stage.trained() >= batches_of(task):
            return
        if len(stage.alive()) > 2:
            victim = rng.choice(stage.alive())
            stage.kill(victim.peer)
            stage.later(plan.away_s, back(victim))
        stage.later(rng.expovariate(1.0 / plan.kill_each_s), strike)

    stage.later(rng.expovariate(1.0 / plan.kill_each_s), strike)


def _restart(stage: NumericStage, victim: SimPeer) -> None:
    stage.restart(victim.peer)


def data_parallel(task: Task) -> Vector:
    """Each step takes the batches of all peers at once."""
    learner = task.learner(task.peers)
    for number in range(task.steps):
        learner.train(number * task.peers, task.peers)
    return learner.theta()


def alone(task: Task) -> Vector:
    """One peer with its own share of the tokens and nobody to exchange with."""
    learner = task.learner()
    for number in range(task.steps):
        learner.train(number * task.peers)
    return learner.theta()


def synchronous(task: Task, eta: float, mu: float, h: int) -> Vector:
    """DiLoCo: all peers step H times and then take the mean of their progress together."""
    learners = [task.learner() for _ in range(task.peers)]
    state = OuterState(task.start(), np.zeros(task.table.total, np.float32))
    rates = Rates.of_bits(eta_bits=bits_of(eta), mu_bits=bits_of(mu))
    for number in range(task.steps):
        for peer, learner in enumerate(learners):
            learner.train(number * task.peers + peer)
        if (number + 1) % h and number + 1 < task.steps:
            continue
        progress = [state.theta - learner.theta() for learner in learners]
        state = step(state, np.mean(progress, axis=0, dtype=np.float32), rates)
        for learner in learners:
            learner.load(state.theta)
    return state.theta
