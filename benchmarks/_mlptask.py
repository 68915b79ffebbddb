"""The simulator's numpy model on real text as a task of the numeric benchmarks.

The same rate, warm-up and cosine as the peers' own learner, at a tenth of its cost: a step of a
million parameters on 64 windows takes 9 ms, one of 50 thousand under 1 ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.fragments import FragmentTable
from dugnad.averaging.tree import Vector
from dugnad.simulation.numericmodel import Adam, Model, Shape, Symbols

EVALUATED: Final = 16_384
"""Held-out windows of one evaluation, spread over the last fiftieth of the text."""
EVALUATION_BATCH: Final = 2_048
FINAL_FRACTION: Final = 0.1
"""Of the rate, at the end: the default of the peers' own schedule."""


@dataclass(frozen=True, slots=True)
class Text:
    """Symbols of a text, numbered by what stands in it; windows to train on and held out."""

    symbols: int
    train: Symbols
    held_out: Symbols

    @classmethod
    def of(cls, data: npt.NDArray[np.uint8], context: int) -> Text:
        """Number the bytes of ``data`` and cut its last fiftieth off."""
        known, numbered = np.unique(data, return_inverse=True)
        windows = np.lib.stride_tricks.sliding_window_view(numbered, context + 1)
        cut = len(windows) - data.size // 50
        chosen = np.linspace(cut, len(windows) - 1, EVALUATED).astype(np.int64)
        return cls(known.size, windows[: cut - context], windows[chosen])


@dataclass(frozen=True, slots=True)
class MlpTask:
    """What is trained; `batch` windows a step and peer, `rate` at its peak."""

    text: Text
    model: Model
    seed: int
    steps: int
    peers: int
    batch: int
    rate: float

    @classmethod
    def of(
        cls, text: Text, *, seed: int, steps: int, peers: int, batch: int, rate: float, sides: Sides
    ) -> MlpTask:
        """The task for a model of these sides."""
        shape = Shape(text.symbols, sides.context, sides.dim, sides.hidden)
        return cls(
            text, Model(shape, shape.table(sides.fragments)), seed, steps, peers, batch, rate
        )

    @property
    def table(self) -> FragmentTable:
        """How the parameters lie in fragments."""
        return self.model.table

    def start(self) -> Vector:
        """Version 0 of all parameters, in the table's order."""
        return self.model.shape.start(self.table, self.seed)

    def learner(self, count: int = 1) -> MlpLearner:
        """A learner at version 0 with fresh moments."""
        return MlpLearner(self, Adam(self.table.total), self.start())

    def evaluate(self, theta: Vector) -> float:
        """Held-out loss, nats a symbol."""
        parts = np.split(self.text.held_out, EVALUATED // EVALUATION_BATCH)
        return sum(self.model.loss(theta, part) for part in parts) / len(parts)

    def windows(self, batch: int, count: int) -> Symbols:
        """The windows of ``count`` batches from number ``batch`` on, the same for all ways."""
        found = []
        for number in range(batch, batch + count):
            rng = np.random.default_rng([self.seed, 3, number])
            found.append(self.text.train[rng.integers(0, len(self.text.train), self.batch)])
        return np.concatenate(found)

    def rate_at(self, batch: int) -> float:
        """The rate in the round of this batch: rises for a twentieth, then a cosine to a tenth."""
        done = (batch // self.peers + 1) / self.steps
        if done < 0.05:
            return self.rate * done / 0.05
        left = 0.5 * (1.0 + math.cos(math.pi * min(1.0, (done - 0.05) / 0.95)))
        return self.rate * (FINAL_FRACTION + (1.0 - FINAL_FRACTION) * left)


@dataclass(frozen=True, slots=True)
class Sides:
    """How large a model is."""

    context: int
    dim: int
    hidden: int
    fragments: int = 4


@dataclass(slots=True)
class MlpLearner:
    """One virtual learner."""

    task: MlpTask
    adam: Adam
    parameters: Vector

    def step(self, theta: Vector, batch: int) -> Vector:
        """The parameters after one step from ``theta`` on batch number ``batch`` of the run."""
        return self._stepped(theta, batch, 1)

    def train(self, batch: int, count: int = 1) -> None:
        """One step of its own parameters on ``count`` batches from number ``batch`` on."""
        self.parameters = self._stepped(self.parameters, batch, count)

    def load(self, theta: Vector) -> None:
        """Take these parameters."""
        self.parameters = theta

    def theta(self) -> Vector:
        """A copy of its parameters."""
        return self.parameters.copy()

    def _stepped(self, theta: Vector, batch: int, count: int) -> Vector:
        task = self.task
        gradient = task.model.gradient(theta, task.windows(batch, count))
        return self.adam.step(theta, gradient, task.rate_at(batch))
