"""Forward passes with the agreed parameters, also where memory is short."""

import numpy as np
import pytest
import torch

from dugnad.averaging.fragments import build_table
from dugnad.peer.corpus import TokenFile
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.anchors import Anchors
from dugnad.peer.learner.parameters import FlatModel
from dugnad.peer.learner.stepper import OutOfMemory
from dugnad.peer.modelconfig import ModelConfig

CONFIG = ModelConfig(dim=16, layers=1, heads=2, hidden=24, context=16)
TABLE = build_table(CONFIG.tensor_specs(), 2)
THETA = initial_parameters(TABLE, CONFIG, 1)
TOKENS = TokenFile(np.random.default_rng(0).integers(97, 105, 2000).astype(np.uint8))


def cramped(monkeypatch: pytest.MonkeyPatch, room: int) -> list[int]:
    """From now on only `room` sequences fit at a time; the sizes that are tried."""
    tried: list[int] = []
    whole = FlatModel.__init__

    def made(self: FlatModel, *arguments: object) -> None:
        whole(self, *arguments)  # type: ignore[arg-type]  # the same ones
        inner = self.network.loss_sum

        def loss_sum(windows: torch.Tensor) -> torch.Tensor:
            tried.append(len(windows))
            if len(windows) > room:
                raise RuntimeError("CUDA out of memory")
            return inner(windows)

        monkeypatch.setattr(self.network, "loss_sum", loss_sum)

    monkeypatch.setattr(FlatModel, "__init__", made)
    return tried


def test_a_lack_of_memory_halves_the_micro_batch_and_not_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    expected = Anchors(CONFIG, TABLE, device).evaluate(THETA, TOKENS, [1, 2, 3, 4], 4)
    tried = cramped(monkeypatch, 1)
    found = Anchors(CONFIG, TABLE, device).evaluate(THETA, TOKENS, [1, 2, 3, 4], 4)
    assert found == pytest.approx(expected, rel=1e-6)
    assert tried == [4, 2, 1, 1, 1, 1]


def test_not_even_one_sequence_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cramped(monkeypatch, 0)
    with pytest.raises(OutOfMemory, match="one sequence"):
        Anchors(CONFIG, TABLE, torch.device("cpu")).evaluate(THETA, TOKENS, [1], 1)
