"""The daemon's handle on real learner processes: their work, their memory, and every way that
they end.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import uvloop

from dugnad.averaging.fragments import build_table
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.trainer import (
    Exited,
    Failed,
    Idle,
    LearnerEvent,
    LearnerGone,
    LearnerPlan,
    Step,
    Trainer,
    Work,
)

pytestmark = pytest.mark.slow  # processes

CONFIG = ModelConfig(dim=32, layers=2, heads=2, hidden=48, context=32)
TABLE = build_table(CONFIG.tensor_specs(), 2)
THETA = initial_parameters(TABLE, CONFIG, 1)
SETTINGS = OptimiserSettings(total_tokens=10**6, batch_sequences=4)
PATIENCE_S = 60.0


class Peer:
    """A trainer and what it reported."""

    def __init__(self, folder: Path) -> None:
        tokens = folder / "tokens"
        text = np.random.default_rng(0).integers(97, 105, 20_000).astype(np.uint8)
        tokens.write_bytes(text.tobytes())
        plan = LearnerPlan(CONFIG, TABLE, SETTINGS, tokens, dtype="float32", micro_batch=4)
        self.events: list[LearnerEvent] = []
        self.heard = asyncio.Event()
        self.trainer = Trainer(plan, self._hear)

    def _hear(self, event: LearnerEvent) -> None:
        self.events.append(event)
        self.heard.set()

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                self.heard.clear()
                await self.heard.wait()

    async def until_event(self, kind: type[LearnerEvent]) -> LearnerEvent:
        await self.until(lambda: any(isinstance(event, kind) for event in self.events))
        return next(event for event in self.events if isinstance(event, kind))


@pytest_asyncio.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    await peer.trainer.stop()
    peer.trainer.close()


async def test_a_learner_trains_what_it_is_given_and_hands_its_parameters_over(peer: Peer) -> None:
    trainer = peer.trainer
    ready = await trainer.start(THETA)
    assert (ready.device, ready.dtype, ready.micro_batch) == ("cpu", "float32", 4)
    before = await trainer.evaluate(THETA, list(range(500, 540)))
    trainer.give(Work(0, 3, 0, list(range(400)), 0))
    seen = 0
    while trainer.outstanding > 0:
        for fragment in (0, 1):
            copy = await trainer.copy_out(fragment)
            assert len(peer.steps) >= copy.step >= seen  # every step before the copy was heard
            seen = copy.step
            await trainer.add_in(fragment, np.zeros_like(copy.theta))
    pieces = [(p.start, p.stop) for step in peer.steps for p in step.pieces]
    assert pieces == [(n, n + 4) for n in range(0, 400, 4)]
    theta = np.concatenate([(await trainer.copy_out(p)).theta for p in (0, 1)])
    after = await trainer.evaluate(theta, list(range(500, 540)))
    assert after < before - 1.0
    assert len(await trainer.sample(None, b"abc", 12, 1)) == 12
    peer.events.clear()
    exited = await trainer.stop()
    assert exited == Exited(0, "stopped", expected=True)
    assert peer.events[-1] == exited


async def test_additions_are_made_even_when_their_caller_gave_up(peer: Peer) -> None:
    await peer.trainer.start(THETA)
    one = np.ones(TABLE.sizes[0], np.float32)
    given_up = asyncio.create_task(peer.trainer.add_in(0, one))
    await asyncio.sleep(0)  # it has sent its request
    given_up.cancel()
    await peer.trainer.add_in(0, one * 2)
    copy = await peer.trainer.copy_out(0)
    assert np.array_equal(copy.theta, THETA[: one.size] + 1 + 2)
    assert given_up.cancelled()


async def test_a_killed_learner_is_reported_and_another_goes_on_from_given_parameters(
    peer: Peer,
) -> None:
    await peer.trainer.start(THETA)
    peer.trainer.give(Work(0, 0, 0, [1] * 40_000, 0))
    await peer.until_event(Step)
    pid = peer.trainer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that it cannot answer any more
    asked = asyncio.create_task(peer.trainer.copy_out(0))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LearnerGone, match="SIGKILL"):
        await asked
    exited = peer.events[-1]
    assert isinstance(exited, Exited)
    assert (exited.returncode, exited.expected) == (-signal.SIGKILL, False)
    with pytest.raises(LearnerGone, match="SIGKILL"):
        peer.trainer.give(Work(0, 0, 0, [1], 0))
    steps = peer.trainer.step
    ready = await peer.trainer.restart(THETA, micro_batch=2)
    assert ready.micro_batch == 2
    copy = await peer.trainer.copy_out(1)
    assert np.array_equal(copy.theta, THETA[TABLE.offsets[1] :])
    assert copy.step == steps > 0


async def test_a_learner_ignores_the_signals_that_are_meant_for_the_daemon(peer: Peer) -> None:
    await peer.trainer.start(THETA)
    pid = peer.trainer.pid
    assert pid is not None
    assert psutil.Process(pid).nice() >= 10
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert (await peer.trainer.copy_out(0)).step == 0


async def test_a_stopped_learner_that_does_not_answer_is_killed(peer: Peer) -> None:
    await peer.trainer.start(THETA)
    assert peer.trainer.pid is not None
    os.kill(peer.trainer.pid, signal.SIGSTOP)
    exited = await peer.trainer.stop(0.2)
    assert exited is not None
    assert exited.returncode == -signal.SIGKILL
    assert peer.trainer.pid is None


async def test_a_learner_that_cannot_go_on_says_why(peer: Peer) -> None:
    await peer.trainer.start(np.full_like(THETA, np.nan))
    peer.trainer.give(Work(0, 0, 0, [1] * 100, 0))
    exited = await peer.until_event(Exited)
    assert isinstance(exited, Exited)
    assert "not finite" in exited.reason
    assert any(isinstance(event, Failed) for event in peer.events)


async def test_a_start_that_cannot_be_met_says_why_and_leaves_nothing(peer: Peer) -> None:
    wrong = Trainer(
        LearnerPlan(CONFIG, TABLE, SETTINGS, peer.trainer.plan.tokens, device="abacus"),
        lambda event: None,
    )
    with pytest.raises(LearnerGone, match="unknown device 'abacus'"):
        await wrong.start(THETA)
    assert wrong.pid is None
    wrong.close()
    with pytest.raises(ValueError, match="expected"):
        await peer.trainer.start(THETA[1:])


async def test_a_capped_learner_rests_in_proportion(peer: Peer) -> None:
    await peer.trainer.start(THETA)
    peer.trainer.set_cpu_share(0.2)
    peer.trainer.give(Work(0, 0, 0, [1] * 40_000, 0))
    await peer.until(lambda: len(peer.steps) >= 5)
    assert peer.trainer.pid is not None
    process = psutil.Process(peer.trainer.pid)
    begin, begin_cpu = time.monotonic(), sum(process.cpu_times()[:2])
    steps = len(peer.steps)
    await peer.until(lambda: time.monotonic() > begin + 2.0 and len(peer.steps) > steps + 1)
    used = (sum(process.cpu_times()[:2]) - begin_cpu) / (time.monotonic() - begin)
    assert used < 0.3  # others may take its time, nobody adds to it
    peer.trainer.pause()
    await peer.trainer.copy_out(0)
    assert not [event for event in peer.events if isinstance(event, Idle)][1:]


def test_no_learner_outlives_its_daemon(tmp_path: Path) -> None:
    script = f"""
        import asyncio, importlib.util, sys
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("peers", {__file__!r})
        peers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(peers)
        async def main():
            peer = peers.Peer(Path({str(tmp_path)!r}))
            await peer.trainer.start(peers.THETA)
            peer.trainer.give(peers.Work(0, 0, 0, [1] * 60_000, 0))
            print(peer.trainer.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        learner = psutil.Process(int(daemon.stdout.readline()))
        daemon.kill()
        daemon.wait()
        learner.wait(PATIENCE_S)
    assert not learner.is_running()


def test_the_daemon_side_loads_no_torch() -> None:
    code = (
        "import sys, dugnad.peer.trainer, dugnad.peer.corpus, dugnad.peer.init;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_handle_works_on_uvloop_too(tmp_path: Path) -> None:
    async def train() -> None:
        peer = Peer(tmp_path)
        await peer.trainer.start(THETA)
        peer.trainer.give(Work(0, 0, 0, [1, 2, 3, 4], 0))
        await peer.until_event(Step)
        assert (await peer.trainer.copy_out(0)).step == 1
        assert await peer.trainer.stop() == Exited(0, "stopped", expected=True)
        peer.trainer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(train())
