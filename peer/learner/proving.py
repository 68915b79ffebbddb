"""A trial: short chains of training from the anchors with fresh moments, beside the own training.

The model and optimizer of a trial exist only while it lasts. One chain at a time, so that whoever
wants something of the learner meanwhile waits for two steps at most.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dugnad.peer.learner.protocol import Prove
from dugnad.peer.learner.stepper import OutOfMemory, Stepper, is_out_of_memory, release_memory


class Proving:
    """One trial under way: `values` holds what the chains so far came to."""

    def __init__(self, asked: Prove, make: Callable[[], Stepper], micro_batch: int) -> None:
        self.ticket = asked.ticket
        self.values: list[tuple[float, float]] = []
        self._chains = asked.chains
        self._steps = asked.steps
        self._make = make
        self._micro_batch = micro_batch
        self._stepper: Stepper | None = None

    def advance(self, anchor: npt.NDArray[np.float32], learning_rate: float) -> bool:
        """Do the next chain; whether the trial is over. A lack of memory ends it without values."""
        try:
            self.values.append(self._chain(anchor, learning_rate))
        except OutOfMemory:
            return self._give_up()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return self._give_up()
        return len(self.values) == len(self._chains)

    def _chain(self, anchor: npt.NDArray[np.float32], rate: float) -> tuple[float, float]:
        if self._stepper is None:
            self._stepper = self._make()
            self._stepper.micro_batch = self._micro_batch
        stepper, chain = self._stepper, self._chains[len(self.values)]
        stepper.model.load(anchor)
        stepper.forget()
        size = len(chain) // self._steps
        result = None
        for start in range(0, len(chain), size):
            result = stepper.step(chain[start : start + size], rate)
        assert result is not None, "a chain has sequences"
        return result.loss, result.norm

    def _give_up(self) -> bool:
        device = self._stepper.model.device if self._stepper is not None else None
        self._stepper = None
        self.values.clear()
        if device is not None:
            release_memory(device)
        return True
