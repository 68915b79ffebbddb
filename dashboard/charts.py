"""Charts as SVG: lines, steps, areas, stacked bars and strips, drawn on the server.

A drawing has real text, a title and a description, and no colour of its own: classes name what a
thing is, and the style sheet (or the one inside a stand-alone file) colours it for light and dark.
Series differ by dash pattern and by a label too, never by colour alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from dugnad.dashboard.axes import Scale, Ticks, fitted, log_ticks, number_ticks, time_ticks
from dugnad.dashboard.markup import Markup, el, join
from dugnad.dashboard.text import amount, moment

POINTS_MAX: Final = 400
"""Points of a line: one for two pixels of the widest drawing; more only make pages heavier."""
SERIES_MAX: Final = 8
"""Patterns that can still be told apart."""
LETTER_PX: Final = 6.8
"""Usual width of a letter of 12 px, to keep labels apart."""

_HATCHES: Final = (
    "",
    "M-1 7L7 -1",
    "M-1 -1L7 7",
    "M0 3H6",
    "M3 0V6",
    "M0 3H6M3 0V6",
    "M-1 7L7 -1M-1 -1L7 7",
    "M2 3h2",
)
"""Patterns of the parts of a bar, so that they differ by more than colour."""

Kind = Literal["line", "step", "area"]
Axis = Literal["tokens", "time"]


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height of a drawing in its own units, which are pixels at its natural size."""

    name: str
    width: int
    height: int


WIDE: Final = Size("wide", 960, 280)
HALF: Final = Size("half", 560, 260)
NARROW: Final = Size("narrow", 340, 230)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one series by rising x. `number` chooses pattern and colour, from 1."""

    label: str
    points: tuple[tuple[float, float], ...]
    number: int = 1
    kind: Kind = "line"


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over tokens or time. `bands` are stretches of x to mark, `marks` single x with a
    label. `zero` starts the y axis at 0.
    """

    name: str
    title: str
    description: str
    y_label: str
    curves: tuple[Curve, ...]
    axis: Axis = "tokens"
    log: bool = False
    zero: bool = False
    bands: tuple[tuple[float, float], ...] = ()
    marks: tuple[tuple[float, str], ...] = ()
    whole: bool = False
    """Whether y counts things, so that ticks between whole numbers make no sense."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars: a label for each bar, and for each part its label and its value per bar."""

    name: str
    title: str
    description: str
    y_label: str
    labels: tuple[str, ...]
    parts: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Stretches of time on one line, as for the sessions of a peer."""

    name: str
    title: str
    description: str
    stretches: tuple[tuple[float, float], ...]
    since_ms: float
    until_ms: float


@dataclass(frozen=True, slots=True)
class _Frame:
    left: float
    top: float
    right: float
    bottom: float


def thin(
    points: tuple[tuple[float, float], ...], limit: int = POINTS_MAX
) -> list[tuple[float, float]]:
    """At most `limit` of `points`, the lowest and the highest of each stretch of x, so that no
    spike is lost; the first and the last are kept.
    """
    if len(points) <= limit:
        return list(points)
    columns = max(limit // 2 - 1, 1)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / columns or 1.0
    kept = [points[0]]
    start, xs = 0, [x for x, _ in points]
    for column in range(columns):
        stop = bisect_left(xs, low + (column + 1) * width, start)
        part = points[start : stop if column + 1 < columns else len(points)]
        if part:
            ends = {min(part, key=_y), max(part, key=_y)}
            kept.extend(sorted(ends))
        start = stop
    kept.append(points[-1])
    return [one for n, one in enumerate(kept) if n == 0 or one != kept[n - 1]]


def smooth(
    points: tuple[tuple[float, float], ...], limit: int = POINTS_MAX
) -> list[tuple[float, float]]:
    """At most `limit` of `points`: the mean of each stretch of x, since older values are means
    already. The last is kept as it is.
    """
    if len(points) <= limit:
        return list(points)
    low, width = points[0][0], (points[-1][0] - points[0][0]) / (limit - 1) or 1.0
    kept: list[tuple[float, float]] = []
    column, sum_x, sum_y, n = 0, 0.0, 0.0, 0
    for x, y in points:
        at = int((x - low) / width)
        if at != column:
            if n:
                kept.append((sum_x / n, sum_y / n))
            column, sum_x, sum_y, n = at, 0.0, 0.0, 0
        sum_x += x
        sum_y += y
        n += 1
    return [*kept[: limit - 1], points[-1]]


def _y(point: tuple[float, float]) -> float:
    return point[1]


def plot_svg(plot: Plot, size: Size = WIDE, *, style: str = "") -> Markup:
    """The drawing of `plot`. `style` is CSS to put inside, for a file that stands alone."""
    frame = _Frame(52, 24 + 18 * _legend_rows(plot), size.width - 12, size.height - 40)
    x, y = _scales(plot, frame)
    ticks_x = _x_ticks(plot, x, size)
    about = 5
    ticks_y = (log_ticks if plot.log else number_ticks)(y.low, y.high, about)
    if plot.whole:
        ticks_y = [(v, t) for v, t in ticks_y if v == int(v)]
    if not any(curve.points for curve in plot.curves):
        ticks_x, ticks_y = [], []
    body = join(
        _bands(plot, x, frame),
        _grid(ticks_x, ticks_y, (x, y), frame),
        _axis_titles(plot, frame, size),
        [_curve(curve, (x, y), frame, plot.log) for curve in plot.curves],
        _marks(plot, x, frame),
        _legend(plot),
        None if any(c.points for c in plot.curves) else _nothing(frame, "nothing measured yet"),
    )
    facts = {
        "x0": x.low,
        "x1": x.high,
        "y0": y.low,
        "y1": y.high,
    }
    return _svg(
        plot.name,
        (plot.title, plot.description),
        size,
        body,
        style=style,
        data={
            "data-plot": " ".join(
                _n(v) for v in (frame.left, frame.top, frame.right, frame.bottom)
            ),
            "data-range": " ".join(f"{v:.10g}" for v in facts.values()),
            "data-log": "1" if plot.log else "0",
            "data-axis": plot.axis,
            "data-unit": plot.y_label,
        },
    )


def _scales(plot: Plot, frame: _Frame) -> tuple[Scale, Scale]:
    xs = [v for c in plot.curves if c.points for v in (c.points[0][0], c.points[-1][0])]
    low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if high <= low:
        high = low + 1
    values = [v for c in plot.curves for _, v in c.points]
    bottom, top = fitted(values, log=plot.log, zero=plot.zero and not plot.log)
    return (
        Scale(low, high, frame.left, frame.right),
        Scale(bottom, top, frame.bottom, frame.top, plot.log),
    )


def _x_ticks(plot: Plot, x: Scale, size: Size) -> Ticks:
    about = size.width // 90
    if any(c.points for c in plot.curves) and x.high - x.low == 1.0:  # `_scales` found one value
        clock = f"{moment(int(x.low)):%H:%M:%S}"
        return [(x.low, clock if plot.axis == "time" else amount(x.low))]
    if plot.axis == "time":
        return time_ticks(x.low, x.high, about)
    ticks = number_ticks(x.low, x.high, about)
    return ticks if len(ticks) > 1 else number_ticks(x.low, x.high, 2 * about)


def _grid(ticks_x: Ticks, ticks_y: Ticks, scales: tuple[Scale, Scale], frame: _Frame) -> Markup:
    x, y = scales
    lines = [
        el("path", cls="grid", d=f"M{_n(frame.left)} {_n(y.at(v))}H{_n(frame.right)}")
        for v, _ in ticks_y
    ]
    left = [
        el("text", label, cls="tick", x=_n(frame.left - 6), y=_n(y.at(v) + 4), text_anchor="end")
        for v, label in ticks_y
    ]
    below, end = [], -math.inf
    for v, label in ticks_x:
        at, half = x.at(v), len(label) * LETTER_PX / 2
        if at - half < end + 8 or at + half > frame.right + 12:
            continue  # would touch its neighbour or leave the drawing
        end = at + half
        below.append(
            el("text", label, cls="tick", x=_n(at), y=_n(frame.bottom + 16), text_anchor="middle")
        )
    base = el("path", cls="axis", d=f"M{_n(frame.left)} {_n(frame.bottom)}H{_n(frame.right)}")
    return join(lines, base, left, below)


def _axis_titles(plot: Plot, frame: _Frame, size: Size) -> Markup:
    below = "tokens merged" if plot.axis == "tokens" else "time (UTC)"
    unit = plot.y_label + (", logarithmic" if plot.log else "")
    return join(
        el("text", unit, cls="unit", x=4, y=_n(frame.top - 10)),
        el("text", below, cls="unit", x=_n(frame.right), y=size.height - 6, text_anchor="end"),
    )


def _curve(curve: Curve, scales: tuple[Scale, Scale], frame: _Frame, log: bool) -> Markup:
    x, y = scales
    limit = min(POINTS_MAX, int(frame.right - frame.left))  # one a pixel
    shown = [
        (a, b)
        for a, b in (thin if curve.kind == "step" else smooth)(curve.points, limit)
        if math.isfinite(b) and (b > 0 or not log)
    ]
    if not shown:
        return Markup("")
    points = list(zip(x.all(a for a, _ in shown), y.all(b for _, b in shown), strict=True))
    draw = _steps(points, frame) if curve.kind == "step" else _straight(points)
    line = el(
        "path", cls=f"curve s{curve.number}", d=draw, data_label=curve.label, data_kind=curve.kind
    )
    if len(points) == 1:
        px, py = points[0]
        line = join(line, el("circle", cls=f"dot s{curve.number}", cx=_n(px), cy=_n(py), r=3))
    if curve.kind != "area":
        return line
    floor = f"V{_n(frame.bottom)}H{_n(points[0][0])}Z"
    return join(el("path", cls=f"fill s{curve.number}", d=draw + floor), line)


def _straight(points: list[tuple[float, float]]) -> str:
    drawn = "L".join(["%.1f %.2f" % point for point in points])  # noqa: UP031  twice as fast
    return "M" + drawn.replace(".0 ", " ")


def _steps(points: list[tuple[float, float]], frame: _Frame) -> str:
    first = points[0]
    parts = [f"M{_n(first[0])} {first[1]:.2f}"]
    parts.extend(f"H{_n(b[0])}V{b[1]:.2f}" for _, b in pairwise(points))
    return "".join([*parts, f"H{_n(frame.right)}"])


def _bands(plot: Plot, x: Scale, frame: _Frame) -> Markup:
    high = frame.bottom - frame.top
    return join(
        el(
            "rect",
            cls="band",
            x=_n(x.at(a)),
            y=_n(frame.top),
            height=_n(high),
            width=_n(max(x.at(b) - x.at(a), 1.0)),
        )
        for a, b in plot.bands
        if b > x.low and a < x.high
    )


def _marks(plot: Plot, x: Scale, frame: _Frame) -> Markup:
    return join(
        el(
            "path",
            el("title", label),
            cls="mark",
            d=f"M{_n(x.at(at) - 4)} {_n(frame.bottom + 1)}h8l-4 -7z",
        )
        for at, label in plot.marks
        if x.low <= at <= x.high
    )


def _legend_rows(plot: Plot) -> int:
    if len(plot.curves) < 2:
        return 0
    return 1


def _legend(plot: Plot) -> Markup:
    if len(plot.curves) < 2:
        return Markup("")
    parts, at = [], 4.0
    for curve in plot.curves[:SERIES_MAX]:
        parts.append(el("path", cls=f"curve s{curve.number}", d=f"M{_n(at)} 10h24"))
        parts.append(el("text", curve.label, cls="label", x=_n(at + 30), y=14))
        at += 46 + len(curve.label) * LETTER_PX
    return join(parts)


def _nothing(frame: _Frame, words: str) -> Markup:
    x, y = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    return el("text", words, cls="none", x=_n(x), y=_n(y), text_anchor="middle")


def bars_svg(bars: Bars, size: Size = WIDE, *, style: str = "") -> Markup:
    """The drawing of stacked bars, the first part at the bottom."""
    frame = _Frame(52, 30, size.width - 12, size.height - 26)
    totals = [sum(values[n] for _, values in bars.parts) for n in range(len(bars.labels))]
    y = Scale(*fitted([float(t) for t in totals], zero=True), frame.bottom, frame.top)
    x = Scale(0, max(len(bars.labels), 1), frame.left, frame.right)
    ticks: Ticks = [(n + 0.5, label) for n, label in enumerate(bars.labels)]
    every = max(1, math.ceil(len(ticks) / (size.width // 76)))
    body = join(
        hatches(f"{bars.name}-{size.name}", len(bars.parts)),
        _grid(ticks[::every], number_ticks(y.low, y.high, 4) if bars.labels else [], (x, y), frame),
        el("text", bars.y_label, cls="unit", x=4, y=_n(frame.top - 8)),
        [_stack(bars, n, (x, y), size) for n in range(len(bars.labels))],
        None if bars.labels else _nothing(frame, "nothing merged yet"),
    )
    return _svg(bars.name, (bars.title, bars.description), size, body, style=style, data={})


def hatches(key: str, parts: int) -> Markup:
    """Definitions of the patterns of the first `parts` parts, under ids that begin with `key`."""
    return el(
        "defs",
        [
            el(
                "pattern",
                el("path", cls="hatch", d=_HATCHES[n - 1]),
                id=f"{key}-h{n}",
                width=6,
                height=6,
                patternUnits="userSpaceOnUse",
            )
            for n in range(2, min(parts, SERIES_MAX) + 1)
        ],
    )


def part_rect(
    key: str, number: int, *, box: tuple[float, float, float, float], label: str
) -> Markup:
    """A filled rectangle (x, y, width, height) of part `number`, with its pattern over it."""
    x, y, width, height = map(_n, box)
    place = {"x": x, "y": y, "width": width, "height": height}
    title = el("title", label) if label else None
    if number == 1:
        return el("rect", title, cls=f"bar s{number}", **place)
    over = el("rect", title, fill=f"url(#{key}-h{number})", **place)
    return join(el("rect", cls=f"bar s{number}", **place), over)


def _stack(bars: Bars, n: int, scales: tuple[Scale, Scale], size: Size) -> Markup:
    x, y = scales
    air = min(2.0, (x.at(1) - x.at(0)) * 0.1)
    rects, below = [], 0.0
    for number, (label, values) in enumerate(bars.parts[:SERIES_MAX], start=1):
        value = values[n]
        if value <= 0:
            continue
        top, bottom = y.at(below + value), y.at(below)
        below += value
        box = (x.at(n) + air, top, x.at(n + 1) - x.at(n) - 2 * air, max(bottom - top, 0.5))
        words = f"{bars.labels[n]}, {label}: {amount(value)}"
        rects.append(part_rect(f"{bars.name}-{size.name}", number, box=box, label=words))
    return join(rects)


def strip_svg(strip: Strip, size: Size = WIDE, *, style: str = "") -> Markup:
    """The drawing of stretches of time, filled where present."""
    size = Size(size.name, size.width, 64)
    frame = _Frame(8, 10, size.width - 8, 34)
    high = max(strip.until_ms, strip.since_ms + 1)
    x = Scale(strip.since_ms, high, frame.left, frame.right)
    ticks = time_ticks(strip.since_ms, high, size.width // 90)
    body = join(
        el(
            "rect",
            cls="track",
            x=_n(frame.left),
            y=_n(frame.top),
            height=24,
            width=_n(frame.right - frame.left),
        ),
        [
            el(
                "rect",
                cls="stretch",
                x=_n(x.at(a)),
                y=_n(frame.top),
                height=24,
                width=_n(max(x.at(b) - x.at(a), 1.0)),
            )
            for a, b in strip.stretches
            if b >= strip.since_ms
        ],
        _grid(ticks, [], (x, x), frame),
    )
    return _svg(strip.name, (strip.title, strip.description), size, body, style=style, data={})


def _svg(
    name: str,
    words: tuple[str, str],
    size: Size,
    body: Markup,
    *,
    style: str,
    data: dict[str, str],
) -> Markup:
    title, description = words
    key = f"{name}-{size.name}"
    return el(
        "svg",
        el("title", title, id=f"{key}-t"),
        el("desc", description, id=f"{key}-d"),
        el("style", Markup(style)) if style else None,
        body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {size.width} {size.height}",
        cls=f"chart {size.name}",
        role="img",
        aria_labelledby=f"{key}-t {key}-d",
        **{attribute.replace("-", "_"): value for attribute, value in data.items()},
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
