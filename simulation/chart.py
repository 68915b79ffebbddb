"""One run as a small SVG: who was alive, how merging went on and the goodput, over time; of a crowd
who was there, how wrong views were, and what that cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from dugnad.simulation.crowdreport import CrowdResult
from dugnad.simulation.runner import Result
from dugnad.simulation.stage import Sample

WIDTH: Final = 720
PANEL: Final = 110
LEFT: Final = 60
TOP: Final = 46
GAP: Final = 34
POINTS_MAX: Final = 1000
"""Points of a line; more are thinned out."""
MARKS_MAX: Final = 200
"""Lines for what was done to the swarm."""

LOSS: Final = "held-out loss, nats a symbol"

_PANELS: Final[tuple[tuple[str, str, Callable[[Sample], float]], ...]] = (
    ("peers alive", "#2563eb", lambda one: float(one.alive)),
    ("commits of fragment 0", "#059669", lambda one: float(one.merges)),
    ("listed / made", "#d97706", lambda one: one.listed / one.made if one.made else 0.0),
)


Line = tuple[str, str, Sequence[float], Sequence[float]]
"""What a panel shows, its colour, its times in seconds and its values."""


def chart(result: Result) -> str:
    """The SVG text for one result; what befell the swarm is a thin line with a title."""
    step = len(result.samples) // POINTS_MAX + 1
    samples = result.samples[::step]
    times = [one.at_s for one in samples]
    lines: list[Line] = [
        (name, colour, times, [value(one) for one in samples]) for name, colour, value in _PANELS
    ]
    if result.losses:
        losses = [one.loss for one in result.losses]
        lines.append((LOSS, "#7c3aed", [one.at_s for one in result.losses], losses))
    return _drawn(_title(result), lines, max(result.virtual_s, 1.0), result.timeline)


def crowd_chart(result: CrowdResult) -> str:
    """The SVG text for one rehearsed crowd."""
    verdict = f"broken: {result.violations[0]}" if result.violations else "passed"
    pairs = list(itertools.pairwise(result.looks))
    rates = [
        (b.roster_bytes - a.roster_bytes) / (b.at_s - a.at_s) / max(1, b.members) for a, b in pairs
    ]
    looks = result.looks
    times = [one.at_s for one in looks]
    lines: list[Line] = [
        ("members", "#2563eb", times, [float(one.members) for one in looks]),
        ("view error, percent", "#dc2626", times, [100.0 * one.error for one in looks]),
        ("roster, bytes a second and peer", "#059669", times[1:], rates),
    ]
    title = f"{result.scenario}, seed {result.seed}: {verdict}"
    return _drawn(title, lines, max([1.0, *times]), ())


def _drawn(
    title: str, lines: Sequence[Line], end: float, timeline: Sequence[tuple[float, str]]
) -> str:
    """Panels below each other over one time axis."""
    height = TOP + len(lines) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for index, (name, colour, times, values) in enumerate(lines):
        top = TOP + index * (PANEL + GAP)
        parts += _panel(name, colour, top, [at / end for at in times], values)
    for when, text in timeline[:MARKS_MAX]:
        x = LEFT + when / end * (WIDTH - LEFT - 20)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - GAP}" stroke="#dc2626" '
            f'stroke-opacity="0.35"><title>{when:.1f} s: {escape(text)}</title></line>'
        )
    parts.append(f'<text x="{WIDTH - 20}" y="{height - 8}" text-anchor="end">{end:.0f} s</text>')
    return "\n".join([*parts, "</svg>", ""])


def _title(result: Result) -> str:
    verdict = "passed" if result.passed else f"broken: {result.violations[0].what[:60]}"
    return f"{result.scenario}, seed {result.seed}: {verdict}"


def _panel(
    name: str, colour: str, top: int, times: Sequence[float], values: Sequence[float]
) -> list[str]:
    highest = max([1.0, *values])
    points = " ".join(
        f"{LEFT + at * (WIDTH - LEFT - 20):.1f},{top + PANEL * (1.0 - value / highest):.1f}"
        for at, value in zip(times, values, strict=True)
    )
    return [
        f'<text x="{LEFT}" y="{top - 6}">{escape(name)}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{highest:.4g}</text>',
        f'<text x="{LEFT - 6}" y="{top + PANEL}" text-anchor="end">0</text>',
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 20}" height="{PANEL}" fill="none" '
        f'stroke="#cbd5e1"/>',
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
    ]
