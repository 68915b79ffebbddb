"""`dugnad simulate`: plays scenarios for many seeds and says what held.

The only module here that prints. Real time is an argument; nothing that is simulated sees it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dugnad.simulation.chart import chart
from dugnad.simulation.crowdcommand import play_crowds
from dugnad.simulation.crowdreport import CROWDS, TITLES
from dugnad.simulation.report import (
    COLUMNS,
    VIOLATIONS_SHOWN,
    Series,
    account,
    as_json,
    as_table,
    row,
)
from dugnad.simulation.runner import Result, play
from dugnad.simulation.scenario import ScenarioError, draw, names, text_of

ALL: Final = "all"
EXIT_OK: Final = 0
EXIT_BROKEN: Final = 1
EXIT_BAD_INPUT: Final = 2
SEEDS: Final = 10
SEEDS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for."""

    scenario: str = ALL
    seeds: int | None = None
    """None: ten, or of a crowd one, which takes minutes."""
    seed: int = 0
    replay: bool = False
    json_file: Path | None = None
    plot: Path | None = None
    listing: bool = False


def main(wish: Wish, clock: Callable[[], float]) -> int:
    """Do what was asked; the exit code: 0, 1 for a broken promise, 2 for bad input."""
    try:
        if wish.listing:
            show_list()
            return EXIT_OK
        check(wish)
        if wish.scenario in CROWDS:
            kept = play_crowds(wish.scenario, wanted(wish), wish.json_file, wish.plot, clock)
            return EXIT_OK if kept else EXIT_BROKEN
        all_series = run(wish, clock)
    except ScenarioError as fault:
        print(fault, file=sys.stderr)
        return EXIT_BAD_INPUT
    write(wish, all_series)
    show(wish, all_series)
    return EXIT_BROKEN if any(series.broken for series in all_series) else EXIT_OK


def check(wish: Wish) -> None:
    """ScenarioError when the wish cannot be done: before minutes are spent on it."""
    if wish.seed < 0 or (wish.seeds is not None and not 1 <= wish.seeds <= SEEDS_MAX):
        raise ScenarioError("seeds are numbers from 0 on, and at least one is needed")
    if wish.replay and wish.scenario == ALL:
        raise ScenarioError("--replay needs the name of one scenario, and --seed")
    for path in (wish.json_file, wish.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ScenarioError(f"{path} cannot be written: name a file in a folder that exists")


def wanted(wish: Wish) -> range:
    """The seeds to play."""
    usual = 1 if wish.scenario in CROWDS else SEEDS
    return range(wish.seed, wish.seed + (1 if wish.replay else wish.seeds or usual))


def show_list() -> None:
    """The scenarios, a line each."""
    for name in names():
        scenario = draw(name, text_of(name), 0).scenario
        print(f"{name:22} {scenario.title}")
        if scenario.known:
            print(f"{'':22} not in `all`: {scenario.known}")
    for name, title in TITLES.items():
        print(f"{name:22} {title}")
        print(f"{'':22} not in `all`: it takes minutes a seed")


def run(wish: Wish, clock: Callable[[], float]) -> list[Series]:
    """Play what was asked for, with a bar on a terminal."""
    texts = {name: text_of(name) for name in (names() if wish.scenario == ALL else [wish.scenario])}
    first = {name: draw(name, text, wish.seed).scenario for name, text in texts.items()}
    if wish.scenario == ALL:
        texts = {name: text for name, text in texts.items() if not first[name].known}
    seeds = wanted(wish)
    all_series: list[Series] = []
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(texts) * len(seeds))
        for name, text in texts.items():
            bar.update(task, description=name)
            start = clock()
            results: list[Result] = []
            for seed in seeds:
                results.append(play(draw(name, text, seed)))
                bar.advance(task)
            all_series.append(Series(name, first[name].title, tuple(results), clock() - start))
    return all_series


def write(wish: Wish, all_series: list[Series]) -> None:
    """The files that were asked for. The plot shows the first broken run, or the first run."""
    if wish.json_file is not None:
        wish.json_file.write_text(json.dumps(as_json(all_series), indent=1) + "\n", "utf-8")
    if wish.plot is not None:
        results = [one for series in all_series for one in series.results]
        chosen = next((one for one in results if not one.passed), results[0])
        wish.plot.write_text(chart(chosen), "utf-8")


def show(wish: Wish, all_series: list[Series]) -> None:
    """The table, and the accounts of what was broken; with --replay the account of the run."""
    broken = [one for series in all_series for one in series.broken]
    told = [all_series[0].results[0]] if wish.replay else broken[:VIOLATIONS_SHOWN]
    for result in told:
        print(account(result))
    if len(broken) > len(told):
        print(f"... and {len(broken) - len(told)} more broken runs (--json FILE has all)")
    Console().print(as_table(COLUMNS, [row(series) for series in all_series]))
