"""A real, tiny language model in plain numpy: what the simulated peers of a numeric scenario train.

It predicts the next symbol of a text from the `context` symbols before it (Bengio et al. 2003): the
symbols' embeddings side by side, one hidden layer with tanh, a softmax. Gradients are written out
by hand, the optimiser is Adam, all is float32. A training step of the default model takes a third
of a millisecond, so hours of a swarm are simulated in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.fragments import FragmentTable, TensorSpec, build_table
from dugnad.averaging.tree import Vector

BETA_1: Final = 0.9
BETA_2: Final = 0.95
EPSILON: Final = 1e-8
CLIP_NORM: Final = 1.0
"""Adam as the peers' own learner has it (the defaults of its run file), without weight decay."""

CHUNK: Final = 1 << 14
"""Parameters stepped at a time: their six arrays stay in a core's cache. Measured: 1.6 times as
fast as all at once, from 50 thousand parameters to a million."""

Symbols = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sides of the model. All counts are at least 1."""

    symbols: int
    context: int = 6
    dim: int = 8
    hidden: int = 64

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(spec.size for spec in self.tensors())

    def tensors(self) -> list[TensorSpec]:
        """The parameters by name and shape, in the model's order."""
        inputs = self.context * self.dim
        return [
            TensorSpec("embed", (self.symbols, self.dim), "embedding"),
            TensorSpec("hidden", (inputs, self.hidden), "matrix"),
            TensorSpec("hidden_bias", (self.hidden,), "vector"),
            TensorSpec("out", (self.hidden, self.symbols), "matrix"),
            TensorSpec("out_bias", (self.symbols,), "vector"),
        ]

    def table(self, fragments: int) -> FragmentTable:
        """How the parameters lie in so many fragments."""
        return build_table(self.tensors(), fragments)

    def start(self, table: FragmentTable, seed: int) -> Vector:
        """Version 0: uniform, of variance 1/rows in matrices and 1 in embeddings; biases are 0."""
        rng = np.random.default_rng([seed, 0])
        named = {}
        for spec in self.tensors():
            rows = 1 if spec.name == "embed" else spec.shape[0]
            bound = math.sqrt(3.0 / rows) if len(spec.shape) == 2 else 0.0
            named[spec.name] = rng.uniform(-bound, bound, spec.shape).astype(np.float32)
        return table.pack(named)


class Model:
    """Loss and gradient for parameters that lie in one flat vector. Holds no parameters."""

    def __init__(self, shape: Shape, table: FragmentTable) -> None:
        self.shape = shape
        self.table = table

    def loss(self, theta: Vector, windows: Symbols) -> float:
        """Mean loss, nats a symbol, of the last symbol of each window (count, context + 1)."""
        tensors = self.table.unpack(theta)
        _, _, shares = self._forward(tensors, windows)
        rows = np.arange(windows.shape[0])
        return float(-np.log(np.maximum(shares[rows, windows[:, -1]], 1e-30)).mean())

    def gradient(self, theta: Vector, windows: Symbols) -> Vector:
        """The gradient of :meth:`loss` for every parameter, in the table's order."""
        tensors = self.table.unpack(theta)
        inputs, hidden, shares = self._forward(tensors, windows)
        count = windows.shape[0]
        error = shares  # of the logits: softmax minus the symbol that came
        error[np.arange(count), windows[:, -1]] -= 1.0
        error *= np.float32(1.0 / count)
        back = (error @ tensors["out"].T) * (1.0 - hidden * hidden)
        at_inputs = back @ tensors["hidden"].T
        embed = np.zeros((self.shape.symbols, self.shape.dim), np.float32)
        np.add.at(
            embed, windows[:, :-1].reshape(-1), at_inputs.reshape(-1, self.shape.dim)
        )  # a symbol may stand in a window more than once
        return self.table.pack(
            {
                "embed": embed,
                "hidden": inputs.T @ back,
                "hidden_bias": back.sum(axis=0),
                "out": hidden.T @ error,
                "out_bias": error.sum(axis=0),
            }
        )

    def _forward(
        self, tensors: dict[str, npt.NDArray[np.float32]], windows: Symbols
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Inputs (count, context·dim), hidden (count, hidden) and the softmax (count, symbols)."""
        inputs = tensors["embed"][windows[:, :-1]].reshape(windows.shape[0], -1)
        hidden = np.tanh(inputs @ tensors["hidden"] + tensors["hidden_bias"])
        logits = hidden @ tensors["out"] + tensors["out_bias"]
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=1, keepdims=True)
        return inputs, hidden, logits


class Adam:
    """Adam's moments of one learner, and the steps it takes with them."""

    def __init__(self, size: int) -> None:
        """Fresh moments for ``size`` parameters."""
        self.steps = 0
        self._first = np.zeros(size, np.float32)
        self._second = np.zeros(size, np.float32)
        self._room = np.empty(min(size, CHUNK), np.float32)

    def step(self, theta: Vector, gradient: Vector, rate: float) -> Vector:
        """The parameters after one step; a gradient longer than CLIP_NORM is cut to it."""
        norm = math.sqrt(float(gradient @ gradient))
        clip = np.float32(min(1.0, CLIP_NORM / max(norm, 1e-30)))
        self.steps += 1
        spread = np.float32(1.0 / math.sqrt(1.0 - BETA_2**self.steps))
        scale = np.float32(-rate / (1.0 - BETA_1**self.steps))
        moved: Vector = np.empty_like(theta)
        for start in range(0, theta.size, CHUNK):
            part = slice(start, min(start + CHUNK, theta.size))
            first, second, out = self._first[part], self._second[part], moved[part]
            room = self._room[: out.size]
            np.multiply(gradient[part], clip, out=out)
            np.multiply(out, out, out=room)
            for moment, value, beta in ((first, out, BETA_1), (second, room, BETA_2)):
                moment *= np.float32(beta)
                value *= np.float32(1.0 - beta)
                moment += value
            np.sqrt(second, out=room)
            room *= spread
            room += np.float32(EPSILON)
            np.divide(first, room, out=out)
            out *= scale
            out += theta[part]
        return moved
