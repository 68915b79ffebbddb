"""What the learner is given while only parts of the text are here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dugnad.dht.ids import PeerId
from dugnad.peer.contract import Contract
from dugnad.peer.learner.protocol import Work
from dugnad.peer.progress import ProgressLog
from dugnad.peer.trainer import LearnerPlan
from dugnad.peer.training import AHEAD_STEPS, WAITING_TIMES, Training, TrainingHooks
from dugnad.peer.unitplan import Unit, UnitPlan
from dugnad.peer.units import Interval, Participants, Units

ME = PeerId(bytes(32))
CONTRACT = Contract(1, ("float32",), 1.0, splittable=True, attempts=3)
BATCH = 4
AHEAD = AHEAD_STEPS * BATCH


class World:
    """A training shell whose learner keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Work] = []
        self.here: set[Unit] = set()
        self.wanted: list[Unit] = []
        units = Units(ME, UnitPlan(b"seed", 4000, 4), CONTRACT, sequence_tokens=100)
        units.handle(Interval(10.0), 0.0)
        units.handle(Participants(b"c", ((ME, 10),), ()), 0.0)
        plan = LearnerPlan(
            config=cast(Any, SimpleNamespace(context=100)),
            table=cast(Any, SimpleNamespace(fragments=())),
            optimiser=cast(Any, SimpleNamespace(batch_sequences=BATCH)),
            tokens=Path("unused"),
        )
        hooks = TrainingHooks(
            on_ready=lambda ready: None,
            on_claim=lambda claim: None,
            on_note=lambda kind, text: None,
            swarm_tokens=lambda: 0,
            on_failed=lambda why: None,
            still=cast(Any, nullcontext),
            find=cast(Any, None),
            has=self.has,
        )
        self.training = Training(
            plan, units, ProgressLog(1, 100), lambda: 0.0, hooks, eligible=True
        )
        self.trainer = SimpleNamespace(plan=plan, outstanding=0, give=self.give)
        self.training.trainer = cast(Any, self.trainer)
        self.training.ready = cast(Any, object())

    def has(self, unit: Unit) -> bool:
        self.wanted.append(unit)
        return unit in self.here

    def give(self, work: Work) -> None:
        self.given.append(work)
        self.trainer.outstanding += len(work.sequences)


@pytest.fixture
def world() -> World:
    return World()


async def test_work_whose_text_is_not_here_waits_for_it(world: World) -> None:
    world.training.enable()
    assert world.given == []
    first = world.wanted[0]
    world.here.add(first)
    world.training.arrived()
    assert {(work.epoch, work.index) for work in world.given} == {first}
    world.here.update(world.wanted)
    world.training.arrived()
    named = [(work.epoch, work.index, work.start) for work in world.given]
    assert len(named) == len(set(named)) > 1, "nothing is given twice"
    assert world.training.waiting == []


async def test_only_so_much_waits_and_what_nobody_gives_does_not_stop_the_rest(
    world: World,
) -> None:
    world.training.enable()
    for _ in range(20):
        world.training.arrived()
    waiting = sum(item.stop - item.start for item in world.training.waiting)
    assert AHEAD < waiting < (WAITING_TIMES + 1) * AHEAD
    last = world.training.waiting[-1]
    world.here.add((last.epoch, last.index))
    world.training.arrived()
    assert [(work.epoch, work.index) for work in world.given] == [(last.epoch, last.index)]
