"""The peers' own model, AdamW and step as a task of the numeric benchmarks (`_numericworld`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from dugnad.averaging.fragments import FragmentTable, build_table
from dugnad.averaging.tree import Vector
from dugnad.peer.corpus import TokenFile, split
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.schedule import OptimiserSettings, learning_rate
from dugnad.peer.learner.stepper import Stepper
from dugnad.peer.modelconfig import ModelConfig

CPU: Final = torch.device("cpu")
EVALUATED_SEQUENCES: Final = 768
"""Held-out sequences of one evaluation, spread over all that is held out."""
EVALUATION_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class TorchTask:
    """What is trained: everything that the exchange and its baselines have in common."""

    config: ModelConfig
    tokens: TokenFile
    seed: int
    steps: int
    """Optimiser steps of each peer, when all are equally fast."""
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
        wanted = self.batches * self.batch
        rounds = -(-wanted // len(parts.train))
        order = np.concatenate([rng.permutation(len(parts.train)) for _ in range(rounds)])
        count = min(EVALUATED_SEQUENCES, len(parts.held_out))
        chosen = np.linspace(parts.held_out.start, parts.held_out.stop - 1, count).astype(np.int64)
        table = build_table(self.config.tensor_specs(), self.fragments)
        for name, value in ("table", table), ("order", order), ("held_out", chosen.tolist()):
            object.__setattr__(self, name, value)

    @property
    def batches(self) -> int:
        """Steps of all peers together."""
        return self.steps * self.peers

    @property
    def batch_tokens(self) -> int:
        """Tokens of one peer's step."""
        return self.batch * self.config.context

    def start(self) -> Vector:
        """Version 0 of all parameters, in the table's order."""
        return initial_parameters(self.table, self.config, self.seed)

    def settings(self, batch: int) -> OptimiserSettings:
        """AdamW for steps of ``batch`` sequences, over the whole swarm's tokens."""
        total = self.batches * self.batch_tokens
        return OptimiserSettings(
            total_tokens=total,
            learning_rate=self.rate,
            warmup_tokens=total // 20,
            batch_sequences=batch,
        )

    def learner(self, count: int = 1) -> TorchLearner:
        """A learner at version 0 with fresh moments, for steps of ``count`` batches."""
        model = FlatModel(self.config, self.table, CPU)
        model.load(self.start())
        settings = self.settings(count * self.batch)
        return TorchLearner(self, model, Stepper(model, settings, self.tokens, torch.float32))

    def evaluate(self, theta: Vector) -> float:
        """Held-out loss, nats a token."""
        anchors = Anchors(self.config, self.table, CPU)
        return anchors.evaluate(theta, self.tokens, self.held_out, EVALUATION_BATCH)


@dataclass(slots=True)
class TorchLearner:
    """One virtual learner: the peer's model, optimiser and step."""

    task: TorchTask
    model: FlatModel
    stepper: Stepper

    def step(self, theta: Vector, batch: int) -> Vector:
        """The parameters after one step from ``theta`` on batch number ``batch`` of the run."""
        self.model.load(theta)
        self.train(batch)
        return self.theta()

    def train(self, batch: int, count: int = 1) -> None:
        """One step on ``count`` batches from number ``batch`` on, at the rate the run has by then.

        The rate is that of the round in which all peers step once, for every way of training.
        """
        task = self.task
        at = batch * task.batch
        done = (batch // task.peers + 1) * task.peers * task.batch_tokens
        rate = learning_rate(task.settings(task.batch), done)
        self.stepper.step(task.order[at : at + count * task.batch].tolist(), rate)

    def load(self, theta: Vector) -> None:
        """Take all parameters from a vector in the table's order."""
        self.model.load(theta)

    def theta(self) -> Vector:
        """A copy of all parameters, in the table's order."""
        vector = np.empty(self.task.table.total, np.float32)
        for fragment in range(self.task.fragments):
            self.model.copy_out(fragment, vector)
        return vector
