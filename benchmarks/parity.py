"""Whether our exchange trains as well as what it replaces, at equal tokens: the numeric simulation.

M learners under a virtual clock, in one process and thread; what they exchange goes through the
real cores, codecs and numeric workers. What trains is the simulator's numpy model on real text
(a feed-forward language model; `learns.py` does the same with the peers' own transformer, at ten
times the cost). Beside ours: *data-parallel* (one step on the batches of all M) and *synchronous*
DiLoCo (nobody late, nothing lost, float32). Every way has the rate that suited it best of those of
its size (`--tune` shows how it was chosen); all see the same batches and start at the same
parameters.

Figures are means over the seeds of ratios within a seed, with a 95 % interval (Student's t). A
ratio is of held-out losses in nats. `--sweep` tries outer rates, momenta and H; `--rows` runs some
rows only (patterns as in a shell).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

# Before numpy is loaded: one thread, as promised above; its own would only wait for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from _mlptask import MlpTask, Sides, Text
from _numericworld import Plan, data_parallel, exchange, synchronous
from _quadratic import add_quadratic

from dugnad.averaging.tree import Vector
from dugnad.peer import kernelload
from dugnad.peer.corpus import build_corpus


@dataclass(frozen=True, slots=True)
class Size:
    """A model and how it is trained, unless the command line says otherwise."""

    sides: Sides
    steps: int
    """Of each peer at M = 4."""
    batch: int
    """Windows a step and peer."""
    rates: tuple[float, ...]
    """That `--tune` tries, each about 1.41 times the one before."""


RATES: Final = (0.002, 0.0028, 0.004, 0.0057, 0.008, 0.0113, 0.016, 0.0226, 0.032, 0.045, 0.064)
SIZES: Final = {
    "small": Size(Sides(context=8, dim=16, hidden=192), 1000, 256, RATES[4:]),
    "medium": Size(Sides(context=12, dim=32, hidden=512), 1000, 256, RATES[3:8]),
    "large": Size(Sides(context=16, dim=48, hidden=1216), 920, 256, RATES[1:7]),
}
"""48 thousand, 0.25 and 1.1 million parameters on the text's 109 symbols. The large one's steps
make 200 hand-ins of a peer; a way of ours takes two CPU minutes then."""
STUDENT_T: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95 % for so many seeds."""
GOALS: Final = {
    "ours_int4_vs_sync": 1.005,
    "ours_topk_vs_f32": 1.005,
    "ours_vs_dp_m4": 1.025,
    "ours_vs_dp_m8": 1.025,
}
HAND_INS_MIN: Final = 200
"""Of one peer and fragment, before topk is judged."""
UNLIKE: Final = ("lean", "churn", "radial", "centred", "spread_linear", "spread_quadratic")
"""Rows that are compared with ours as it is; lean: merges in int4, too."""
LONGER: Final = 2
"""As many steps for the rows in which topk is judged at M = 4 and 8: residuals fill in 64 hand-ins
at 1.56 %, a quarter of the default run at M = 4 and half of it at M = 8."""
FIGURES: Final = "merges", "hand_ins", "steps_a_merge", "residual_share", "listed_share", "bits"
SWEEP_ETA: Final = (0.5, 0.7, 1.0, 1.3)
SWEEP_MU: Final = (0.0, 0.5, 0.9)
SWEEP_H: Final = (4, 8, 16, 32)
SWEPT_MAX: Final = 8.0
"""Largest eta / (1 - mu), the rate that a lasting direction comes to: beyond it nothing was
learned."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training; ``way`` is dp, sync or ours."""

    name: str
    way: str
    peers: int = 4
    plan: Plan = field(default_factory=Plan)
    longer: int = 1
    """Times the steps of the others."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a row came to with one seed."""

    loss: float
    seconds: float
    """CPU seconds."""
    figures: dict[str, float] = field(default_factory=dict)
    """FIGURES of the exchange; empty for the other ways."""


def main() -> None:
    """Measure, print as it goes, and write the numbers to --json."""
    options = parse()
    print(kernelload.serve())
    begin = time.perf_counter()
    add_quadratic()
    data = b"".join(file.read_bytes() for file in build_corpus(options.data).files)
    text = Text.of(np.frombuffer(data, np.uint8), SIZES[options.size].sides.context)
    bench = Bench(options, text)
    figures = tune(bench) if options.tune else sweep(bench) if options.sweep else compare(bench)
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    print(f"took {figures['seconds']:.0f} s")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--keep", help="a file of single results: what is in it is not run again")
    parser.add_argument("--short", action="store_true", help="M = 4, one seed, a few rows")
    parser.add_argument("--sweep", action="store_true", help="outer rate × momentum × H")
    parser.add_argument("--tune", action="store_true", help="the rate of every way")
    parser.add_argument("--data", default="sotu", help="sotu or a folder of text files")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each peer at M = 4; by the size")
    parser.add_argument("--batch", type=int, help="windows a step and peer; by the size")
    parser.add_argument("--rows", nargs="+", default=["*"], help="such as 'dp_m4' or '*_longer_*'")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--h", type=int, default=4, help="steps between merges")
    parser.add_argument("--dp-rate", type=float, default=0.0, help="0: the one that was tuned")
    parser.add_argument("--our-rate", type=float, default=0.0, help="0: the one that was tuned")
    options = parser.parse_args()
    options.steps = options.steps or SIZES[options.size].steps
    options.batch = options.batch or SIZES[options.size].batch
    if options.short:
        options.seeds, options.peers = 1, [4]
    known = [peers for size, peers in TUNED if size == options.size]
    unknown = set(options.peers) - set(known)
    if unknown and not (options.tune or (options.dp_rate and options.our_rate)):
        parser.error(
            f"size {options.size} is tuned for {known or 'no'} peers: give these with --peers, "
            "or --tune, then --dp-rate and --our-rate"
        )
    if options.seeds not in (1, *STUDENT_T):
        parser.error(f"--seeds is {options.seeds}; intervals are known for 1 to {max(STUDENT_T)}")
    return options


class Bench:
    """Runs rows and remembers what they came to."""

    def __init__(self, options: argparse.Namespace, text: Text) -> None:
        self.options = options
        self.text = text
        self.found: dict[str, list[Found]] = {}
        self.kept: dict[str, dict[str, Any]] = {}
        if options.keep and Path(options.keep).exists():
            lines = Path(options.keep).read_text().splitlines()
            self.kept = dict(json.loads(line) for line in lines)

    def task(self, row: Row, seed: int, rate: float = 0.0) -> MlpTask:
        """What a row trains: the same tokens for every number of peers."""
        options = self.options
        tuned_of = TUNED if row.longer == 1 else TUNED_LONGER
        dp_rate, our_rate = tuned_of.get((options.size, row.peers), (0.0, 0.0))
        tuned = options.dp_rate or dp_rate if row.way == "dp" else options.our_rate or our_rate
        return MlpTask.of(
            self.text,
            seed=seed,
            steps=options.steps * row.longer * 4 // row.peers,
            peers=row.peers,
            batch=options.batch,
            rate=rate or tuned,
            sides=SIZES[options.size].sides,
        )

    def run(self, row: Row, seed: int, rate: float = 0.0) -> Found:
        """One row with one seed; from --keep if it is there."""
        task, plan = self.task(row, seed, rate), row.plan
        sides, o = SIZES[self.options.size].sides, self.options
        key = f"{row.way} {row.peers} {plan} {sides} {task.steps} {o.batch} {task.rate} {seed}"
        key += f" commits {plan.commit_codec}" if plan.commit_codec else ""
        if key in self.kept:
            return Found(**self.kept[key])
        begin = time.process_time()
        figures: dict[str, float] = {}
        theta: Vector
        if row.way == "dp":
            theta = data_parallel(task)
        elif row.way == "sync":
            theta = synchronous(task, plan.eta, plan.mu, round(plan.h))
        else:
            outcome = exchange(task, plan)
            theta = outcome.theta
            figures = {name: getattr(outcome, name) for name in FIGURES}
        found = Found(task.evaluate(theta), time.process_time() - begin, figures)
        if o.keep:
            with Path(o.keep).open("a") as file:
                file.write(json.dumps([key, asdict(found)]) + "\n")
        return found

    def row(self, row: Row) -> list[Found]:
        """One row with all seeds; printed, and run once only."""
        if row.name not in self.found:
            seeds = range(self.options.seeds)
            self.found[row.name] = [self.run(row, seed) for seed in seeds]
            print(_line(row.name, self.found[row.name]), flush=True)
        return self.found[row.name]

    def ratio(self, one: str, other: str) -> dict[str, float]:
        """Mean ratio of two rows' losses within a seed, and the half-width of its interval."""
        pairs = zip(self.found[one], self.found[other], strict=True)
        logs = [math.log(a.loss / b.loss) for a, b in pairs]
        if len(logs) == 1:
            return {"ratio": math.exp(logs[0])}
        half = STUDENT_T[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        mean = statistics.fmean(logs)
        return {
            "ratio": math.exp(mean),
            "low": math.exp(mean - half),
            "high": math.exp(mean + half),
        }


def _line(name: str, rows: list[Found]) -> str:
    losses = [one.loss for one in rows]
    text = f"{name:24} {statistics.fmean(losses):.4f}"
    if len(losses) > 1:
        text += f" ± {statistics.stdev(losses):.4f}"
    found = rows[0].figures
    if found:
        text += f"  {found['steps_a_merge']:.1f} steps a merge, {found['hand_ins']} hand-ins"
        text += f", {100 * found['listed_share']:.1f} % listed, {found['bits']:.2f} bit"
    return text + f"  {sum(one.seconds for one in rows):.0f} s"


def rows_of(options: argparse.Namespace, peers: int) -> Iterator[Row]:
    """The ways that are compared for so many peers."""
    base, m = Plan(h=float(options.h)), f"m{peers}"
    yield Row(f"dp_{m}", "dp", peers)
    yield Row(f"sync_{m}", "sync", peers, base)
    for short, codec in CODECS_SHOWN.items():
        yield Row(f"{short}_{m}", "ours", peers, replace(base, codec=codec))
    if (options.size, peers) in TUNED_LONGER and not options.short:
        for short in ("f32", "topk"):
            plan = replace(base, codec=CODECS_SHOWN[short])
            yield Row(f"{short}_longer_{m}", "ours", peers, plan, LONGER)
    if peers != 4:
        return
    yield Row("lean_m4", "ours", peers, replace(base, commit_codec="int4"))
    warm = replace(base, codec=CODECS_SHOWN["topk"], warmup_codec="int4")
    yield Row("topk_warm_m4", "ours", peers, warm)
    if options.short:
        return
    churn = replace(base, kill_each_s=20.0 * base.h, away_s=5.0 * base.h, dropped=0.1)
    yield Row("churn_m4", "ours", peers, churn)
    spread = replace(base, speeds=(1.0, 2.0, 4.0, 8.0), step_s=3.75)  # a mean of one step a second
    yield Row("spread_linear_m4", "ours", peers, replace(spread, h=base.h / 3.75))
    yield Row(
        "spread_quadratic_m4", "ours", peers, replace(spread, h=base.h / 3.75, rule="quadratic")
    )
    for rule in ("radial", "centred"):
        yield Row(f"{rule}_m4", "ours", peers, replace(base, rule=rule))


def compare(bench: Bench) -> dict[str, Any]:
    """All rows for all seeds, and the ratios that have goals."""
    options = bench.options
    for peers in options.peers:
        for row in rows_of(options, peers):
            if any(fnmatch(row.name, pattern) for pattern in options.rows):
                bench.row(row)
    if not bench.found:
        raise SystemExit(f"no row is called {' or '.join(options.rows)}: try --rows '*_m4'")
    ratios: dict[str, dict[str, float]] = {}
    for peers in options.peers:
        m = f"m{peers}"
        for key, one, other in (
            ("ours_int4_vs_sync", "int4", "sync"),
            ("ours_vs_sync", "f32", "sync"),
            ("ours_vs_dp", "int8", "dp"),
            ("sync_vs_dp", "sync", "dp"),
            ("ours_topk_vs_f32", "topk", "f32"),
            ("ours_topk_vs_f32_longer", "topk_longer", "f32_longer"),
            ("topk_warm_vs_f32", "topk_warm", "f32"),
            *((f"{name}_vs_ours", name, "int8") for name in UNLIKE),
        ):
            pair = f"{one}_{m}", f"{other}_{m}"
            if all(name in bench.found for name in pair):
                ratios[f"{key}_{m}"] = bench.ratio(*pair)
    return _figures(bench, ratios)


def _figures(bench: Bench, ratios: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Everything as JSON; prints the ratios with their goals."""
    figures: dict[str, Any] = {
        "size": bench.options.size,
        "parameters": bench.task(Row("", "dp"), 0).table.total,
        "steps_m4": bench.options.steps,
        "batch": bench.options.batch,
        "h": bench.options.h,
        "seeds": bench.options.seeds,
        "rates": {
            f"{way}_m{m}": bench.task(Row("", way, m), 0).rate
            for m, way in itertools.product(bench.options.peers, ("dp", "ours"))
        },
        "rows": {name: [asdict(one) for one in rows] for name, rows in bench.found.items()},
        "ratios": ratios,
        "goals": GOALS,
    }
    for key in ("ours_int4_vs_sync", "ours_topk_vs_f32"):
        if f"{key}_m4" in ratios:
            figures[key] = ratios[f"{key}_m4"]["ratio"]
    for peers in bench.options.peers:
        if f"ours_vs_dp_m{peers}" in ratios:
            figures[f"ours_vs_dp_m{peers}"] = ratios[f"ours_vs_dp_m{peers}"]["ratio"]
    topk = bench.found.get("topk_m4", [])
    for one in topk:
        figures["topk_bits_per_param"] = one.figures["bits"]
        figures["topk_hand_ins_a_peer"] = one.figures["hand_ins"] // 4
        if one.figures["hand_ins"] // 4 < HAND_INS_MIN:
            figures["topk_judged"] = f"no: fewer than {HAND_INS_MIN} hand-ins of a peer"
    for name, ratio in ratios.items():
        goal = GOALS.get(name) or GOALS.get(name.removesuffix("_m4").partition("_longer")[0])
        line = f"{name:28} {100 * (ratio['ratio'] - 1):+.2f} %"
        if "low" in ratio:
            line += f"  ({100 * (ratio['low'] - 1):+.2f} to {100 * (ratio['high'] - 1):+.2f})"
        print(line + (f"  goal ≤ {100 * (goal - 1):+.1f} %" if goal else ""))
    return figures


def tune(bench: Bench) -> dict[str, Any]:
    """The loss of data-parallel, synchronous and ours at each rate, by M; means over the seeds."""
    rows = []
    base = Plan(h=float(bench.options.h))
    rates = SIZES[bench.options.size].rates
    for peers, way, rate in itertools.product(bench.options.peers, ("dp", "sync", "ours"), rates):
        row = Row(f"{way}_m{peers}", way, peers, base)
        loss = _mean(bench, row, rate)
        rows.append({"way": way, "peers": peers, "rate": rate, "loss": loss})
        print(f"M {peers}  {way:5} rate {rate:<6} loss {loss:.4f}", flush=True)
    return {"rows": rows}


def sweep(bench: Bench) -> dict[str, Any]:
    """Synchronous steps for each outer rate, momentum and H, at the better of two inner rates.

    They cost a third of the exchange, whose losses are within 0.3 % of theirs.
    """
    rows = []
    tuned = bench.task(Row("", "ours"), 0).rate
    for h, eta, mu in itertools.product(SWEEP_H, SWEEP_ETA, SWEEP_MU):
        if eta / (1.0 - mu) > SWEPT_MAX:
            continue
        row = Row("", "sync", 4, Plan(h=float(h), eta=eta, mu=mu))
        loss, rate = min(
            (_mean(bench, row, rate), rate) for rate in (tuned, tuned / math.sqrt(2.0))
        )
        rows.append({"h": h, "eta": eta, "mu": mu, "rate": rate, "loss": loss})
        print(f"H {h:3}  eta {eta:.1f}  mu {mu:.1f}  rate {rate:<6} loss {loss:.4f}", flush=True)
    best = {h: min((r for r in rows if r["h"] == h), key=lambda r: r["loss"]) for h in SWEEP_H}
    return {"rows": rows, "best": best}


def _mean(bench: Bench, row: Row, rate: float) -> float:
    run: Callable[[int], Found] = lambda seed: bench.run(row, seed, rate)  # noqa: E731
    return statistics.fmean(run(seed).loss for seed in range(bench.options.seeds))


CODECS_SHOWN: Final = {"f32": "float32", "int8": "int8", "int4": "int4", "topk": "topk-1.56"}
TUNED: Final = {
    ("small", 2): (0.016, 0.0226),
    ("small", 4): (0.0226, 0.032),
    ("small", 8): (0.0226, 0.045),
    ("large", 4): (0.004, 0.008),
    ("large", 8): (0.0057, 0.0113),
}
"""(size, M) -> the best peak rate of data-parallel and of synchronous local steps of RATES, with
seed 0, H 4 and the default steps and batch; of the large size the best of three. Others are not
tuned yet: `--tune`, then `--dp-rate` and `--our-rate`."""
TUNED_LONGER: Final = {("small", 4): (0.016, 0.0226), ("small", 8): (0.016, 0.045)}
"""The same for runs of LONGER times the steps (data-parallel is not run there): what is long wants
a lower rate. With seed 0, synchronous steps: M = 4 1.8576 at 0.0226, 1.8692 at 0.032;
M = 8 1.8894 at 0.045, 1.8961 at 0.032."""


if __name__ == "__main__":
    main()
