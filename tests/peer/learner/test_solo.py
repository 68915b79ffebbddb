"""A peer alone, at η = 1 and μ = 0, learns what a plain torch loop learns: the exchange costs
nothing.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dugnad.averaging.fragments import build_table
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.trainer import LearnerEvent, LearnerPlan, Step, Trainer, Work

CONFIG = ModelConfig(dim=32, layers=2, heads=2, hidden=48, context=32)
TABLE = build_table(CONFIG.tensor_specs(), 3)
SETTINGS = OptimiserSettings(
    total_tokens=10**6, learning_rate=3e-3, decay="none", batch_sequences=4
)
BATCHES = 60


@pytest.mark.slow
async def test_a_solo_peer_learns_like_plain_torch(
    tmp_path: Path, plain_loop: Callable[..., Callable[[Sequence[Sequence[int]]], list[float]]]
) -> None:
    text = np.random.default_rng(0).integers(97, 105, 40_000).astype(np.uint8)
    tokens = tmp_path / "tokens"
    tokens.write_bytes(text.tobytes())
    order = np.random.default_rng(1).permutation(1000)[: 4 * BATCHES].tolist()
    steps: list[Step] = []

    def hear(event: LearnerEvent) -> None:
        if isinstance(event, Step):
            steps.append(event)

    theta = initial_parameters(TABLE, CONFIG, 1)
    plan = LearnerPlan(CONFIG, TABLE, SETTINGS, tokens, dtype="float32", micro_batch=2)
    trainer = Trainer(plan, hear)
    await trainer.start(theta)
    anchor = theta.copy()
    exchanged: set[tuple[int, int]] = set()
    trainer.give(Work(0, 0, 0, order, 0))
    while trainer.outstanding:
        for fragment, offset in enumerate(TABLE.offsets):
            part = anchor[offset : offset + TABLE.sizes[fragment]]
            copy = await trainer.copy_out(fragment)
            gradient = part - copy.theta  # the pseudo-gradient; ref is now copy.theta
            part -= gradient  # η = 1, μ = 0
            await trainer.add_in(fragment, part - copy.theta)
            exchanged.add((fragment, copy.step))
        await asyncio.sleep(0)
    await trainer.stop()
    trainer.close()
    batches = [order[i : i + 4] for i in range(0, len(order), 4)]
    plain = plain_loop(CONFIG, TABLE, theta, SETTINGS, text)(batches)
    assert [step.loss for step in steps] == pytest.approx(plain, rel=1e-5)
    assert plain[-1] < plain[0] - 1.0
    assert len(exchanged) > 2 * len(TABLE.fragments)
