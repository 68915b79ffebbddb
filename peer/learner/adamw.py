"""AdamW over the flat parameters, in a few plain tensor operations.

Not torch.optim: making any of its optimisers loads torch's compiler (850 modules, 1 to 2 seconds
and tens of megabytes in every learner). A fused step would save 0.6 ms of a 90 ms step of the
default model. The moments are two flat tensors ordered like the parameters.
"""

import math
from typing import Final

import torch
from torch import Tensor

from dugnad.peer.learner.schedule import OptimiserSettings

CHUNK: Final = 1 << 18
"""Elements updated at a time on a CPU: 5 arrays of 1 MB stay in its cache. Measured: a quarter
faster than all at once for 8 M parameters, and no slower for fewer."""


class AdamW:
    """Decoupled weight decay on the first `decayed` elements; the moments start at zero."""

    def __init__(
        self, parameters: Tensor, gradient: Tensor, decayed: int, settings: OptimiserSettings
    ) -> None:
        self._settings = settings
        self.steps = 0
        self.first_moment = torch.zeros_like(parameters)
        self.second_moment = torch.zeros_like(parameters)
        size = CHUNK if parameters.device.type == "cpu" else max(1, parameters.numel())
        tensors = (parameters, gradient, self.first_moment, self.second_moment)
        self._chunks = [
            (part, settings.weight_decay if start < decayed else 0.0)
            for low, high in ((0, decayed), (decayed, parameters.numel()))
            for start in range(low, high, size)
            for part in [tuple(t[start : min(start + size, high)] for t in tensors)]
        ]

    def reset(self) -> None:
        """Set the moments back to zero and count steps from the start."""
        self.steps = 0
        self.first_moment.zero_()
        self.second_moment.zero_()

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from the gradient. Kingma and Ba 2015; Loshchilov and Hutter
        2019.
        """
        settings = self._settings
        self.steps += 1
        first_scale = -learning_rate / (1.0 - settings.beta1**self.steps)
        second_root = math.sqrt(1.0 - settings.beta2**self.steps)
        for (theta, gradient, first, second), weight_decay in self._chunks:
            if weight_decay:
                theta.mul_(1.0 - learning_rate * weight_decay)
            first.lerp_(gradient, 1.0 - settings.beta1)
            second.mul_(settings.beta2).addcmul_(gradient, gradient, value=1.0 - settings.beta2)
            spread = second.sqrt().div_(second_root).add_(settings.epsilon)
            theta.addcdiv_(first, spread, value=first_scale)
