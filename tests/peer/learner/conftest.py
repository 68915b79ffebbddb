"""The loop that anybody would write with torch, to judge ours by."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F

from dugnad.averaging.fragments import FragmentTable
from dugnad.peer.learner.model import Transformer
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig

Plain = Callable[
    [
        ModelConfig,
        FragmentTable,
        npt.NDArray[np.float32],
        OptimiserSettings,
        npt.NDArray[np.uint8],
    ],
    Callable[[Sequence[Sequence[int]]], list[float]],
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two cores are shared by everything that is tested."""
    torch.set_num_threads(1)


@pytest.fixture
def plain_loop() -> Plain:
    """A function of (config, table, theta, settings, text) that gives a function from batches of
    sequence numbers to the loss of each step, at the constant rate of the settings.
    """
    return _plain_loop


def _plain_loop(
    config: ModelConfig,
    table: FragmentTable,
    theta: npt.NDArray[np.float32],
    settings: OptimiserSettings,
    text: npt.NDArray[np.uint8],
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    network = Transformer(config)
    named = table.unpack(theta)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in named.items()})
    parameters = list(network.parameters())
    embedding = network.model.embed_tokens.weight
    matrices = [p for p in parameters if p.ndim == 2 and p is not embedding]
    others = [p for p in parameters if p.ndim == 1 or p is embedding]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    length = config.context

    def train(batches: Sequence[Sequence[int]]) -> list[float]:
        losses = []
        for batch in batches:
            rows = [torch.from_numpy(text[i * length : (i + 1) * length + 1]) for i in batch]
            windows = torch.stack(rows).long()
            logits = network(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        return losses

    return train
