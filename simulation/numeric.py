"""The numeric mode of a scenario: the `[numeric]` table and the trainer that it describes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dugnad.averaging.fragments import FragmentTable
from dugnad.averaging.tree import Vector
from dugnad.simulation.numericmodel import Adam, Model, Shape, Symbols
from dugnad.simulation.numerictext import SYMBOLS, made_text

HELD_OUT: Final = 4096
"""Windows of one evaluation: the end of the text, which nobody trains on."""
BYTES: Final = 256
TEXT_MIN: Final = 4 * HELD_OUT
PARAMETERS_MAX: Final = 1_000_000
"""Vectors of every contribution are kept for the conservation check: larger is for benchmarks."""
BATCH_MAX: Final = 4096


class NumericError(ValueError):
    """A `[numeric]` table that cannot be played; the text names the key and what is wrong."""


class Numeric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the peers train. Counts; learning rate of Adam; virtual seconds."""

    context: int = 6
    """Symbols before the one to be predicted."""
    dim: int = 8
    hidden: int = 64
    batch: int = 32
    """Windows of one step of one peer."""
    rate: float = 0.01
    warmup: int = 20
    """Steps of a learner's life over which its rate rises."""
    symbols: int = 200_000
    """Length of the text that is made, with its held-out end; drawn anew for each seed."""
    text: str = ""
    """A file to train on, byte by byte, in place of the text made in code."""
    evaluate_s: float = 4.0

    def check(self) -> None:
        """Raise :class:`NumericError` for what the types leave open."""
        for name in ("context", "dim", "hidden", "batch", "warmup"):
            if getattr(self, name) < 1:
                raise NumericError(f"`numeric.{name}` is {getattr(self, name)}; it must be above 0")
        if self.batch > BATCH_MAX:
            raise NumericError(f"`numeric.batch` is {self.batch}; at most {BATCH_MAX} are allowed")
        sides = Shape(BYTES if self.text else SYMBOLS, self.context, self.dim, self.hidden)
        if sides.parameters > PARAMETERS_MAX:
            raise NumericError(
                f"`numeric` has {sides.parameters} parameters; at most {PARAMETERS_MAX} are allowed"
            )
        if not 0.0 < self.rate <= 10.0:
            raise NumericError(f"`numeric.rate` is {self.rate}; it must lie between 0 and 10")
        if self.evaluate_s <= 0.0:
            raise NumericError("`numeric.evaluate_s` must be above 0")
        if not TEXT_MIN <= self.symbols <= 100 * PARAMETERS_MAX:
            raise NumericError(
                f"`numeric.symbols` is {self.symbols}; at least {TEXT_MIN} are needed"
            )


@dataclass(slots=True)
class NumpyLearner:
    """Steps on batches that the run's seed and the batch's number draw."""

    trainer: NumpyTrainer
    adam: Adam

    def step(self, theta: Vector, batch: int) -> Vector:
        """The parameters after one step from ``theta`` on batch number ``batch``."""
        trainer, plan = self.trainer, self.trainer.plan
        gradient = trainer.model.gradient(theta, trainer.windows(batch))
        rate = plan.rate * min(1.0, (self.adam.steps + 1) / plan.warmup)
        return self.adam.step(theta, gradient, rate)


@dataclass(slots=True)
class NumpyTrainer:
    """The numpy model, its text and its held-out windows: a trainer of the numeric stage."""

    plan: Numeric
    seed: int
    model: Model
    train: Symbols = field(repr=False)
    """Windows to train on, (count, context + 1); a view of the text."""
    held_out: Symbols = field(repr=False)

    @classmethod
    def of(cls, plan: Numeric, fragments: int, seed: int) -> NumpyTrainer:
        """The trainer of a scenario with this seed; :class:`NumericError` for a bad text."""
        text = _read(plan.text) if plan.text else made_text(plan.symbols, seed)
        shape = Shape(BYTES if plan.text else SYMBOLS, plan.context, plan.dim, plan.hidden)
        windows = np.lib.stride_tricks.sliding_window_view(text, plan.context + 1)
        cut = len(windows) - HELD_OUT
        model = Model(shape, shape.table(fragments))
        return cls(plan, seed, model, windows[: cut - plan.context], windows[cut:])

    @property
    def table(self) -> FragmentTable:
        """How the parameters lie in fragments."""
        return self.model.table

    def start(self) -> Vector:
        """Version 0 of all parameters."""
        return self.model.shape.start(self.table, self.seed)

    def learner(self) -> NumpyLearner:
        """A learner with fresh moments."""
        return NumpyLearner(self, Adam(self.table.total))

    def windows(self, batch: int) -> Symbols:
        """The windows of batch number ``batch``: the same whoever trains on it."""
        rng = np.random.default_rng([self.seed, 3, batch])
        return self.train[rng.integers(0, len(self.train), self.plan.batch)]

    def evaluate(self, theta: Vector) -> float:
        """Held-out loss in nats a symbol."""
        return self.model.loss(theta, self.held_out)


def _read(name: str) -> Symbols:
    try:
        data = Path(name).read_bytes()
    except OSError as fault:
        raise NumericError(f"`numeric.text`: {name} cannot be read: {fault}") from fault
    if len(data) < TEXT_MIN:
        raise NumericError(f"`numeric.text`: {name} has {len(data)} bytes, fewer than {TEXT_MIN}")
    return np.frombuffer(data, np.uint8).astype(np.int64)
