"""The charts of a run, from its state: what is drawn, the words around it and the numbers in it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from dugnad.dashboard.charts import (
    HALF,
    NARROW,
    WIDE,
    Axis,
    Bars,
    Curve,
    Plot,
    Size,
    Strip,
    bars_svg,
    hatches,
    part_rect,
    plot_svg,
    smooth,
    strip_svg,
    thin,
)
from dugnad.dashboard.history import Bar
from dugnad.dashboard.layout import View, head
from dugnad.dashboard.markup import EMPTY, Markup, el, join
from dugnad.dashboard.series import DAY_MS, HOUR_MS, Point, Series
from dugnad.dashboard.state import name_in, sessions_of
from dugnad.dashboard.text import amount, clock_text, count, exact, iso, moment

TABLE_ROWS_MAX: Final = 20
"""Rows of the table under a chart; all are in the CSV."""
BARS_MAX: Final = 30
BAR_PARTS_MAX: Final = 6
"""Contributors with a pattern of their own in the bars; the rest is one part."""
MARKS_MAX: Final = 40
"""Comings and goings marked; more would touch each other."""
STRIP_MS: Final = 7 * DAY_MS

Chart = Plot | Bars | Strip
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its caption and its numbers: the head of a table and `count` rows, newest last.

    `row` makes the n-th row: a page shows a few of thousands.
    """

    chart: Chart
    caption: str
    heads: Row
    count: int
    row: Callable[[int], Row]

    def svg(self, size: Size = WIDE, style: str = "") -> Markup:
        """The drawing in one size."""
        match self.chart:
            case Plot():
                return plot_svg(self.chart, size, style=style)
            case Bars():
                return bars_svg(self.chart, size, style=style)
            case Strip():
                return strip_svg(self.chart, size, style=style)

    def csv(self) -> str:
        """All rows as comma-separated values."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.heads)
        writer.writerows(map(self.row, range(self.count)))
        return out.getvalue()


@dataclass(frozen=True, slots=True)
class Choice:
    """How a reader wants the loss drawn."""

    axis: Axis = "tokens"
    log: bool = False


def choice_of(query: Mapping[str, str]) -> Choice:
    """The choice in an address; anything unknown is the default."""
    axis: Literal["tokens", "time"] = "time" if query.get("x") == "time" else "tokens"
    return Choice(axis, query.get("y") == "log")


def _curve(label: str, points: list[Point], number: int, axis: Axis) -> Curve:
    if axis == "time":
        pairs = tuple((float(p.at_ms), p.value) for p in points)
    else:
        pairs = tuple((float(p.tokens), p.value) for p in points)
    return Curve(label, tuple(smooth(pairs)), number)  # once for both sizes


def _listed(chart: Chart, caption: str, heads: Row, rows: tuple[Row, ...]) -> Figure:
    return Figure(chart, caption, heads, len(rows), rows.__getitem__)


def loss_figure(view: View, choice: Choice, peer: str = "") -> Figure:
    """Training and held-out loss; with `peer`, the stretches in which it was here are marked."""
    history = view.state.history
    train, held = history.train.points(), history.held_out.points()
    bands = _presence(view, peer, choice.axis) if peer else ()
    last = [
        f"{label} {s.last.value:.3f}"
        for label, s in (("training", history.train), ("held out", history.held_out))
        if s.last
    ]
    newest = " and ".join(last)
    plot = Plot(
        name="loss",
        title="Loss",
        description=f"Loss in nats a token, lower is better. Newest: {newest or 'none'}.",
        y_label="nats a token",
        curves=(
            _curve("training", train, 1, choice.axis),
            _curve("held out", held, 2, choice.axis),
        ),
        axis=choice.axis,
        log=choice.log,
        bands=bands,
    )
    caption = "Loss, lower is better. Held out: text that nobody trains on."
    if peer:
        caption += " Marked: while this peer was here."

    def row(n: int) -> Row:
        kind, point = (
            ("training", train[n]) if n < len(train) else ("held out", held[n - len(train)])
        )
        return (kind, iso(point.at_ms), str(point.tokens), f"{point.value:.4f}")

    heads = ("kind", "time", "tokens", "nats a token")
    return Figure(plot, caption, heads, len(train) + len(held), row)


def _presence(view: View, peer: str, axis: Axis) -> tuple[tuple[float, float], ...]:
    sessions = [(s.since_ms, s.until_ms or view.now_ms) for s in sessions_of(view.state, peer)]
    if axis == "time":
        return tuple((float(a), float(b)) for a, b in sessions)
    points = view.state.history.train.points() or view.state.history.held_out.points()
    bands = []
    for a, b in sessions:
        inside = [p.tokens for p in points if a <= p.at_ms <= b]
        if inside:
            bands.append((float(inside[0]), float(inside[-1])))
    return tuple(bands)


def throughput_figure(view: View) -> Figure:
    """Tokens a second of the whole swarm over time."""
    series = view.state.history.speed
    last = amount(series.last.value) if series.last else "unknown"
    plot = Plot(
        name="throughput",
        title="Throughput",
        description=f"Tokens a second of the whole swarm over time, newest {last}.",
        y_label="tokens/s",
        curves=(Curve("throughput", tuple(smooth(_over_time(series))), 3, "area"),),
        axis="time",
        zero=True,
    )
    rows = series.points()
    caption = "Throughput of the whole swarm."
    heads = ("time", "tokens/s")
    return Figure(
        plot, caption, heads, len(rows), lambda n: (iso(rows[n].at_ms), f"{rows[n].value:.1f}")
    )


def _over_time(series: Series) -> tuple[tuple[float, float], ...]:
    return tuple((float(p.at_ms), p.value) for p in series.points())


def peers_figure(view: View) -> Figure:
    """Live peers over time, with comings and goings marked on the axis."""
    state = view.state
    points = _over_time(state.history.peers)
    if points:
        points = (*points, (max(float(view.now_ms), points[-1][0]), float(state.live)))
    moves = [h for h in state.happenings if h.kind in ("joined", "left", "lost")]
    plot = Plot(
        name="peers",
        title="Live peers",
        description=f"Number of peers over time; now {state.live}.",
        y_label="peers",
        curves=(Curve("live peers", tuple(thin(points)), 4, "step"),),
        axis="time",
        zero=True,
        whole=True,
        marks=tuple(
            (float(h.at_ms), f"{clock_text(h.at_ms)}: {h.text}") for h in moves[-MARKS_MAX:]
        ),
    )
    rows = state.history.peers.points()
    caption = "Live peers. A triangle is a peer that came, left or was lost."
    heads = ("time", "live peers")
    return Figure(
        plot, caption, heads, len(rows), lambda n: (iso(rows[n].at_ms), f"{rows[n].value:g}")
    )


def contributions_figure(view: View) -> Figure:
    """Tokens merged by contributor: each day, or each hour while the run is young."""
    history = view.state.history
    daily = len(history.days) > 2
    bars = (history.days if daily else history.hours)[-BARS_MAX:]
    parts = _parts(view, bars)
    unit = "day" if daily else "hour"
    labels = tuple(_bar_label(bar, daily) for bar in bars)
    chart = Bars(
        name="contributions",
        title=f"Tokens merged each {unit}",
        description=f"Tokens merged each {unit} by contributor, "
        + (", ".join(f"{name} {amount(sum(values))}" for name, values in parts) or "none yet")
        + ".",
        y_label="tokens",
        labels=labels,
        parts=parts,
    )
    rows = tuple(
        (iso(bar.at_ms), name, str(int(values[n])))
        for n, bar in enumerate(bars)
        for name, values in parts
        if values[n]
    )
    caption = f"Tokens merged each {unit}, by contributor."
    return _listed(chart, caption, (unit, "contributor", "tokens"), rows)


def _bar_label(bar: Bar, daily: bool) -> str:
    at = moment(bar.at_ms)
    return f"{at:%b} {at.day}" if daily else f"{at:%H}:00"


def _parts(view: View, bars: tuple[Bar, ...]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    totals: dict[str, int] = {}
    for bar in bars:
        for peer, tokens in bar.parts.items():
            totals[peer] = totals.get(peer, 0) + tokens
    named = sorted((p for p in totals if p), key=lambda peer: (-totals[peer], peer))
    top = named[:BAR_PARTS_MAX]
    parts = [
        (f"{name_in(view.state, p)} {p[-6:]}", tuple(float(b.parts.get(p, 0)) for b in bars))
        for p in top
    ]
    rest = tuple(float(b.total - sum(b.parts.get(p, 0) for p in top)) for b in bars)
    if any(rest):
        parts.append(("everyone else", rest))
    return tuple(parts)


def own_figure(view: View, peer: str) -> Figure:
    """Tokens of one peer, by day or by hour."""
    history = view.state.history
    daily = len(history.days) > 2
    bars = (history.days if daily else history.hours)[-BARS_MAX:]
    values = tuple(float(bar.parts.get(peer, 0)) for bar in bars)
    unit = "day" if daily else "hour"
    chart = Bars(
        name="own",
        title=f"Tokens merged each {unit}",
        description=f"Tokens of this peer merged each {unit}, {amount(sum(values))} in all.",
        y_label="tokens",
        labels=tuple(_bar_label(bar, daily) for bar in bars),
        parts=(("this peer", values),),
    )
    rows = tuple((iso(b.at_ms), str(int(v))) for b, v in zip(bars, values, strict=True))
    return _listed(chart, f"Tokens of this peer merged each {unit}.", (unit, "tokens"), rows)


def sessions_figure(view: View, peer: str) -> Figure:
    """When one peer was here in the last week."""
    sessions = sessions_of(view.state, peer)
    first = min((s.since_ms for s in sessions), default=view.now_ms - HOUR_MS)
    since = max(view.now_ms - STRIP_MS, min(first, view.now_ms - HOUR_MS))
    strip = Strip(
        name="sessions",
        title="Sessions",
        description=f"When this peer was here: {count(len(sessions), 'session')}.",
        stretches=tuple((float(s.since_ms), float(s.until_ms or view.now_ms)) for s in sessions),
        since_ms=float(since),
        until_ms=float(view.now_ms),
    )
    rows = tuple(
        (iso(s.since_ms), iso(s.until_ms) if s.until_ms else "still here") for s in sessions
    )
    caption = "When this peer was here (the last 7 days at most)."
    return _listed(strip, caption, ("from", "to"), rows)


FIGURES: Final[Mapping[str, Callable[[View, Choice], Figure]]] = {
    "loss": loss_figure,
    "throughput": lambda view, _: throughput_figure(view),
    "peers": lambda view, _: peers_figure(view),
    "contributions": lambda view, _: contributions_figure(view),
}
"""The charts that have an address of their own, by name."""


def figure_html(
    view: View, figure: Figure, *, address: str = "", controls: Markup = EMPTY, half: bool = False
) -> Markup:
    """The figure on a page: caption, the drawing in two sizes (the style sheet shows the one that
    fits; `half` is for two beside each other), a line for reading values, a key, and the numbers.
    """
    name = figure.chart.name
    return el(
        "figure",
        el("figcaption", figure.caption),
        controls or None,
        figure.svg(HALF if half else WIDE),
        figure.svg(NARROW),
        el("output", cls="readout", aria_live="polite"),
        _bar_key(figure.chart),
        _numbers(view, figure, address),
        data_chart=name,
        tabindex="0" if isinstance(figure.chart, Plot) else None,
        data_src=address or None,
    )


def _bar_key(chart: Chart) -> Markup | None:
    if not isinstance(chart, Bars) or len(chart.parts) < 2:
        return None
    items = []
    for n, (label, values) in enumerate(chart.parts, start=1):
        key = f"{chart.name}-key{n}"
        swatch = el(
            "svg",
            hatches(key, n) if n > 1 else None,
            part_rect(key, n, box=(0, 0, 14, 14), label=""),
            cls="swatch",
            viewBox="0 0 14 14",
            width=14,
            height=14,
            aria_hidden="true",
        )
        items.append(el("li", swatch, " ", label, ": ", amount(sum(values))))
    return el("ul", items, cls="key-list")


def _numbers(view: View, figure: Figure, address: str) -> Markup | None:
    if not figure.count:
        return None
    every = max(1, -(-figure.count // TABLE_ROWS_MAX))
    shown = [figure.row(n) for n in range(figure.count - 1, -1, -every)]
    body = [el("tr", [el("td", value) for value in row]) for row in shown]
    note = f"{exact(figure.count)} rows"
    if every > 1:
        note += f", each {every}th shown"
    return el(
        "details",
        el("summary", "Numbers"),
        el(
            "p",
            note,
            join(". ", el("a", "All as CSV", href=address.replace(".svg", ".csv")))
            if address
            else None,
            ".",
        ),
        el(
            "div",
            el("table", el("thead", el("tr", [head(h) for h in figure.heads])), el("tbody", body)),
            cls="scroll",
            tabindex="0",
            role="region",
            aria_label=f"Numbers of {figure.chart.title}",
        ),
    )
