"""Drawings: the same bytes as those looked at, well-formed, bounded, and legible without colour.

The golden files were looked at in a browser. To renew them after a wanted change, write what
`DRAWINGS` yields over them and look again.
"""

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from dugnad.dashboard.axes import fitted, log_ticks, number_ticks, time_ticks
from dugnad.dashboard.charts import (
    NARROW,
    POINTS_MAX,
    Axis,
    Bars,
    Curve,
    Plot,
    Strip,
    bars_svg,
    plot_svg,
    smooth,
    strip_svg,
    thin,
)
from dugnad.dashboard.svgstyle import SVG_STYLE

from .run_world import DAY_MS, HOSTILE, HOUR_MS, NOW_MS  # noqa: TID252  the world is no installed package

GOLDEN = Path(__file__).with_name("golden")
SVG = "{http://www.w3.org/2000/svg}"
FALLING = tuple((float(n * 1000), 2 + 3 / (n + 1)) for n in range(40))
HOURS = tuple((float(NOW_MS + (n - 12) * HOUR_MS), float(n % 5)) for n in range(12))


def loss(*, log: bool = False, words: str = "training") -> Plot:
    """Two falling curves."""
    held = tuple((x, y + 0.2) for x, y in FALLING[::4])
    curves = (Curve(words, FALLING, 1), Curve("held out", held, 2))
    return Plot("loss", "Loss", "It falls.", "nats a token", curves, log=log)


DRAWINGS: dict[str, Callable[[], str]] = {
    "line": lambda: plot_svg(loss(), style=SVG_STYLE),
    "line-log-narrow": lambda: plot_svg(loss(log=True), NARROW),
    "step": lambda: plot_svg(
        Plot(
            "peers",
            "Live peers",
            "Now 1.",
            "peers",
            (Curve("live peers", HOURS, 4, "step"),),
            axis="time",
            zero=True,
            whole=True,
            marks=((NOW_MS - 3 * HOUR_MS, "calm-birch came"),),
        )
    ),
    "area-bands": lambda: plot_svg(
        Plot(
            "throughput",
            "Throughput",
            "Up.",
            "tokens/s",
            (Curve("speed", HOURS, 3, "area"),),
            axis="time",
            zero=True,
            bands=((NOW_MS - 5 * HOUR_MS, NOW_MS - 2 * HOUR_MS),),
        )
    ),
    "bars": lambda: bars_svg(
        Bars(
            "bars",
            "Tokens",
            "By day.",
            "tokens",
            ("Nov 28", "Nov 29", "Nov 30"),
            (("a", (10.0, 20.0, 0.0)), ("b", (5.0, 0.0, 7.5))),
        )
    ),
    "strip": lambda: strip_svg(
        Strip(
            "sessions",
            "Sessions",
            "Two.",
            ((NOW_MS - DAY_MS, NOW_MS - HOUR_MS), (NOW_MS, NOW_MS)),
            NOW_MS - 2 * DAY_MS,
            NOW_MS,
        )
    ),
    "nothing": lambda: plot_svg(Plot("loss", "Loss", "None.", "nats", (Curve("training", ()),))),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_those_that_were_looked_at(name: str) -> None:
    assert DRAWINGS[name]() == (GOLDEN / f"{name}.svg").read_text().rstrip("\n")


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_svg_with_a_title_a_description_and_real_text(name: str) -> None:
    root = ET.fromstring(DRAWINGS[name]())
    assert root.tag == f"{SVG}svg"
    assert root.attrib["role"] == "img"
    named = {one.attrib["id"] for one in root if "id" in one.attrib}
    assert set(root.attrib["aria-labelledby"].split()) == named
    assert [one.text for one in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_have_no_inline_style_and_stay_inside_their_frame(name: str) -> None:
    root = ET.fromstring(DRAWINGS[name]())
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for one in root.iter():
        assert "style" not in one.attrib
        for key, limit in (("x", width), ("y", height), ("cx", width), ("cy", height)):
            assert 0 <= float(one.attrib.get(key, 0)) <= limit


@pytest.mark.parametrize("words", HOSTILE[:7])
def test_labels_of_strangers_do_not_break_a_drawing(words: str) -> None:
    label = words.encode("utf-8", "replace").decode().replace("\x00", "").replace("\x1b", "")
    root = ET.fromstring(plot_svg(loss(words=label)))
    assert {one.tag for one in root.iter()} <= {
        f"{SVG}{name}" for name in ("svg", "title", "desc", "path", "text")
    }


def test_series_differ_by_more_than_colour() -> None:
    assert ".curve.s2{stroke-dasharray" in SVG_STYLE
    labels = [one.text for one in ET.fromstring(plot_svg(loss())).iter(f"{SVG}text")]
    assert {"training", "held out"} <= set(labels)


def test_long_curves_are_cut_to_a_bound_and_keep_their_ends() -> None:
    points = tuple((float(n), math.sin(n / 100) + (50 if n == 7777 else 0)) for n in range(20_000))
    for cut in (thin(points), smooth(points)):
        assert len(cut) <= POINTS_MAX
        assert cut[-1] == points[-1]
        assert [x for x, _ in cut] == sorted(x for x, _ in cut)
    assert points[7777] in thin(points)  # a spike of a step is kept
    path = plot_svg(Plot("p", "t", "d", "y", (Curve("c", points),)))
    assert path.count("L") <= POINTS_MAX


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    points = ((0.0, 1.0), (1.0, math.nan), (2.0, -5.0), (3.0, 0.0), (4.0, 3.0))
    drawn = plot_svg(Plot("p", "t", "d", "y", (Curve("c", points),), log=True))
    assert "nan" not in drawn
    assert drawn.count("L") == 1


def test_a_single_value_is_a_dot() -> None:
    drawn = plot_svg(Plot("p", "t", "d", "y", (Curve("c", ((5.0, 2.0),)),)))
    assert "<circle" in drawn


@pytest.mark.parametrize(
    ("axis", "x", "said"), [("tokens", 5000.0, "5.00 k"), ("time", float(NOW_MS), "03:00:00")]
)
def test_a_single_value_has_the_one_place_where_it_is_under_it(
    axis: Axis, x: float, said: str
) -> None:
    plot = Plot("p", "P", "d", "u", (Curve("only", ((x, 2.5),)),), axis=axis)
    drawing = ET.fromstring(plot_svg(plot, NARROW))
    below = [one.text for one in drawing.iter(f"{SVG}text") if one.get("text-anchor") == "middle"]
    assert below == [said]


def test_a_narrow_drawing_has_two_places_at_least() -> None:
    drawing = ET.fromstring(plot_svg(loss(), NARROW))
    below = [one.text for one in drawing.iter(f"{SVG}text") if one.get("text-anchor") == "middle"]
    assert len(below) >= 2


def test_bars_without_a_bar_say_so() -> None:
    assert "nothing merged yet" in bars_svg(Bars("b", "B", "d", "tokens", (), ()))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.97, 2.03), (0, 6e9), (-3, 4), (1e-6, 2e-6)])
def test_ticks_are_round_inside_and_told_apart(low: float, high: float) -> None:
    ticks = number_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= value <= high + 1e-9 for value, _ in ticks)
    assert len({label for _, label in ticks}) == len(ticks)


def test_logarithmic_ticks_are_powers_over_decades_and_plain_within_one() -> None:
    assert " ".join(t for _, t in log_ticks(0.5, 200, 5)) == "0.5 1 2 5 10 20 50 100 200"
    assert " ".join(t for _, t in log_ticks(1, 1e8, 5)) == "1 100 10 k 1 M 100 M"
    assert [label for _, label in log_ticks(2, 6, 5)] == ["2", "3", "4", "5", "6"]


def test_times_have_clocks_within_a_day_and_dates_beyond() -> None:
    assert [label for _, label in time_ticks(NOW_MS - 3 * HOUR_MS, NOW_MS, 4)] == [
        "Nov 30",
        "01:00",
        "02:00",
        "03:00",
    ]
    days = [label for _, label in time_ticks(NOW_MS - 9 * DAY_MS, NOW_MS, 5)]
    assert 2 <= len(days) <= 6
    assert all(label.startswith("Nov ") for label in days)


def test_fitted_ranges_are_never_empty() -> None:
    for values in ([], [0.0], [5.0, 5.0], [math.nan], [math.inf, 1.0]):
        for log in (False, True):
            low, high = fitted(values, log=log)
            assert low < high
            assert low > 0 or not log
