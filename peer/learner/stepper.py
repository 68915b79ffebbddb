"""One optimiser step after the other: micro-batches, clipping, AdamW. The straight line of
training.
"""

import contextlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dugnad.peer.corpus import TokenFile
from dugnad.peer.learner.adamw import AdamW
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.schedule import OptimiserSettings


class OutOfMemory(Exception):
    """Not even one sequence at a time fits into the device's memory."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss` in nats a token; `skipped` when it or the gradient's `norm` was not finite."""

    loss: float
    tokens: int
    skipped: bool
    norm: float = 0.0


class Stepper:
    """AdamW over a FlatModel. `micro_batch` may be set between steps; a lack of memory halves
    it.
    """

    def __init__(
        self, model: FlatModel, settings: OptimiserSettings, tokens: TokenFile, dtype: torch.dtype
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.micro_batch = settings.batch_sequences
        self._settings = settings
        self._tokens = tokens
        self._gradient = model.flat_gradient()
        self.optimiser = AdamW(model.flat, self._gradient, model.decayed, settings)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    @property
    def context(self) -> int:
        """Tokens of one sequence."""
        return self.model.config.context

    def step(self, sequences: list[int], learning_rate: float) -> StepResult:
        """Train on `sequences`, all in one optimiser step. OutOfMemory when one at a time is too
        many.
        """
        loss = self._gradient_of(sequences)
        norm = torch.linalg.vector_norm(self._gradient)
        token_count = len(sequences) * self.model.config.context
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            self._gradient.zero_()
            return StepResult(loss, 0, skipped=True)
        self._gradient.mul_((self._settings.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimiser.step(learning_rate)
        self._gradient.zero_()
        return StepResult(loss, token_count, skipped=False, norm=norm.item())

    def forget(self) -> None:
        """Begin anew: the moments are zero, as at the start."""
        self.optimiser.reset()

    def time_micro_batch(self, size: int) -> None:
        """Do the work of one micro-batch of `size` sequences and forget it: for the probe's
        stopwatch.
        """
        windows = torch.zeros((size, self.model.config.context + 1), dtype=torch.int64)
        try:
            self._backward(windows, scale=1.0).item()
        finally:  # also when it does not fit, half-way through
            self._gradient.zero_()

    def _gradient_of(self, sequences: list[int]) -> float:
        """Accumulate the gradient of the mean loss over all tokens; returns that loss."""
        while True:
            try:
                return self._accumulate(sequences)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self._gradient.zero_()
            release_memory(self.model.device)
            if self.micro_batch == 1:
                raise OutOfMemory(
                    f"one sequence does not fit into the memory of {self.model.device}"
                )
            self.micro_batch = min(self.micro_batch, len(sequences)) // 2 or 1

    def _accumulate(self, sequences: list[int]) -> float:
        context = self.model.config.context
        scale = 1.0 / (len(sequences) * context)
        total = torch.zeros((), device=self.model.device)
        for start in range(0, len(sequences), self.micro_batch):
            windows = self._tokens.sequences(sequences[start : start + self.micro_batch], context)
            total += self._backward(torch.from_numpy(windows.astype(np.int64)), scale)
        return total.item()

    def _backward(self, windows: Tensor, scale: float) -> Tensor:
        with autocast(self.model.device, self.dtype):
            loss = self.model.network.loss_sum(windows.to(self.model.device)) * scale
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        return loss.detach()


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """The context in which a forward pass uses `dtype`; nothing at all for float32."""
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says that memory ran out: a class of its own on CUDA, only a text elsewhere."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in text
        or "can't allocate memory" in text
    )


def release_memory(device: torch.device) -> None:
    """Give cached memory of an accelerator back to its driver, so that less can fit again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "xpu":
        torch.xpu.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
