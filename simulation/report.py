"""What a series of simulated runs came to: rows for a table, JSON, and words for a violation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from rich import box
from rich.table import Table

from dugnad.simulation.runner import Result

COLUMNS: Final = (
    "scenario",
    "runs",
    "broken",
    "goodput",
    "took part",
    "longest gap",
    "MB",
    "events/s",
    "loss",
)
VIOLATIONS_SHOWN: Final = 5
"""Violations told in full on a terminal; the JSON file has all."""


@dataclass(frozen=True, slots=True)
class Series:
    """The results of one scenario, by seed, and how long they took in real seconds."""

    scenario: str
    title: str
    results: tuple[Result, ...]
    seconds: float

    @property
    def broken(self) -> list[Result]:
        """Runs with a violation."""
        return [one for one in self.results if not one.passed]


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for 80 columns: names are not cut, headings of two words stand on two lines."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(name.replace(" ", "\n"), justify=justify, no_wrap=True, vertical="bottom")
    for cells in rows:
        table.add_row(*cells)
    return table


def row(series: Series) -> tuple[str, ...]:
    """One line of the table: the lowest shares, the longest gap, the highest loss at the end."""
    results = series.results
    events = sum(one.events for one in results)
    losses = _last_losses(results)
    return (
        series.scenario,
        str(len(results)),
        str(len(series.broken)),
        f"{min(one.goodput for one in results):.3f}",
        f"{min(one.participation for one in results):.3f}",
        f"{max(one.longest_gap for one in results):.1f} s",
        f"{sum(one.bytes for one in results) / 1e6:.1f}",
        f"{events / series.seconds:,.0f}" if series.seconds else "",
        f"{max(losses):.3f}" if losses else "",
    )


def _last_losses(results: Sequence[Result]) -> list[float]:
    return [one.losses[-1].loss for one in results if one.losses]


def as_json(all_series: Sequence[Series]) -> dict[str, object]:
    """The JSON of a series of scenarios: totals, and one object per run."""
    results = [one for series in all_series for one in series.results]
    return {
        "passed": all(one.passed for one in results),
        "runs": len(results),
        "seconds": round(sum(series.seconds for series in all_series), 3),
        "violations": [
            {"scenario": one.scenario, "seed": one.seed, "what": broken.what, "story": broken.story}
            for one in results
            for broken in one.violations
        ],
        "scenarios": {series.scenario: _series_json(series) for series in all_series},
    }


def _series_json(series: Series) -> dict[str, object]:
    results, losses = series.results, _last_losses(series.results)
    return {
        "title": series.title,
        "loss": sum(losses) / len(losses) if losses else None,
        "passed": not series.broken,
        "goodput": sum(one.goodput for one in results) / len(results),
        "goodput_min": min(one.goodput for one in results),
        "participation": sum(one.participation for one in results) / len(results),
        "participation_min": min(one.participation for one in results),
        "coverage": sum(one.coverage for one in results) / len(results),
        "twice": max(one.twice for one in results),
        "claims": sum(one.claims for one in results),
        "longest_gap": max(one.longest_gap for one in results),
        "detection": max(one.detection for one in results),
        "one_head_s": max(one.one_head_s for one in results),
        "bytes": sum(one.bytes for one in results),
        "messages": sum(one.messages for one in results),
        "events": sum(one.events for one in results),
        "seconds": round(series.seconds, 3),
        "runs": [_run_json(one) for one in results],
    }


def _run_json(one: Result) -> dict[str, object]:
    return {
        "seed": one.seed,
        "passed": one.passed,
        "options": one.options,
        "violations": [broken.what for broken in one.violations],
        "goodput": one.goodput,
        "participation": one.participation,
        "coverage": one.coverage,
        "twice": one.twice,
        "claims": one.claims,
        "longest_gap": one.longest_gap,
        "detection": one.detection,
        "one_head_s": one.one_head_s,
        "bytes": one.bytes,
        "messages": one.messages,
        "events": one.events,
        "merges": one.merges,
        "virtual_s": one.virtual_s,
        "digest": one.digest,
        "losses": [asdict(loss) for loss in one.losses],
        "contacts": [asdict(contact) for contact in one.contacts],
    }


def account(result: Result) -> str:
    """All that a person needs to look into a run: seed, options, what was done, the story."""
    lines = [f"{result.scenario}, seed {result.seed}, digest {result.digest[:16]}"]
    lines += [f"  option {path} = {value}" for path, value in sorted(result.options.items())]
    lines += [f"  {when:9.3f} {text}" for when, text in result.timeline]
    for contact in result.contacts:
        after = "never" if contact.after is None else f"{contact.after:.4f}"
        lines.append(
            f"  {contact.at_s:9.3f} loss at the contact {contact.before:.4f}, after {after}"
        )
    if result.losses:
        first, last = result.losses[0], result.losses[-1]
        lines.append(
            f"  held-out loss {first.loss:.4f} at {first.at_s:.0f} s, {last.loss:.4f} at the end"
        )
    for broken in result.violations:
        lines.append(f"  BROKEN: {broken.what}")
        lines += [f"    {line}" for line in broken.story.splitlines()]
    if result.passed:
        lines.append("  every promise was kept")
    else:
        lines.append(f"  again: dugnad simulate {result.scenario} --seed {result.seed} --replay")
    return "\n".join(lines)
