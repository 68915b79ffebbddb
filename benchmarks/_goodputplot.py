"""The plot of `goodput.py`: goodput over the number of chips, one line a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 720
HEIGHT: Final = 420
LEFT: Final = 60
RIGHT: Final = 170
TOP: Final = 40
BOTTOM: Final = 50
COLOURS: Final = {"dp": "#888", "elastic": "#b58900", "m8": "#268bd2", "m16": "#2aa198"}
"""By the row's number of learners; others are drawn black."""
NAME_PX: Final = 15.0
GRID: Final = (0, 20, 40, 60, 80, 100)


def goodput_svg(chips: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """Lines by row name such as `ours m8` (shares from 0 to 1, one for each of ``chips``).

    What the paper published is dashed, ours is solid; each line ends in its name.
    """
    step = (WIDTH - LEFT - RIGHT) / max(1, len(chips) - 1)

    def at(index: int, share: float) -> tuple[float, float]:
        return LEFT + index * step, TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="13">',
        "<title>Goodput under failures, by the number of chips</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22">Goodput, % (a chip fails once a year)</text>',
    ]
    for percent in GRID:
        _, y = at(0, percent / 100.0)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>')
    for index, name in enumerate(chips):
        x, y = at(index, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{y + 22:.1f}" text-anchor="middle">{name}</text>')
    for (name, shares), y in zip(rows.items(), _spread(rows, at), strict=True):
        points = [at(index, share) for index, share in enumerate(shares)]
        colour = COLOURS.get(name.split()[-1], "#000")
        dash = "" if name.startswith("ours") else ' stroke-dasharray="5 4"'
        path = " ".join(f"{x:.1f},{py:.1f}" for x, py in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts.append(
            f'<text x="{points[-1][0] + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">'
            f"{escape(name)} {100 * shares[-1]:.0f}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _spread(
    rows: Mapping[str, Sequence[float]], at: Callable[[int, float], tuple[float, float]]
) -> list[float]:
    """Where the names stand: at the end of their lines, but not on each other."""
    wanted = [at(len(shares) - 1, shares[-1])[1] for shares in rows.values()]
    found = [0.0] * len(wanted)
    last = float("-inf")
    for index in sorted(range(len(wanted)), key=wanted.__getitem__):
        last = found[index] = max(wanted[index], last + NAME_PX)
    return found
