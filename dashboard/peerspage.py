"""The peers of a run in a table: sorted, filtered and paged by the address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dugnad.dashboard.events import PeerRow
from dugnad.dashboard.layout import (
    View,
    cell,
    filter_form,
    number_cell,
    page,
    pager,
    peer_link,
    sort_head,
    table,
    when,
)
from dugnad.dashboard.markup import Markup, el, join
from dugnad.dashboard.query import ROWS_PER_PAGE, TableQuery, table_query
from dugnad.dashboard.text import amount, bytes_text, count, exact

COLUMNS: Final[Mapping[str, tuple[str, bool, Callable[[PeerRow], str | float]]]] = {
    "name": ("Name", False, lambda row: row.name.casefold()),
    "state": ("State", False, lambda row: row.state),
    "speed": ("Tokens/s", True, lambda row: row.tokens_per_s),
    "listed": ("Tokens listed", True, lambda row: row.listed_tokens),
    "device": ("Device", False, lambda row: row.device.casefold()),
    "roles": ("Roles", False, lambda row: " ".join(row.roles)),
    "link": ("Link", False, lambda row: row.link),
    "codec": ("Codec", False, lambda row: row.codec),
    "rate": ("Line", True, lambda row: row.link_bytes_per_s),
    "saved": ("Saved", True, lambda row: row.saved_bytes),
    "since": ("Here since", True, lambda row: row.since_ms),
    "seen": ("Last seen", True, lambda row: row.last_seen_ms),
    "version": ("Version", False, lambda row: row.version),
}
"""Name in the address → label, whether its first order is falling, and the key to sort by."""
_SHOW: Final = ("all", "here", "gone")


def peers_query(query: Mapping[str, str]) -> TableQuery:
    """What an address asks of the table."""
    columns = {name: falling for name, (_, falling, _) in COLUMNS.items()}
    return table_query(query, columns, "speed", {"show": _SHOW})


def chosen_peers(rows: list[PeerRow], query: TableQuery) -> list[PeerRow]:
    """The rows that match, in the order asked for; equal ones by their key."""
    show = dict(query.choices).get("show", "all")
    if show != "all":
        rows = [row for row in rows if bool(row.gone_ms) == (show == "gone")]
    if query.words:
        wanted = query.words.casefold().split()
        rows = [row for row in rows if all(word in _searched(row) for word in wanted)]
    key = COLUMNS[query.sort][2]
    return sorted(sorted(rows, key=_peer), key=key, reverse=query.descending)


def _peer(row: PeerRow) -> str:
    return row.peer


def _searched(row: PeerRow) -> str:
    return " ".join(
        (row.name, row.peer, row.state, row.device, row.link, row.codec, row.region, *row.roles)
    ).casefold()


def peers_page(view: View, query: TableQuery) -> str:
    """The page."""
    everyone = list(view.state.peers.values())
    rows = chosen_peers(everyone, query)
    query = query.with_page(len(rows))
    start = (query.page - 1) * ROWS_PER_PAGE
    path = f"{view.base}/peers"
    heads = [
        sort_head(name, label, query, path, falling=falling)
        for name, (label, falling, _) in COLUMNS.items()
    ]
    body = [_row(view, row) for row in rows[start : start + ROWS_PER_PAGE]]
    total = f"{count(view.state.live, 'peer')} here, {exact(len(everyone))} known."
    show = dict(query.choices).get("show", "all")
    options = [el("option", name, value=name, selected=name == show) for name in _SHOW]
    return page(
        view,
        "Peers",
        "Peers",
        el("h1", "Peers"),
        el("p", total, " What they say about themselves is their own claim."),
        filter_form(query, path, "Find", el("label", "Show ", el("select", options, name="show"))),
        el(
            "div",
            table("Peers of this run", heads, body) if body else _nobody(query),
            pager(query, path, len(rows)),
            data_part="peers",
            data_rows=True,
        ),
    )


def _nobody(query: TableQuery) -> Markup:
    return el("p", "No peer matches." if query.words or query.choices else "Nobody is here yet.")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.3g} Mbit/s" if bytes_per_s else "—"


def _row(view: View, row: PeerRow) -> Markup:
    mark = "gone" if row.gone_ms else "here"
    word = join(
        el("span", "○ " if row.gone_ms else "● ", aria_hidden="true", cls=mark),
        row.state,
        el("div", row.reason, cls="note") if row.reason else None,
    )
    return el(
        "tr",
        el("th", peer_link(view, row.peer, row.name), scope="row"),
        cell(word),
        number_cell(round(row.tokens_per_s), amount(row.tokens_per_s) if row.tokens_per_s else "—"),
        number_cell(row.listed_tokens, amount(row.listed_tokens)),
        cell(row.device or "unknown"),
        cell(", ".join(row.roles) or "unknown"),
        cell(row.link),
        cell(f"{row.codec}, {row.bits:.3g} bits" if row.codec else "unknown"),
        number_cell(round(row.link_bytes_per_s), _rate(row.link_bytes_per_s)),
        number_cell(row.saved_bytes, bytes_text(row.saved_bytes) if row.saved_bytes else "—"),
        cell(when(row.since_ms, view.now_ms), number=True),
        cell(when(row.last_seen_ms, view.now_ms), number=True),
        cell(row.version or "unknown"),
    )
