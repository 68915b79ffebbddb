"""The page of one peer: its history, its machine, and the receipts behind its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from dugnad.averaging.board import BoardRow
from dugnad.dashboard.events import PeerRow
from dugnad.dashboard.figures import (
    Choice,
    figure_html,
    loss_figure,
    own_figure,
    sessions_figure,
)
from dugnad.dashboard.history import active_ms
from dugnad.dashboard.layout import (
    View,
    cell,
    facts,
    head,
    number_cell,
    page,
    peer_link,
    table,
    when,
)
from dugnad.dashboard.markup import Markup, el
from dugnad.dashboard.state import board_row, name_in
from dugnad.dashboard.text import LINE_CHARS_MAX, amount, count, exact, line, percent, span

RECEIPTS_SHOWN: Final = 100
"""The newest receipts on a page; the host has all of them."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A contribution as a commit lists it. `status` is provisional, settled, or refused with
    `reason`.

    `tokens` are those that the maker counted, `credited` those that nobody covered before.
    """

    at_ms: int
    fragment: int
    version: int
    seq: int
    tokens: int
    credited: int
    status: str
    reason: str = ""
    home: str = ""
    witness: str = ""
    commit: str = ""


def contributor_page(view: View, peer: str, receipts: Sequence[Receipt]) -> str:
    """The page of `peer`; one of whom nothing is known has a page that says so."""
    peer = line(peer, 64)
    name = name_in(view.state, peer)
    row = view.state.peers.get(peer)
    ranked = _board_row(view, peer)
    known = row is not None or ranked is not None or receipts
    owner = ranked is not None and ranked.machines and row is None and not receipts
    return page(
        view,
        "Peers" if ranked is None else "Leaderboard",
        name,
        el("h1", name),
        el("p", "Key ", el("code", peer, cls="long"), cls="note"),
        None if known else el("p", "Nothing is known here of a peer with this key."),
        _credit(view, ranked) if ranked is not None else None,
        _machines(view, ranked) if ranked is not None and ranked.machines else None,
        _machine(view, row) if row is not None else None,
        *((_charts(view, peer), _receipts(view, receipts)) if known and not owner else ()),
    )


def known_peer(view: View, peer: str) -> bool:
    """Whether the state has heard of `peer`."""
    return peer in view.state.peers or _board_row(view, peer) is not None


def _board_row(view: View, peer: str) -> BoardRow | None:
    return board_row(view.state.board, peer) if view.state.board is not None else None


def _credit(view: View, row: BoardRow) -> Markup:
    sessions = view.state.history.sessions
    own = {one.peer: sessions.get(one.peer, ()) for one in row.machines or (row,)}
    here = sum(active_ms(own, view.now_ms).values()) // 1000
    pending = amount(row.provisional)
    if row.unwitnessed:
        pending += f", of which {amount(row.unwitnessed)} wait for a second peer's confirmation"
    place: tuple[str, object] = ("Rank", exact(row.rank))
    if row.owner:
        place = ("Machine of", peer_link(view, row.owner, name_in(view.state, row.owner)))
    rows: list[tuple[str, object]] = [
        place,
        ("Recent tokens (halved every 7 days)", amount(row.recent)),
        ("Settled tokens", f"{amount(row.tokens)}, {percent(row.share)} of the run"),
        ("Pending tokens", pending),
        ("Not credited, trained by others before", amount(row.twice)),
        *_speeds(row),
        ("Contributions", f"{exact(row.contributions)}, {count(row.units, 'work unit')}"),
        ("First and last", [when(row.first_ms, view.now_ms), ", ", when(row.last_ms, view.now_ms)]),
        ("Here in all", span(here) if here else "unknown"),
        ("Verified by recomputing", "— (no audit exists yet)"),
    ]
    return el("section", el("h2", "Credit"), facts(rows))


def _speeds(row: BoardRow) -> list[tuple[str, object]]:
    """The speed that receipts imply beside the one that others timed, and what is disputed."""
    rows: list[tuple[str, object]] = []
    if row.claimed_per_s:
        rows.append(("Speed by its receipts", f"{amount(round(row.claimed_per_s))} tokens/s"))
    if not row.machines:
        timed = f"{amount(round(row.timed_per_s))} tokens/s" if row.timed_per_s is not None else ""
        rows.append(("Speed as others timed it", timed or "not timed by enough members yet"))
    if row.dispute:
        text = f"{amount(row.disputed)} tokens: {row.dispute}"
        rows.append(("Disputed, not credited", text))
    return rows


def _machines(view: View, row: BoardRow) -> Markup:
    heads = [
        head("Name and key"),
        head("Recent", number=True),
        head("Settled", number=True),
        head("Pending", number=True),
        head("Units", number=True),
        head("First"),
        head("Last", number=True),
    ]
    body = [
        el(
            "tr",
            el("th", peer_link(view, one.peer, name_in(view.state, one.peer)), scope="row"),
            number_cell(one.recent, amount(one.recent)),
            number_cell(one.tokens, amount(one.tokens)),
            number_cell(one.provisional, amount(one.provisional)),
            number_cell(one.units, exact(one.units)),
            cell(when(one.first_ms, view.now_ms)),
            cell(when(one.last_ms, view.now_ms), number=True),
        )
        for one in row.machines
    ]
    return el(
        "section",
        el("h2", "Machines"),
        el(
            "p",
            f"{count(len(body), 'machine')} under one owner's key: the owner signed each, and each"
            " accepted. Receipts and history are on each machine's own page.",
        ),
        table("Machines of this owner", heads, body),
    )


def _machine(view: View, row: PeerRow) -> Markup:
    speed = f"{amount(row.tokens_per_s)} tokens/s" if row.tokens_per_s else "unknown"
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    rows: list[tuple[str, object]] = [
        ("State", state),
        ("Here since", when(row.since_ms, view.now_ms)),
        ("Last seen", when(row.last_seen_ms, view.now_ms)),
        ("Speed", speed),
        ("Device", row.device or "unknown"),
        ("Roles", ", ".join(row.roles) or "unknown"),
        ("Link and codec", f"{row.link}, {row.codec or 'codec unknown'}"),
        ("Region, as its owner says", row.region or "not said"),
        ("Version", row.version or "unknown"),
    ]
    return el("section", el("h2", "Machine, as it describes itself"), facts(rows))


def _charts(view: View, peer: str) -> Markup:
    loss = f"{view.base}/api/chart/loss.svg?x=time&y=linear"
    return el(
        "section",
        el("h2", "History"),
        figure_html(view, own_figure(view, peer)),
        figure_html(view, sessions_figure(view, peer)),
        figure_html(view, loss_figure(view, Choice("time"), peer), address=loss),
    )


def _receipts(view: View, receipts: Sequence[Receipt]) -> Markup:
    if not receipts:
        return el(
            "section",
            el("h2", "Receipts"),
            el("p", "No receipt of this peer is here yet."),
            id="receipts",
        )
    heads = [
        head("Time"),
        head("Fragment", number=True),
        head("Version", number=True),
        head("Seq", number=True),
        head("Tokens", number=True),
        head("Credited", number=True),
        head("Status"),
        head("Home"),
        head("Witness"),
        head("Commit"),
    ]
    body = [_receipt(view, one) for one in receipts[:RECEIPTS_SHOWN]]
    shown = min(len(receipts), RECEIPTS_SHOWN)
    return el(
        "section",
        el("h2", "Receipts"),
        el(
            "p",
            f"The newest {count(shown, 'receipt')}: each is signed by its maker and was listed by a"
            " home; every peer of the run holds the same ones. A unit is credited in one fragment"
            " only, so most of the tokens of a receipt are credited in others.",
        ),
        table("Receipts of this peer", heads, body),
        id="receipts",
    )


def _receipt(view: View, one: Receipt) -> Markup:
    status = line(one.status, 20)
    if one.reason:
        status += f": {line(one.reason, LINE_CHARS_MAX)}"
    home, witness, commit = line(one.home, 64), line(one.witness, 64), line(one.commit, 64)
    return el(
        "tr",
        cell(when(one.at_ms, view.now_ms)),
        cell(one.fragment, number=True),
        cell(one.version, number=True),
        cell(one.seq, number=True),
        number_cell(one.tokens, amount(one.tokens)),
        number_cell(one.credited, amount(one.credited)),
        cell(status),
        cell(name_in(view.state, home) or "—"),
        cell(name_in(view.state, witness) or "—"),
        el("td", el("code", commit[:12], title=commit)),
    )
