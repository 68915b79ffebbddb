"""What all pages share: the skeleton, links, times, tables and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from dugnad.dashboard.assets import assets
from dugnad.dashboard.markup import Markup, el, join
from dugnad.dashboard.query import TableQuery, pages_of
from dugnad.dashboard.state import State
from dugnad.dashboard.text import ago, clock_text, count, exact, fingerprint, iso

STALE_AFTER_S: Final = 60
"""A page without a sign of life for this long says so: four heartbeats."""
_HELP: Final = (
    "Help is in the documentation that came with dugnad (dugnad --help)."
    " Nobody of this project will ever ask for your key file."
)


@dataclass(frozen=True, slots=True)
class View:
    """A state at the moment when somebody reads it. `base` is the path under which the pages are:
    '' or '/run/…'.
    """

    state: State
    now_ms: int
    base: str = ""
    place: str = ""
    """Where in the event stream this state is."""

    @property
    def title(self) -> str:
        """The run's name."""
        run = self.state.run
        return run.name if run is not None and run.name else "a run without a name"


def page(view: View, active: str, heading: str, *content: object) -> str:
    """The whole document. `active` names the entry of the navigation that this page is."""
    return "<!doctype html>\n" + el(
        "html",
        _head(view, heading),
        el(
            "body",
            el("a", "Skip to content", href="#main", cls="skip"),
            _header(view, active),
            _stale(view),
            el("main", *content, id="main", tabindex="-1"),
            _footer(view),
            data_base=view.base,
            data_place=view.place,
        ),
        lang="en",
    )


def document(title: str, *content: object) -> str:
    """A small document without a run: the start page and errors."""
    return "<!doctype html>\n" + el(
        "html",
        _links("", title),
        el("body", el("main", *content, id="main")),
        lang="en",
    )


def _stale(view: View) -> Markup:
    """Says that nothing came for a while; the script shows and hides it on an open page."""
    state = view.state
    age_s = (view.now_ms - state.as_of_ms) / 1000
    fresh = not state.as_of_ms or age_s <= STALE_AFTER_S or state.ended is not None
    words = None if fresh else ["Nothing new since ", when(state.as_of_ms, view.now_ms), "."]
    return el(
        "p",
        words,
        id="stale",
        cls="banner",
        role="status",
        hidden=fresh,
        data_after=STALE_AFTER_S,
        data_age=max(round(age_s), 0) if state.as_of_ms else 0,
    )


def _head(view: View, heading: str) -> Markup:
    title = view.title if heading == view.title else f"{heading} · {view.title}"
    return _links(view.base, title)


def _links(base: str, title: str) -> Markup:
    static = assets()
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · dugnad"),
        el("link", rel="icon", href="data:,"),
        el("link", rel="stylesheet", href=f"{base}/static/{static['css'].name}"),
        el("script", type="module", src=f"{base}/static/{static['js'].name}"),
    )


def _header(view: View, active: str) -> Markup:
    entries = (
        ("Run", "/"),
        ("Peers", "/peers"),
        ("Leaderboard", "/leaderboard"),
        ("Events", "/events"),
    )
    items = [
        el(
            "li",
            el(
                "a",
                name,
                href=f"{view.base}{path}",
                aria_current="page" if name == active else None,
            ),
        )
        for name, path in entries
    ]
    return el(
        "header",
        el("p", el("a", view.title, href=f"{view.base}/"), cls="brand"),
        el("nav", el("ul", items), aria_label="Pages"),
        el("button", "Theme", type="button", id="theme", hidden=True),
    )


def _footer(view: View) -> Markup:
    state = view.state
    who = ""
    if state.serving is not None:
        key = f" ({fingerprint(state.serving.peer)})" if state.serving.peer else ""
        who = f"Served by {state.serving.name}{key}"
    as_of: Markup | str = "nothing received yet"
    if state.as_of_ms:
        as_of = when(state.as_of_ms, view.now_ms, key="as-of")
    return el(
        "footer",
        el("p", who, " · " if who else None, "as of ", as_of, ". Times are UTC."),
        el("p", _HELP),
        el(
            "p",
            "As data: ",
            el("a", "JSON", href=f"{view.base}/api/v1/snapshot"),
            ", ",
            el("a", "Prometheus", href=f"{view.base}/metrics"),
            ".",
        ),
    )


def when(at_ms: int, now_ms: int, key: str = "") -> Markup:
    """A time as an age, with the exact moment in its attribute and tooltip; `key` is its id."""
    if not at_ms:
        return el("span", "unknown", cls="dim")
    moment, words = iso(at_ms), ago(at_ms, now_ms)
    return el("time", words, datetime=moment, title=clock_text(at_ms), id=key or None)


def peer_link(view: View, peer: str, name: str, *, key: bool = True) -> Markup:
    """A peer's name as a link to its page, with the end of its key beside it."""
    tail = el("code", fingerprint(peer), cls="key", title=peer) if key else None
    target = f"{view.base}/peer/{quote(peer, safe='')}"
    return join(el("a", name or "nameless", href=target), " " if key else None, tail)


def table(
    caption: str, heads: Sequence[Markup], rows: Iterable[object], *, name: str = ""
) -> Markup:
    """A table that scrolls sideways inside itself where a screen is narrow."""
    return el(
        "div",
        el("table", el("caption", caption), el("thead", el("tr", heads)), el("tbody", list(rows))),
        cls="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
        data_part=name or None,
    )


def head(label: str, *, number: bool = False, title: str = "") -> Markup:
    """A column's head."""
    return el("th", label, scope="col", cls="num" if number else None, title=title or None)


def sort_head(
    column: str, label: str, query: TableQuery, path: str, *, falling: bool, title: str = ""
) -> Markup:
    """A column's head that is a link to the table in that order; `falling` is its first order."""
    current = query.sort == column
    target = query.address(
        path, sort=column, descending=not query.descending if current else falling
    )
    order = ("descending" if query.descending else "ascending") if current else None
    arrow = (" ▼" if query.descending else " ▲") if current else ""
    return el(
        "th",
        el("a", label, el("span", arrow, aria_hidden="true"), href=target),
        scope="col",
        cls="num" if falling else None,
        aria_sort=order,
        title=title or None,
    )


def cell(content: object, *, number: bool = False, title: str = "") -> Markup:
    """A cell of a table."""
    return el("td", content, cls="num" if number else None, title=title or None)


def number_cell(value: int, text: str, href: str = "") -> Markup:
    """A number for people, exact in its tooltip and, for programs, in `data-v`. `href` is what
    stands behind it; the keys pass it by, since the name of the row leads there, too.
    """
    shown = el("a", text, href=href, tabindex="-1") if href else text
    return el("td", shown, cls="num", title=exact(value), data_v=value)


def pager(query: TableQuery, path: str, rows: int) -> Markup:
    """Links to the pages before and after."""
    pages = max(1, pages_of(rows))
    before = el("a", "← previous", href=query.address(path, page=query.page - 1), rel="prev")
    after = el("a", "next →", href=query.address(path, page=query.page + 1), rel="next")
    return el(
        "nav",
        before if query.page > 1 else None,
        el("span", f"page {query.page} of {pages}, {count(rows, 'row')}"),
        after if query.page < pages else None,
        cls="pager",
        aria_label="Pages of the table",
    )


def filter_form(query: TableQuery, path: str, label: str, *fields: object) -> Markup:
    """A search field that works without a script; the order is kept."""
    return el(
        "form",
        el(
            "label",
            label,
            " ",
            el("input", type="search", name="q", value=query.words, maxlength=64, data_filter=True),
        ),
        el("input", type="hidden", name="sort", value=query.sort),
        el("input", type="hidden", name="dir", value="down" if query.descending else "up"),
        fields,
        el("button", "Show", type="submit"),
        method="get",
        action=path,
        role="search",
        cls="filter",
    )


def facts(rows: Iterable[tuple[str, object]]) -> Markup:
    """Labels and values as a description list."""
    return el("dl", [el("div", el("dt", label), el("dd", value)) for label, value in rows])
