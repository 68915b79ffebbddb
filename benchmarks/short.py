"""The short forms of the benchmarks one after the other, and one table of what they found.

    python benchmarks/short.py --json short.json

What `make bench` runs, in under ten minutes on two cores that have nothing else to do. A program
that fails or takes too long is named in the table, the others run all the same, and the exit status
is 1. A goal that is missed is no failure: the table says so. Some goals want the long forms.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
LIMIT_S: Final = 240.0
"""Of one program; the longest takes half of it on two free cores."""
STOP_S: Final = 30.0
"""For its peers and namespaces to end."""
FAILED_LINES: Final = 12
"""Last lines that are shown of a program that failed."""

Figures = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class Short:
    """A program, the options that make it short, and the figures that are shown, with goals."""

    program: str
    options: tuple[str, ...]
    figures: tuple[tuple[str, str, float | None], ...]


PROGRAMS: Final = (
    Short(
        "exchange.py",
        ("--short", "--rounds", "3"),
        (
            ("speedup_vs_hivemind", ">=", 5.0),
            ("speedup_vs_hivemind_alone", ">=", 5.0),
            ("cpu_s_per_gb", "<=", 3.0),
            ("cpu_s_per_gb_alone", "<=", 3.0),
            ("ratio_vs_gloo", ">=", 0.5),
            ("ratio_vs_gloo_gigabit", ">=", 1.0),
            ("memory_vs_hivemind", "<=", 1.0),
        ),
    ),
    Short("learner.py", ("--rounds", "3", "--seconds", "5"), (("ratio", ">=", 0.97),)),
    Short(
        "learns.py",
        ("--short", "--seeds", "1"),
        (("ours_vs_dp", "<=", 1.03), ("ours_vs_sync", "", None)),
    ),
    Short(
        "parity.py",
        ("--short",),
        (
            ("ours_int4_vs_sync", "<=", 1.005),
            ("ours_topk_vs_f32", "<=", 1.005),
            ("topk_bits_per_param", "<=", 0.15),
            ("ours_vs_dp_m4", "<=", 1.025),
        ),
    ),
    Short(
        "dashboard.py",
        ("--pairs", "4"),
        (("front_page_ms", "<=", 20.0), ("training_loss_under_load", "<=", 0.01)),
    ),
)


def main() -> None:
    """Run all, print the table, write everything to --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", help="write all numbers to this file")
    parser.add_argument("--only", nargs="+", choices=[one.program for one in PROGRAMS])
    options = parser.parse_args()
    chosen = [one for one in PROGRAMS if not options.only or one.program in options.only]
    rows: list[str] = []
    found: dict[str, Figures | str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for one in chosen:
            begin = time.monotonic()
            found[one.program] = figures = run(one, Path(folder))
            rows += lines(one, figures, time.monotonic() - begin)
    print(f"\n{'benchmark':14} {'figure':30} {'value':>10}  {'goal':>9}")
    print("\n".join(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(isinstance(one, str) for one in found.values()))


def run(one: Short, folder: Path) -> Figures | str:
    """Its figures, or why there are none."""
    file = folder / f"{one.program}.json"
    command = [sys.executable, str(HERE / one.program), *one.options, "--json", str(file)]
    print(f"{' '.join(command[1:-2])} ...", flush=True)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"took more than {LIMIT_S:.0f} s"
    if process.returncode or not file.exists():
        print("\n".join(said.splitlines()[-FAILED_LINES:]), flush=True)
        return f"failed with status {process.returncode}"
    figures: Figures = json.loads(file.read_text())
    return figures


def stop(process: subprocess.Popen[str]) -> None:
    """End a program with all that it started: it does so itself when it is interrupted."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def lines(one: Short, figures: Figures | str, seconds: float) -> list[str]:
    """Its rows of the table."""
    if isinstance(figures, str):
        return [f"{one.program:14} {figures}"]
    rows = []
    for name, sign, goal in one.figures:
        value = figures.get(name)
        if not isinstance(value, int | float):
            rows.append(f"{one.program:14} {name:30} {'not found':>10}")
            continue
        word = ""
        if goal is not None:
            met = value >= goal if sign == ">=" else value <= goal
            word = f"{sign} {goal:<7g} {'met' if met else 'missed'}"
        rows.append(f"{one.program:14} {name:30} {value:10.3f}  {word}".rstrip())
    return [*rows, f"{one.program:14} took {seconds:.0f} s"]


if __name__ == "__main__":
    main()
