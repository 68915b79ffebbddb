"""The leaderboard for people, as JSON and as CSV: always the same board, ordered or filtered."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from dugnad.averaging.board import Board, BoardRow, board_json
from dugnad.dashboard.evaluatedtable import evaluated_section, prepared_section
from dugnad.dashboard.history import active_ms
from dugnad.dashboard.layout import (
    View,
    cell,
    filter_form,
    head,
    number_cell,
    page,
    pager,
    peer_link,
    sort_head,
    table,
    when,
)
from dugnad.dashboard.markup import Markup, el
from dugnad.dashboard.query import ROWS_PER_PAGE, TableQuery, table_query
from dugnad.dashboard.series import DAY_MS
from dugnad.dashboard.text import amount, clock_text, count, exact, iso, percent, span

ROWS_AROUND: Final = 5
"""Rows shown above and below the one that was looked for."""
PERIODS: Final = ("all", "day", "week", "month")
_PERIOD_DAYS: Final = {"day": 1, "week": 7, "month": 30}


@dataclass(frozen=True, slots=True)
class Placed:
    """A row of the board with what the page adds: the name that the peer chose, its tokens in the
    period, and how long it was here.
    """

    row: BoardRow
    name: str
    tokens: int
    active_s: int


Key = Callable[[Placed], float]
COLUMNS: Final[Mapping[str, tuple[str, bool, Key, str]]] = {
    "recent": ("Recent", True, lambda p: p.row.recent, "tokens, halved every 7 days"),
    "total": ("Total", True, lambda p: p.tokens, "settled tokens"),
    "pending": ("Pending", True, lambda p: p.row.provisional, "not settled yet"),
    "units": ("Units", True, lambda p: p.row.units, "work units completed"),
    "active": ("Active", True, lambda p: p.active_s, "time here, as this peer saw it"),
    "first": ("First", False, lambda p: p.row.first_ms, "first contribution"),
    "last": ("Last", True, lambda p: p.row.last_ms, "last contribution"),
}
"""Name in the address → label, whether its first order is falling, key, explanation."""


def board_query(query: Mapping[str, str]) -> TableQuery:
    """What an address asks of the board; `me` is read by the page."""
    columns = {name: falling for name, (_, falling, _, _) in COLUMNS.items()}
    return table_query(query, columns, "recent", {"period": PERIODS})


def basis(view: View) -> str:
    """What the board was computed from, as a sentence."""
    board, state = view.state.board, view.state
    if board is None:
        return "No receipts were read yet."
    peers = ""
    if state.board_known:
        peers = f", of {exact(state.board_heard)} of {count(state.board_known, 'peer')}"
    as_of = f", as of {clock_text(board.as_of_ms)}" if board.as_of_ms else "; none is settled yet"
    refused = f" {count(board.refused, 'receipt was', 'receipts were')} refused."
    return f"Computed from {count(board.receipts, 'receipt')}{peers}{as_of} ({board.formula})." + (
        refused if board.refused else ""
    )


def placed(view: View, board: Board, period: str) -> list[Placed]:
    """All rows, with tokens of the period: the whole run, or the last days (from the merges that
    this peer saw).
    """
    days = _PERIOD_DAYS.get(period)
    tokens = _since(view, days) if days else None
    active = active_ms(view.state.history.sessions, view.now_ms)
    peers = view.state.peers
    rows = []
    for row in board.rows:
        known = peers.get(row.peer)
        name = known.name if known is not None and known.name else row.name
        keys = [one.peer for one in row.machines or (row,)]
        amount_of = row.tokens if tokens is None else sum(tokens.get(key, 0) for key in keys)
        here = sum(active.get(key, 0) for key in keys) // 1000
        rows.append(Placed(row, name, amount_of, here))
    return rows


def _since(view: View, days: int) -> dict[str, int]:
    history = view.state.history
    bars = history.hours if days == 1 else history.days
    totals: dict[str, int] = {}
    for bar in bars:
        if bar.at_ms >= view.now_ms - days * DAY_MS:
            for peer, tokens in bar.parts.items():
                totals[peer] = totals.get(peer, 0) + tokens
    return totals


def leaderboard_page(view: View, query: TableQuery, me: str) -> str:
    """The page; `me` is a name or (the end of) a key to find, with the rows around it."""
    board = view.state.board
    period = dict(query.choices).get("period", "all")
    path = f"{view.base}/leaderboard"
    if board is None:
        body: object = el("p", "There is no board yet: nothing was merged, or it is being read.")
    else:
        body = _board(view, query, (me, period))
    return page(
        view,
        "Leaderboard",
        "Leaderboard",
        el("h1", "Who trained this model"),
        el("p", basis(view)),
        el(
            "p",
            "A token counts for whoever's contribution covered it first, once another peer "
            "confirmed it. Each row opens into the receipts behind its numbers.",
        ),
        _forms(query, path, me, period),
        body,
        evaluated_section(view),
        prepared_section(view),
        el(
            "p",
            "As data: ",
            el("a", "JSON", href=f"{view.base}/leaderboard.json"),
            ", ",
            el("a", "CSV", href=f"{view.base}/leaderboard.csv"),
            ".",
        ),
    )


def _forms(query: TableQuery, path: str, me: str, period: str) -> Markup:
    names = {"all": "the whole run", "day": "24 hours", "week": "7 days", "month": "30 days"}
    options = [el("option", names[p], value=p, selected=p == period) for p in PERIODS]
    return filter_form(
        query,
        path,
        "Filter by name or key",
        el(
            "label",
            "Find me (name or end of key) ",
            el("input", type="search", name="me", value=me, maxlength=64),
        ),
        el("label", "Period ", el("select", options, name="period")),
    )


def _board(view: View, query: TableQuery, wanted: tuple[str, str]) -> Markup:
    me, period = wanted
    assert view.state.board is not None
    rows = placed(view, view.state.board, period)
    key = COLUMNS[query.sort][2]
    rows.sort(key=lambda p: p.row.rank)
    rows.sort(key=key, reverse=query.descending)
    if query.words:
        rows = [p for p in rows if _matches(p, query.words)]
    found = next((n for n, p in enumerate(rows) if me and _matches(p, me)), None)
    path = f"{view.base}/leaderboard"
    if found is not None:
        shown = rows[max(found - ROWS_AROUND, 0) : found + ROWS_AROUND + 1]
        note = el("p", "Around the row that was looked for. ", el("a", "All rows", href=path))
        return _part(note, _table(view, query, shown, rows[found]))
    query = query.with_page(len(rows))
    start = (query.page - 1) * ROWS_PER_PAGE
    lost = (
        el(
            "p",
            "Nobody on the board has that name or key. A new peer appears with its first "
            "merged contribution.",
            role="status",
        )
        if me
        else None
    )
    return _part(
        lost,
        _table(view, query, rows[start : start + ROWS_PER_PAGE], None),
        pager(query, path, len(rows)),
    )


def _part(*content: object) -> Markup:
    """What the script fetches anew on an open page."""
    return el("div", *content, data_part="board", data_rows=True)


def _matches(one: Placed, words: str) -> bool:
    wanted = words.casefold()
    return wanted in one.name.casefold() or any(
        wanted in row.name.casefold() or words in row.peer for row in (one.row, *one.row.machines)
    )


def _table(view: View, query: TableQuery, rows: list[Placed], me: Placed | None) -> Markup:
    path = f"{view.base}/leaderboard"
    heads = [head("Rank", number=True, title="by recent score"), head("Name and key")]
    for name, (label, falling, _, title) in COLUMNS.items():
        heads.append(sort_head(name, label, query, path, falling=falling, title=title))
        if name == "total":
            heads.append(head("Share", number=True, title="of all settled tokens"))
        if name == "pending":
            heads.append(head("Verified", title="recomputed by another peer"))
    body = [_row(view, one, one is me) for one in rows]
    drawn = table("Contributors, by receipts", heads, body)
    note = el(
        "p",
        "Verified is empty: this version cannot recompute another peer's work, so "
        "nothing is claimed. What is settled was confirmed by a second peer. Members time each "
        "other with seeded work; what a peer claims beyond that is disputed and not credited.",
        cls="note",
    )
    return el("div", drawn, note)


def _row(view: View, one: Placed, mine: bool) -> Markup:
    row = one.row
    receipts = f"{view.base}/peer/{quote(row.peer, safe='')}#receipts"
    return el(
        "tr",
        el("td", row.rank, cls="num"),
        el(
            "th",
            peer_link(view, row.peer, one.name),
            f" {count(len(row.machines), 'machine')}" if row.machines else None,
            disputed_mark(row),
            " ← here" if mine else None,
            scope="row",
        ),
        number_cell(row.recent, amount(row.recent), receipts),
        number_cell(one.tokens, amount(one.tokens), receipts),
        cell(percent(row.share), number=True),
        number_cell(row.provisional, amount(row.provisional), receipts),
        cell("—"),
        number_cell(row.units, exact(row.units), receipts),
        cell(span(one.active_s) if one.active_s else "—", number=True),
        cell(when(row.first_ms, view.now_ms)),
        cell(when(row.last_ms, view.now_ms), number=True),
        cls="me" if mine else None,
    )


def disputed_mark(row: BoardRow) -> Markup | None:
    """What of a row is disputed, in words; the reason as its tooltip."""
    if not row.dispute:
        return None
    text = f" disputed: {amount(row.disputed)} tokens"
    return el("span", text, cls="note", title=row.dispute)


def leaderboard_json(view: View) -> bytes:
    """The board as the same bytes on every peer with the same receipts; `null` before the first."""
    return board_json(view.state.board) if view.state.board is not None else b"null"


def leaderboard_csv(view: View) -> str:
    """The board as comma-separated values. Cells that a spreadsheet would run start with '."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        (
            "rank",
            "name",
            "peer",
            "recent",
            "tokens",
            "share",
            "provisional",
            "unwitnessed",
            "twice",
            "contributions",
            "units",
            "first",
            "last",
            "disputed",
            "dispute",
            "machines",
        )
    )
    board = view.state.board
    for row in board.rows if board is not None else ():
        name = "'" + row.name if row.name[:1] in ("=", "+", "-", "@") else row.name
        writer.writerow(
            (
                row.rank,
                name,
                row.peer,
                row.recent,
                row.tokens,
                f"{row.share:.6f}",
                row.provisional,
                row.unwitnessed,
                row.twice,
                row.contributions,
                row.units,
                iso(row.first_ms),
                iso(row.last_ms),
                row.disputed,
                row.dispute,
                " ".join(machine.peer for machine in row.machines),
            )
        )
    return out.getvalue()
