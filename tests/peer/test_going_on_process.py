"""A learner's work and its deaths, with real learner processes and no swarm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from dugnad.averaging.fragments import build_table
from dugnad.averaging.tree import Vector
from dugnad.dht.ids import PeerId, RunId
from dugnad.peer import revival
from dugnad.peer.context import Context, Found, Mark, Owner, Work, file_bytes_max, packed, unpacked
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.process import LearnerEvent
from dugnad.peer.learner.protocol import Step
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.progress import ProgressLog
from dugnad.peer.savefile import SaveFolder, read_tensors
from dugnad.peer.trainer import Continuation, LearnerPlan
from dugnad.peer.training import Training, TrainingHooks
from dugnad.peer.units import Contract, Participants, UnitPlan, Units

pytestmark = pytest.mark.slow  # processes

CONFIG = ModelConfig(dim=32, layers=2, heads=2, hidden=48, context=32)
TABLE = build_table(CONFIG.tensor_specs(), 2)
THETA = initial_parameters(TABLE, CONFIG, 1)
SETTINGS = OptimiserSettings(total_tokens=10**5, warmup_tokens=2000, batch_sequences=4)
ME = PeerId(b"p" * 32)
RUN = RunId(b"r" * 32)
MARKS = (Mark(0, 0, bytes(32)),) * 2
OWNER = Owner(RUN, ME, TABLE)
PATIENCE_S = 60.0


class Life(Training):
    """One daemon's life as far as its learner is concerned; `losses` by step."""

    def __init__(self, folder: Path) -> None:
        tokens = folder / "tokens"
        text = np.random.default_rng(0).integers(97, 105, 40_000).astype(np.uint8)
        tokens.write_bytes(text.tobytes())
        plan = LearnerPlan(CONFIG, TABLE, SETTINGS, tokens, dtype="float32", micro_batch=4)
        units = Units(
            ME, UnitPlan(RUN, 1200, 8), Contract(0, ("float32",), 1.0, True, 3), sequence_tokens=32
        )
        units.handle(Participants(b"c" * 32, ((ME, 10),)), 0.0)
        self.losses: dict[int, float] = {}
        self.notes: list[str] = []
        self.failed: list[str] = []
        self.heard = asyncio.Event()
        self.context: Context | None = None
        self.from_disk = False
        hooks = TrainingHooks(
            on_ready=lambda ready: self.heard.set(),
            on_claim=lambda claim: None,
            on_note=lambda kind, text: self.notes.append(f"{kind}: {text}"),
            swarm_tokens=lambda: 0,
            on_failed=self.failed.append,
            still=self._still,
            find=self._find,
        )
        log = ProgressLog(len(TABLE.fragments), CONFIG.context)
        super().__init__(plan, units, log, time.monotonic, hooks, eligible=True)

    @contextlib.asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        yield

    async def _find(self) -> Found:
        known, refs = self.context, tuple(_parts(THETA))
        if known is None:
            return Found(None, None, refs, MARKS)
        moments = known.moments if self.from_disk else None
        return Found(known, Continuation(known.inner, moments), refs, MARKS)

    def _heard(self, event: LearnerEvent) -> None:
        if isinstance(event, Step):
            self.losses[event.step] = event.loss
        super()._heard(event)
        self.heard.set()

    async def until(self, reached: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                self.heard.clear()
                await self.heard.wait()

    async def take(self) -> Context:
        """What the daemon's keeper does."""
        answer = await self.capture()
        vectors = self.trainer.captured()
        assert vectors is not None
        self.context = Context(
            step=answer.step,
            at_ms=0,
            inner=answer.inner,
            marks=MARKS,
            work=Work(
                tuple(one for one in self.log.steps if one.step <= answer.step),
                tuple(self.log.place),
            ),
            refs=tuple(_parts(THETA)),
            theta=vectors[0],
            moments=(vectors[1], vectors[2]),
        )
        return self.context


def _parts(flat: Vector) -> list[Vector]:
    return [
        flat[start : start + size] for start, size in zip(TABLE.offsets, TABLE.sizes, strict=True)
    ]


async def test_the_next_twenty_losses_of_another_daemon_are_those_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    undisturbed = Life(tmp_path)
    await undisturbed.start()
    undisturbed.enable()
    await undisturbed.until(lambda: len(undisturbed.losses) >= 12)
    captured = await undisturbed.take()
    path = SaveFolder(tmp_path, "learner").save(*packed(captured, OWNER))
    await undisturbed.until(lambda: max(undisturbed.losses) >= captured.step + 21)
    await undisturbed.stop()
    after = Life(tmp_path)
    after.context = unpacked(*read_tensors(path, file_bytes_max(TABLE)), OWNER)
    after.from_disk = True
    await after.start()
    after.enable()
    await after.until(lambda: len(after.losses) >= 20)
    await after.stop()
    steps = range(captured.step + 1, captured.step + 21)
    assert [after.losses[n] for n in steps] == [undisturbed.losses[n] for n in steps]
    assert min(after.losses) == captured.step + 1
    assert after.notes == [
        f"context: taken up after step {captured.step}; 2 of 2 fragments go on where they were"
    ]


async def test_five_deaths_in_a_row_pause_it_with_the_reason_and_resume_goes_on_from_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revival, "PAUSE_S", 0.01)
    life = Life(tmp_path)
    await life.start()
    life.enable()
    await life.until(lambda: len(life.losses) >= 5)
    captured = await life.take()
    pid = _kill(life, None)
    await life.until(lambda: life.ready is None)
    while not life.failed:
        await asyncio.sleep(0.01)
        if life.trainer.pid not in (None, pid):
            pid = _kill(life, pid)
    (reason,) = life.failed
    assert reason == f"the learner died 5 times in a row: {life.fault.split(': ', 1)[1]}"
    assert "SIGKILL" in reason
    assert life.trainer.pid is None
    assert life.trainer.plan.micro_batch == 1, "halved with each death"
    life.losses.clear()
    life.revive()
    await life.until(lambda: life.losses)
    await life.stop()
    trained = {n for one in life.log.steps for p in one.pieces for n in range(p.start, p.stop)}
    assert trained
    assert [one.step for one in life.log.steps][: captured.step] == list(
        range(1, captured.step + 1)
    ), "what was captured is still to be handed in, what came after it is not"


def _kill(life: Life, known: int | None) -> int:
    pid = life.trainer.pid
    assert pid is not None
    assert pid != known
    os.kill(pid, signal.SIGKILL)
    return pid
