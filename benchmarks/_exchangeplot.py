"""The plot of `exchange.py`: seconds and CPU of each way to average, as bars."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

WIDTH: Final = 860
NAMES: Final = 210
ROW: Final = 24
TOP: Final = 62
PANEL: Final = 300
"""Width of one of the two columns of bars."""


def exchange_svg(title: str, rows: Mapping[str, tuple[float, float]]) -> str:
    """Bars by row name: seconds of a round, CPU seconds a gigabyte. Ours are in colour."""
    height = TOP + ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="22" font-weight="bold">{escape(title)}</text>',
    ]
    for column, heading in enumerate(("seconds a round", "CPU seconds a GB")):
        left = NAMES + column * (PANEL + 30)
        largest = max((row[column] for row in rows.values()), default=1.0) or 1.0
        parts.append(f'<text x="{left}" y="{TOP - 14}">{heading}</text>')
        for index, (name, row) in enumerate(rows.items()):
            y, length = TOP + ROW * index, (PANEL - 50) * row[column] / largest
            colour = "#268bd2" if name.startswith("ours") else "#999"
            if not column:
                parts.append(f'<text x="10" y="{y + 13}">{escape(name)}</text>')
            parts.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="16" fill="{colour}"/>'
                f'<text x="{left + length + 6:.1f}" y="{y + 13}">{row[column]:.3g}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])
