"""Text from a model, byte after byte: what `dugnad sample` shows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dugnad.averaging.fragments import FragmentTable
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.modelconfig import BYTE_VALUES, ModelConfig


class Sampler:
    """A model on the CPU that goes on with a text. ``theta`` has the order of the table."""

    def __init__(
        self, config: ModelConfig, table: FragmentTable, theta: npt.NDArray[np.float32]
    ) -> None:
        self.config = config
        self.model = FlatModel(config, table, torch.device("cpu"))
        self.model.load(theta)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """(len(tokens), vocab) logits; at most `context` tokens."""
        found: npt.NDArray[np.float32] = self.model.network(torch.tensor([tokens]))[0].numpy()
        return found

    def go_on(self, prompt: bytes, count: int, *, temperature: float, seed: int) -> bytes:
        """``count`` bytes after ``prompt``. Temperature 0 takes the likeliest byte each time.

        Equal arguments give equal bytes on one machine. An empty prompt begins as after a new line.
        """
        chance = np.random.default_rng(seed)
        tokens = list(prompt) or [ord("\n")]
        made = bytearray()
        for _ in range(count):
            row = self.logits(tokens[-self.config.context :])[-1, :BYTE_VALUES].astype(np.float64)
            if temperature <= 0.0:
                token = int(row.argmax())
            else:
                odds = np.exp((row - row.max()) / temperature)
                token = int(chance.choice(BYTE_VALUES, p=odds / odds.sum()))
            tokens.append(token)
            made.append(token)
        return bytes(made)
