"""`dugnad simulate crowd-…`: plays crowds one seed after the other, prints a table, writes JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from dugnad.simulation.chart import crowd_chart
from dugnad.simulation.crowdreport import COLUMNS, CROWDS, CrowdResult, crowd_row, rehearse_crowd
from dugnad.simulation.report import as_table


def play_crowds(
    name: str,
    seeds: range,
    json_file: Path | None,
    plot: Path | None,
    clock: Callable[[], float],
) -> bool:
    """Whether every promise was kept. The plot shows the first broken run, or the first run."""
    console = Console(stderr=True)
    results: list[CrowdResult] = []
    with Progress(console=console, disable=not console.is_terminal) as bar:
        for seed in seeds:
            task = bar.add_task(f"{name}, seed {seed}", total=1.0)
            results.append(
                rehearse_crowd(
                    name,
                    CROWDS[name],
                    seed,
                    clock,
                    lambda share, task=task: bar.update(task, completed=share),  # type: ignore[misc]
                )
            )
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(results), indent=1) + "\n", "utf-8")
    if plot is not None:
        chosen = next((one for one in results if not one.passed), results[0])
        plot.write_text(crowd_chart(chosen), "utf-8")
    for result in results:
        for what in result.violations:
            print(f"BROKEN: {what} ({result.scenario}, seed {result.seed})")
        if result.violations:
            print(f"  again: dugnad simulate {name} --seed {result.seed} --replay")
    Console().print(as_table(COLUMNS, [crowd_row(result) for result in results]))
    return all(result.passed for result in results)


def as_json(results: list[CrowdResult]) -> dict[str, object]:
    """All figures of all runs."""
    return {
        "passed": all(result.passed for result in results),
        "seconds": sum(result.seconds for result in results),
        "violations": [
            {"scenario": result.scenario, "seed": result.seed, "what": what}
            for result in results
            for what in result.violations
        ],
        "runs": [dataclasses.asdict(result) for result in results],
    }
