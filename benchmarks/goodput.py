"""Goodput under failures: the published table of Decoupled DiLoCo by simulation, then ours.

The paper's model: a chip fails once a year, N chips are split among M learners, a learner that
loses a chip stands still for a while, and nobody waits for it (data-parallel training: M = 1, all
wait). Its table is renewal arithmetic with one mean outage: 28.7 s fits the decoupled rows and the
smallest elastic one, 82 s data-parallel training that is not elastic. `paper_*` are simulated that
way, `published_*` is what the paper prints.

`ours_*` are measured on our exchange cores in the simulator: M peers that are killed at the same
rate, stay away for the outage and come back with their disks; goodput is the steps that the lineage
lists over the steps that M undisturbed peers would have made. It is the mean of `--seeds` runs,
`ours_low_*` and `ours_high_*` their extremes. The outage is the mean time from a restart to the
first listed contribution on real processes: `--outage-from` reads it from what `churn.py --json`
wrote. It is counted in full before a peer comes back, and the simulated peer then still has to get
level, so `ours_*` errs on the low side. `renewal_*` is the paper's arithmetic with our outage: the
difference is work that was lost with its maker, and that getting level.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Final

from _goodputplot import goodput_svg

from dugnad.simulation.ledger import Ledger
from dugnad.simulation.people import SimPeer
from dugnad.simulation.settings import WorldSettings
from dugnad.simulation.stage import Stage

YEAR_S: Final = 365.25 * 24 * 3600.0
CHIPS: Final = {"150k": 150e3, "300k": 300e3, "600k": 600e3, "1.2m": 1.2e6, "2.4m": 2.4e6}
PAPER_OUTAGE_S: Final = 28.7
"""Mean outage that reproduces the paper's decoupled rows; fitted on one cell."""
DP_OUTAGE_S: Final = 82.0
"""The same for data-parallel training that restarts as a whole."""
OUR_OUTAGE_S: Final = 12.0
"""Restart of a killed daemon to its first listed contribution, as `dugnad demo` shows it, for where
`--outage-from` names no measurement."""
PUBLISHED: Final = {
    "dp": (72, 57, 38, 27, 18),
    "elastic": (88, 80, 69, 58, 40),
    "m2": (94, 88, 80, 70, 54),
    "m4": (96, 93, 89, 82, 73),
    "m8": (98, 96, 94, 88, 80),
    "m16": (99, 98, 96, 93, 86),
}
"""Goodput in per cent, by CHIPS."""
ROWS: Final = {
    "dp": (1, DP_OUTAGE_S),
    "elastic": (1, PAPER_OUTAGE_S),
    "m2": (2, PAPER_OUTAGE_S),
    "m4": (4, PAPER_OUTAGE_S),
    "m8": (8, PAPER_OUTAGE_S),
    "m16": (16, PAPER_OUTAGE_S),
}
OUR_ROWS: Final = (8, 16)
DRAWN: Final = ("dp", "elastic", "m8", "m16")
"""Rows of the paper that the plot shows."""
RENEWALS: Final = 20_000
"""Failures simulated per cell: a standard error below 0.3 points."""


class Light(Ledger):
    """A ledger without the conservation law: that is what the scenarios check."""

    def after(self, sim: SimPeer, p: int) -> None:
        """Nothing."""


def main() -> None:
    """Simulate, print both tables, and write the numbers to --json."""
    options = parse()
    figures: dict[str, float] = {"outage_s": options.outage, "virtual_seconds": options.seconds}
    print(f"{'goodput %':18}" + "".join(f"{chips:>12}" for chips in CHIPS))
    for name, (learners, outage_s) in ROWS.items():
        cells = []
        for chips, published in zip(CHIPS, PUBLISHED[name], strict=True):
            rng = random.Random(f"{options.seed}/{name}/{chips}")
            got = renewal(rng, learners * YEAR_S / CHIPS[chips], outage_s)
            figures[f"paper_{name}_{chips}"] = got
            figures[f"published_{name}_{chips}"] = published / 100.0
            cells.append(f"{100 * got:7.1f} ({published})")
        print(f"paper {name:12}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    decoupled = [key for key in figures if key.startswith("paper_m")]
    figures["paper_worst_points"] = 100.0 * max(
        abs(figures[key] - figures[key.replace("paper", "published")]) for key in decoupled
    )
    print(f"decoupled rows: at most {figures['paper_worst_points']:.1f} points from the paper")
    for learners in options.rows:
        cells = []
        for chips in CHIPS:
            key, mean_s = f"m{learners}_{chips}", learners * YEAR_S / CHIPS[chips]
            figures[f"renewal_{key}"] = mean_s / (mean_s + options.outage)
            seeds = range(options.seed, options.seed + options.seeds)
            runs = [ours(learners, mean_s, options, seed) for seed in seeds]
            figures[f"ours_{key}"] = mean(runs)
            figures[f"ours_low_{key}"], figures[f"ours_high_{key}"] = min(runs), max(runs)
            cells.append(f"{100 * mean(runs):5.1f} ({100 * figures[f'renewal_{key}']:.1f})")
        print(f"ours m{learners:<12}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        Path(options.plot).write_text(plot(figures, options.rows))


def plot(figures: dict[str, float], rows: Sequence[int]) -> str:
    """What the paper published and what we measured, as SVG."""
    lines = {f"paper {name}": [share / 100.0 for share in PUBLISHED[name]] for name in DRAWN}
    for learners in rows:
        lines[f"ours m{learners}"] = [figures[f"ours_m{learners}_{chips}"] for chips in CHIPS]
    return goodput_svg(list(CHIPS), lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--outage", type=float, default=OUR_OUTAGE_S, help="seconds, of ours")
    parser.add_argument("--outage-from", help="take ours from this file of churn.py --json")
    parser.add_argument("--plot", help="draw both tables into this file, SVG")
    parser.add_argument("--seconds", type=float, default=1200.0, help="virtual, per cell of ours")
    parser.add_argument("--interval", type=float, default=4.0, help="seconds between our merges")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each cell of ours")
    parser.add_argument(
        "--rows", type=int, nargs="*", default=OUR_ROWS, help="our numbers of peers"
    )
    options = parser.parse_args()
    if options.outage_from:
        measured = json.loads(Path(options.outage_from).read_text()).get("outage_s")
        if measured is None:
            parser.error(f"{options.outage_from} holds no outage_s: no peer was started again")
        options.outage = float(measured)
    return options


def renewal(rng: random.Random, mean_s: float, outage_s: float) -> float:
    """The share of its time that one learner trains; ``mean_s`` between its failures."""
    up = sum(rng.expovariate(1.0 / mean_s) for _ in range(RENEWALS))
    return up / (up + RENEWALS * outage_s)


def ours(peers: int, mean_s: float, options: argparse.Namespace, seed: int) -> float:
    """Steps listed / steps that undisturbed peers would have made, in the simulator."""
    stage = Stage(WorldSettings(seed=seed, peers=peers, interval_s=options.interval))
    stage.ledger = stage.checks = Light(stage.settings.size, stage.settings.horizon)
    stage.credits.ledger = stage.ledger
    for number in range(peers):
        fail(stage, stage.add(number), mean_s, options.outage)
    stage.gossip()
    stage.run(options.seconds)
    listed = stage.ledger.listed_steps.get(stage.best(0), 0)
    # what live peers still hold is not lost; it is counted once it is listed
    possible = peers * float(options.seconds) / stage.settings.step_s
    return (listed + stage.pending(0)) / possible


def fail(stage: Stage, sim: SimPeer, mean_s: float, outage_s: float) -> None:
    """Kill a peer after an exponential time, again and again."""
    rng = stage.rng("failures", sim.number, sim.born)

    def again() -> None:
        fail(stage, stage.restart(sim.peer), mean_s, outage_s)

    def killed() -> None:
        stage.kill(sim.peer)
        stage.later(outage_s, again)

    stage.later(rng.expovariate(1.0 / mean_s), killed)


if __name__ == "__main__":
    main()
