"""Our AdamW against torch's."""

import pytest
import torch

from dugnad.peer.learner import adamw
from dugnad.peer.learner.adamw import AdamW
from dugnad.peer.learner.schedule import OptimiserSettings

pytestmark = pytest.mark.slow  # torch's own optimiser takes seconds to load

SETTINGS = OptimiserSettings(total_tokens=1, weight_decay=0.3)


@pytest.mark.parametrize("chunk", [7, 100, 1 << 18])
@pytest.mark.parametrize("decayed", [0, 50, 120])
def test_updates_are_those_of_torch(
    decayed: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "CHUNK", chunk)
    chance = torch.Generator().manual_seed(0)
    ours = torch.randn(120, generator=chance)
    gradient = torch.zeros(120)
    parts = [torch.nn.Parameter(part.clone()) for part in (ours[:decayed], ours[decayed:])]
    groups = [
        {"params": parts[:1], "weight_decay": 0.3},
        {"params": parts[1:], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    optimiser = AdamW(ours, gradient, decayed, SETTINGS)
    for step in range(20):
        rate = 0.1 / (step + 1)
        gradient.copy_(torch.randn(120, generator=chance))
        parts[0].grad, parts[1].grad = gradient[:decayed].clone(), gradient[decayed:].clone()
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        optimiser.step(rate)
    torch.testing.assert_close(ours, torch.cat([part.data for part in parts]))
