"""The numpy model's gradients are those of its loss, it learns, and its text is always the same."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from dugnad.simulation.numeric import HELD_OUT, TEXT_MIN, Numeric, NumericError, NumpyTrainer
from dugnad.simulation.numericmodel import BETA_1, BETA_2, EPSILON, Adam, Model, Shape
from dugnad.simulation.numerictext import SYMBOLS, made_text

SMALL = Shape(symbols=5, context=3, dim=2, hidden=4)


def test_the_gradient_is_the_slope_of_the_loss_in_every_parameter() -> None:
    model = Model(SMALL, SMALL.table(2))
    theta = SMALL.start(model.table, 0) + np.float32(0.1)  # biases that are not zero
    windows = np.random.default_rng(1).integers(0, 5, (40, 4))
    windows[:, 1] = windows[:, 0]  # a symbol twice in one window
    gradient = model.gradient(theta, windows)
    step = 1e-2
    for index in range(theta.size):
        ends = []
        for sign in (1.0, -1.0):
            moved = theta.copy()
            moved[index] += np.float32(sign * step)
            ends.append(model.loss(moved, windows))
        slope = (ends[0] - ends[1]) / (2.0 * step)
        assert gradient[index] == pytest.approx(slope, abs=3e-4), index


def test_the_loss_of_even_shares_is_the_logarithm_of_the_number_of_symbols() -> None:
    model = Model(SMALL, SMALL.table(1))
    windows = np.random.default_rng(1).integers(0, 5, (40, 4))
    nothing = np.zeros(SMALL.parameters, np.float32)
    assert model.loss(nothing, windows) == pytest.approx(np.log(5.0), rel=1e-6)


def test_adam_steps_as_its_paper_says() -> None:
    rng = np.random.default_rng(2)
    adam, theta = Adam(6), np.zeros(6, np.float32)
    first, second, expected = np.zeros(6), np.zeros(6), np.zeros(6)
    for number in range(1, 6):
        gradient = rng.normal(0.0, 0.2, 6).astype(np.float32)
        theta = adam.step(theta, gradient, 0.01)
        first = BETA_1 * first + (1.0 - BETA_1) * gradient
        second = BETA_2 * second + (1.0 - BETA_2) * gradient.astype(np.float64) ** 2
        spread = np.sqrt(second / (1.0 - BETA_2**number)) + EPSILON
        expected -= 0.01 * first / (1.0 - BETA_1**number) / spread
    np.testing.assert_allclose(theta, expected, rtol=1e-4)


def test_a_long_gradient_is_cut_to_length_one() -> None:
    short, long = np.full(4, 0.5, np.float32), np.full(4, 500.0, np.float32)
    zero = np.zeros(4, np.float32)
    one, other = Adam(4), Adam(4)
    one.step(zero, short, 0.1)
    other.step(zero, long, 0.1)
    again = np.array([0.1, -0.2, 0.0, 0.1], np.float32)
    np.testing.assert_array_equal(one.step(zero, again, 0.1), other.step(zero, again, 0.1))


def test_the_model_learns_the_made_text_to_well_below_its_letters_frequencies() -> None:
    trainer = NumpyTrainer.of(Numeric(symbols=60_000), 2, 0)
    theta, learner = trainer.start(), trainer.learner()
    counts = np.bincount(trainer.train[:, -1], minlength=SYMBOLS)
    shares = counts[counts > 0] / counts.sum()
    letters = float(-(shares * np.log(shares)).sum())
    for batch in range(400):
        theta = learner.step(theta, batch)
    assert trainer.evaluate(theta) < letters - 0.5


def test_a_batch_is_the_same_for_whoever_trains_on_it_and_the_held_out_end_is_in_none() -> None:
    trainer, other = (NumpyTrainer.of(Numeric(symbols=TEXT_MIN), 2, 7) for _ in range(2))
    np.testing.assert_array_equal(trainer.windows(3), other.windows(3))
    assert not np.array_equal(trainer.windows(3), trainer.windows(4))
    assert len(trainer.held_out) == HELD_OUT
    assert len(trainer.train) + HELD_OUT + 2 * 6 == TEXT_MIN  # no window of one has the other's end


def test_the_made_text_is_the_same_everywhere() -> None:
    text = made_text(5_000, 0)
    assert text.size == 5_000
    assert set(np.unique(text)) <= set(range(SYMBOLS))
    assert not np.array_equal(text, made_text(5_000, 1))
    digest = hashlib.sha256(text.astype(np.uint8).tobytes()).hexdigest()
    assert digest.startswith("dcee4299bc24eac2")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Numeric(hidden=0), "`numeric.hidden` is 0"),
        (Numeric(rate=0.0), "`numeric.rate`"),
        (Numeric(batch=5_000), "at most 4096"),
        (Numeric(hidden=1_000_000), "parameters; at most"),
        (Numeric(symbols=100), "`numeric.symbols` is 100"),
        (Numeric(evaluate_s=0.0), "`numeric.evaluate_s`"),
    ],
)
def test_a_numeric_table_that_makes_no_sense_is_refused_by_name(plan: Numeric, says: str) -> None:
    with pytest.raises(NumericError, match=says):
        plan.check()


def test_a_text_that_is_missing_is_named() -> None:
    with pytest.raises(NumericError, match=r"/nowhere\.txt cannot be read"):
        NumpyTrainer.of(Numeric(text="/nowhere.txt"), 1, 0)
