"""The first page of a run: what is trained and why, how to join, and how it goes."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlencode

from dugnad.dashboard.figures import (
    Choice,
    contributions_figure,
    figure_html,
    loss_figure,
    peers_figure,
    throughput_figure,
)
from dugnad.dashboard.history import Happening
from dugnad.dashboard.layout import View, cell, facts, head, page, peer_link, table, when
from dugnad.dashboard.markup import Markup, el, join
from dugnad.dashboard.series import DAY_MS, MINUTE_MS
from dugnad.dashboard.state import name_in
from dugnad.dashboard.text import amount, bytes_text, clock_text, count, exact, percent, span

EVENTS_SHOWN: Final = 15
FRAGMENTS_SHOWN: Final = 64
SPEED_WINDOW_MS: Final = 15 * MINUTE_MS
"""Over which the speed for the estimate of the end is averaged."""
_SHELL_SAFE: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def front_page(view: View, choice: Choice) -> str:
    """The whole page."""
    return page(
        view,
        "Run",
        view.title,
        _what(view),
        _numbers(view),
        _ended(view),
        el(
            "section",
            el("h2", "Loss"),
            figure_html(
                view,
                loss_figure(view, choice),
                address=loss_address(view, choice),
                controls=_loss_controls(view, choice),
            ),
        ),
        el(
            "div",
            _chart_section(view, "Throughput"),
            _chart_section(view, "Peers"),
            cls="pair",
        ),
        el("section", el("h2", "Contributions"), _contributions(view)),
        _happenings(view),
        _sample(view),
        _fragments(view),
        _about(view),
    )


def loss_address(view: View, choice: Choice) -> str:
    """Where the loss chart is, as chosen."""
    return f"{view.base}/api/chart/loss.svg?{_choice_query(choice)}"


def _choice_query(choice: Choice) -> str:
    return urlencode({"x": choice.axis, "y": "log" if choice.log else "linear"})


def _loss_controls(view: View, choice: Choice) -> Markup:
    def link(label: str, wanted: Choice) -> Markup:
        current = "true" if wanted == choice else None
        target = f"{view.base}/?{_choice_query(wanted)}"
        return el("a", label, href=target, aria_current=current, data_choice=True)

    return el(
        "p",
        el(
            "span",
            "by ",
            link("tokens", Choice("tokens", choice.log)),
            " ",
            link("time", Choice("time", choice.log)),
        ),
        el(
            "span",
            "scale ",
            link("linear", Choice(choice.axis, False)),
            " ",
            link("log", Choice(choice.axis, True)),
        ),
        cls="choices",
    )


def _what(view: View) -> Markup:
    run = view.state.run
    if run is None:
        return el("section", el("h1", "Waiting for the run's description"), cls="what")
    paragraphs = [el("p", part) for part in run.purpose.split("\n\n") if part.strip()]
    return el("section", el("h1", view.title), paragraphs, _join(run.link), cls="what")


def _join(link: str) -> Markup | None:
    if not link:
        return None
    safe = link if _SHELL_SAFE.fullmatch(link) else "'" + link.replace("'", "'\\''") + "'"
    return el(
        "div",
        el("p", "Lend a machine to it, with dugnad installed, in one line:"),
        el("pre", el("code", f"dugnad join {safe}", id="join"), cls="join"),
        el("button", "Copy", type="button", data_copy="join", hidden=True),
    )


def _tile(
    label: str, value: object, note: object, *, live: str = "", more: object = None
) -> Markup:
    return el(
        "div",
        el("dt", label),
        el("dd", value, cls="big", data_live=live or None),
        more,
        el("dd", note, cls="note"),
    )


def _numbers(view: View) -> Markup:
    state = view.state
    speed = state.history.speed.mean(view.now_ms, SPEED_WINDOW_MS)
    last = state.history.speed.last
    held = state.history.held_out.last
    tiles = [
        _tokens_tile(view, speed),
        _tile(
            "Throughput",
            f"{amount(last.value)}/s" if last else "—",
            "tokens a second, whole swarm",
            live="speed",
        ),
        _tile("Live peers", exact(state.live), _windows(view), live="live"),
        _tile(
            "Held-out loss",
            f"{held.value:.3f}" if held else "—",
            "nats a token, of the agreed model",
            live="held",
        ),
        _merge_tile(view),
        _saved_tile(view),
    ]
    return el("dl", tiles, cls="tiles", data_part="numbers", aria_label="Numbers now")


def _tokens_tile(view: View, speed: float | None) -> Markup:
    state = view.state
    budget = state.run.token_budget if state.run is not None else 0
    if not budget:
        return _tile("Tokens merged", amount(state.tokens), "no target is set", live="tokens")
    share = min(state.tokens / budget, 1.0)
    bar = el(
        "dd",
        el(
            "progress",
            percent(share),
            value=state.tokens,
            max=budget,
            aria_label="Tokens merged of the target",
        ),
    )
    note = f"{percent(share)} of {amount(budget)}, {eta(view, speed, budget)}"
    return _tile("Tokens merged", amount(state.tokens), note, live="tokens", more=bar)


def eta(view: View, speed: float | None, budget: int) -> str:
    """When the target is reached at the present speed, in words; '—' is never a number."""
    left = budget - view.state.tokens
    if left <= 0:
        return "target reached"
    if view.state.ended is not None:
        return "ended"
    if not speed:
        return "time to go unknown"
    return f"about {_unbroken(span(left / speed))} to go"


def _unbroken(text: str) -> str:
    """`text` with its number and unit on one line."""
    return text.replace(" ", "\u00a0")


def _windows(view: View) -> str:
    board = view.state.board
    if board is None:
        return "now"
    ages = [view.now_ms - row.last_ms for row in board.rows]
    day, week, month = (sum(1 for age in ages if age <= n * DAY_MS) for n in (1, 7, 30))
    parts = (f"24 h: {exact(day)}", f"7 d: {exact(week)}", f"30 d: {exact(month)}")
    return "contributed in " + ", ".join(map(_unbroken, parts))


def _merge_tile(view: View) -> Markup:
    state = view.state
    due = state.next_due(view.now_ms)
    if state.ended is not None:
        value, note = "none", "the run has ended"
    elif due is None:
        value, note = "—", "not known yet"
    else:
        left = (due[0] - view.now_ms) / 1000
        value = f"in {span(left)}" if left >= 1 else "due now"
        note = f"fragment {due[1]}, {count(state.merges, 'merge')} so far"
    clock = el("span", value, data_due=due[0] if due is not None else None)
    return _tile("Next merge", clock, note)


def _saved_tile(view: View) -> Markup:
    history = view.state.history
    saved = history.plain_bytes - history.sent_bytes
    if saved <= 0:
        return _tile("Saved by compression", "—", "nothing was sent yet")
    times = history.plain_bytes / max(history.sent_bytes, 1)
    note = f"{bytes_text(history.sent_bytes)} sent, {times:.1f} times less than float32"
    return _tile("Saved by compression", bytes_text(saved), note)


def _ended(view: View) -> Markup | None:
    ended = view.state.ended
    if ended is None:
        return None
    return el(
        "p",
        "This run has ended ",
        when(ended.at_ms, view.now_ms),
        f": {ended.reason}",
        cls="banner",
    )


def _chart_section(view: View, heading: str) -> Markup:
    if heading == "Peers":
        figure = figure_html(
            view, peers_figure(view), address=f"{view.base}/api/chart/peers.svg", half=True
        )
    else:
        address = f"{view.base}/api/chart/throughput.svg"
        figure = figure_html(view, throughput_figure(view), address=address, half=True)
    return el("section", el("h2", heading), figure)


def _contributions(view: View) -> Markup:
    return figure_html(
        view, contributions_figure(view), address=f"{view.base}/api/chart/contributions.svg"
    )


def happening_items(view: View, happenings: list[Happening]) -> list[Markup]:
    """Happenings as list items, the newest first."""
    return [
        el(
            "li",
            when(one.at_ms, view.now_ms),
            " ",
            el("span", one.kind, cls="kind"),
            " ",
            one.text,
            data_h=one.n,
        )
        for one in reversed(happenings)
    ]


def _happenings(view: View) -> Markup:
    shown = list(view.state.happenings[-EVENTS_SHOWN:])
    items = happening_items(view, shown)
    return el(
        "section",
        el("h2", "What happened"),
        el("ol", items, cls="log", data_part="log") if items else el("p", "Nothing yet."),
        el("p", el("a", "All that is kept", href=f"{view.base}/events")),
    )


def _sample(view: View) -> Markup:
    sample = view.state.sample
    if sample is None:
        content: object = el("p", "The model has not written anything yet.")
    else:
        content = join(
            el("blockquote", el("p", el("span", sample.prompt, cls="prompt"), sample.text)),
            el(
                "p",
                f"Written by the model after {count(sample.step, 'merge')}, "
                f"{amount(sample.tokens)} tokens, ",
                when(sample.at_ms, view.now_ms),
                ".",
                cls="note",
            ),
        )
    return el("section", el("h2", "What it writes now"), content, data_part="sample")


def _fragments(view: View) -> Markup:
    state = view.state
    sizes = state.run.fragments if state.run is not None else ()
    numbers = sorted(set(state.heads) | set(range(len(sizes))))
    rows = []
    for p in numbers[:FRAGMENTS_SHOWN]:
        one = state.heads.get(p)
        size = amount(sizes[p]) if p < len(sizes) else "unknown"
        cells = [el("th", f"{p}", scope="row"), cell(size, number=True)]
        if one is None or not one.version:
            rows.append(el("tr", cells, el("td", "not merged yet", colspan=5)))
            continue
        cells += [
            cell(one.version, number=True),
            cell(when(one.at_ms, view.now_ms)),
            cell(one.listed, number=True),
            cell(peer_link(view, one.home, name_in(state, one.home))),
            el("td", el("code", one.digest[:12], title=one.digest)),
        ]
        rows.append(el("tr", cells))
    heads = [
        head("Fragment"),
        head("Parameters", number=True),
        head("Version", number=True),
        head("Merged"),
        head("Contributions", number=True),
        head("Home"),
        head("Digest"),
    ]
    hidden = len(numbers) - FRAGMENTS_SHOWN
    return el(
        "section",
        el("h2", "Fragments"),
        el("p", "The model is merged in parts. Each version of a part is merged by another peer."),
        table("Fragments and their versions", heads, rows, name="fragments"),
        el("p", f"and {exact(hidden)} more") if hidden > 0 else None,
    )


def _about(view: View) -> Markup | None:
    run, units = view.state.run, view.state.units
    if run is None:
        return None
    rows: list[tuple[str, object]] = [("Run", el("code", run.run))]
    if run.parameters:
        rows.append(("Parameters", amount(run.parameters)))
    rows.extend(run.model)
    rows.extend(run.data)
    if run.licence:
        rows.append(("Licence", run.licence))
    if run.organiser:
        rows.append(("Organiser", run.organiser))
    if run.created_ms:
        rows.append(("Created", el("time", clock_text(run.created_ms))))
    if units:
        rows.append(("Work units", ", ".join(f"{exact(n)} {name}" for name, n in units)))
    return el("section", el("h2", "About this run"), facts(rows))


def events_page(view: View) -> str:
    """Everything that is kept of what happened."""
    items = happening_items(view, list(view.state.happenings))
    return page(
        view,
        "Events",
        "Events",
        el("h1", "What happened"),
        el(
            "p",
            f"{exact(len(items))} of {exact(view.state.happened)} events are kept, newest first.",
        ),
        el("ol", items, cls="log", data_part="log-all"),
    )
