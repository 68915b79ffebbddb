"""The numeric mode: real learners on the same cores, losses over virtual time, and what is held."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dugnad.averaging.fragments import FragmentTable
from dugnad.averaging.tree import Vector
from dugnad.simulation.chart import LOSS, chart
from dugnad.simulation.numeric import Numeric, NumpyTrainer
from dugnad.simulation.numericstage import Learner, NumericStage
from dugnad.simulation.people import peer_of
from dugnad.simulation.report import Series, account, as_json, row
from dugnad.simulation.runner import Result, play
from dugnad.simulation.scenario import Drawn, ScenarioError, draw, names, text_of
from dugnad.simulation.settings import WorldSettings

TINY = """title = "tiny"
seconds = 12
calm_s = 9
[swarm]
peers = 3
fragments = 2
interval_s = 2.0
eta = 1.0
mu = 0.0
[[event]]
at_s = 6
do = "split"
seconds = 3
[numeric]
hidden = 12
context = 3
dim = 4
batch = 16
symbols = 20000
evaluate_s = 2.0
"""


@cache
def tiny(extra: str = "", seed: int = 1) -> Result:
    return play(draw("tiny", TINY + extra, seed))


def stage(*, light: bool = False, batches: int = 0) -> NumericStage:
    plan = Numeric(hidden=12, context=3, dim=4, batch=16, symbols=20_000)
    settings = WorldSettings(seed=1, interval_s=2.0, eta=1.0, mu=0.0)
    trainer = NumpyTrainer.of(plan, 3, 1)
    made = NumericStage(settings, trainer, batches=batches, light=light)
    for number in range(3):
        made.add(number)
    made.gossip()
    return made


def test_held_out_loss_falls_over_virtual_time_and_progress_is_conserved() -> None:
    result = tiny()
    assert result.passed, result.violations
    assert len(result.losses) == 11  # each 2 s of 21, and the end
    assert result.losses[-1].loss < result.losses[0].loss - 0.2
    assert result.losses[-1].steps > 150


def test_the_loss_before_and_after_a_contact_is_measured() -> None:
    (contact,) = tiny().contacts
    assert contact.at_s == pytest.approx(9.0)
    assert contact.after is not None
    assert contact.after < 1.01 * contact.before


def test_the_same_seed_gives_the_same_digest_and_the_same_losses() -> None:
    one, two = tiny(), play(draw("tiny", TINY, 1))
    assert (one.digest, one.losses) == (two.digest, two.losses)
    assert tiny(seed=2).losses != one.losses


def test_a_loss_above_what_is_held_is_a_broken_promise() -> None:
    (broken,) = tiny("[hold]\nloss_max = 0.5\n").violations
    assert "above 0.5" in broken.what


def test_a_contact_that_makes_things_worse_is_a_broken_promise() -> None:
    (broken,) = tiny("[hold]\nloss_after_contact = 0.5\n").violations
    assert "the better side had" in broken.what


def test_losses_are_in_the_table_the_account_the_json_and_the_plot() -> None:
    result = tiny()
    series = Series("tiny", "tiny", (result,), 1.0)
    assert row(series)[-1] == f"{result.losses[-1].loss:.3f}"
    assert "loss at the contact" in account(result)
    found = as_json([series])["scenarios"]
    assert isinstance(found, dict)
    assert found["tiny"]["loss"] == result.losses[-1].loss
    assert found["tiny"]["runs"][0]["losses"][0]["at_s"] == 2.0
    assert LOSS in chart(result)
    assert LOSS not in chart(replace(result, losses=[]))


def test_a_loss_cannot_be_held_where_nothing_is_trained() -> None:
    text = TINY.partition("[numeric]")[0] + "[hold]\nloss_max = 1.0\n"
    with pytest.raises(ScenarioError, match="there is no `numeric` table"):
        draw("tiny", text, 0)


def test_a_bad_numeric_table_is_refused_with_its_key() -> None:
    with pytest.raises(ScenarioError, match=r"`numeric\.batch` is 0"):
        draw("tiny", TINY.replace("batch = 16", "batch = 0"), 0)


def test_learners_start_at_version_0_and_fragments_are_padded_with_zeros_that_stay() -> None:
    world = stage()
    sizes = world.trainer.table.sizes
    assert len(set(sizes)) > 1
    np.testing.assert_array_equal(world.anchors(world.alive()[0]), world.trainer.start())
    world.run(12.0)
    for sim in world.alive():
        assert sim.fragments[0].core.head.version > 2
        for size, fragment in zip(sizes, sim.fragments, strict=True):
            assert not fragment.theta[size:].any()
            assert not fragment.worker.states[fragment.head].theta[size:].any()


def test_training_ends_with_its_batches_and_all_of_it_is_merged() -> None:
    world = stage(batches=120)
    world.run(30.0)
    assert world.trained() == sum(sim.step for sim in world.alive()) == 120
    assert world.settled()
    assert world.ledger.listed_steps[world.best(0)] == 120
    assert float(np.abs(world.residual()).max()) < 0.01


def test_without_conservation_checked_the_same_happens() -> None:
    ends = []
    for light in (False, True):
        world = stage(light=light)
        world.run(12.0)
        ends.append((world.digest(), world.loss()))
        assert bool(world.ledger.vectors) is not light
    assert ends[0] == ends[1]


def test_another_trainer_can_be_plugged_in() -> None:
    class Constant(NumpyTrainer):
        def learner(self) -> Learner:  # type: ignore[override]  # any learner will do
            return Down()

    class Down:
        def step(self, theta: Vector, batch: int) -> Vector:
            return theta - np.float32(1.0 / 1024)

    plan = Numeric(hidden=12, context=3, dim=4, batch=16, symbols=20_000)
    made = NumpyTrainer.of(plan, 1, 1)
    trainer = Constant(made.plan, made.seed, made.model, made.train, made.held_out)
    settings = WorldSettings(seed=1, interval_s=2.0, eta=1.0, mu=0.0, codec="float32")
    world = NumericStage(settings, trainer, batches=32)
    table: FragmentTable = trainer.table
    assert table.total == world.settings.size
    world.add(0)
    world.gossip()
    world.run(30.0)
    moved = trainer.start() - world.anchors(world.peers[peer_of(0)])
    np.testing.assert_allclose(moved, 32 / 1024, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in names() if one.startswith("numeric")])
def test_the_numeric_scenarios_hold(name: str) -> None:
    drawn: Drawn = draw(name, text_of(name), 0)
    if drawn.scenario.known:
        pytest.skip(drawn.scenario.known)
    result = play(drawn)
    assert result.passed, result.violations
