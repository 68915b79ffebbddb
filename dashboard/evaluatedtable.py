"""Evaluated and prepared tokens: what else peers earn, beside the board of training and never in
it."""

from __future__ import annotations

from dugnad.dashboard.events import EvaluatedRow, PreparedRow
from dugnad.dashboard.layout import View, cell, head, number_cell, peer_link, table
from dugnad.dashboard.markup import Markup, el
from dugnad.dashboard.state import name_in
from dugnad.dashboard.text import exact


def evaluated_section(view: View) -> Markup:
    """The table, under its heading; empty where nobody evaluates."""
    text = (
        "Tokens of held-out text that were scored with the agreed model. They count once "
        "another evaluator found the same loss, and have no part in the board above."
    )
    return _section(view, view.state.evaluated, "Who evaluates it", "Evaluated tokens", text)


def prepared_section(view: View) -> Markup:
    """The table, under its heading; empty where nobody prepares."""
    text = (
        "Tokens that were gathered into units which others fetch by their hash. They count once "
        "another preparer said the same, and have no part in the board above."
    )
    return _section(view, view.state.prepared, "Who prepares its text", "Prepared tokens", text)


def _section(
    view: View,
    rows: tuple[EvaluatedRow, ...] | tuple[PreparedRow, ...],
    heading: str,
    column: str,
    text: str,
) -> Markup:
    if not rows:
        return el("div")
    names = (column, "Pending", "Disputed")
    heads = [head("Name"), *(head(one, number=True) for one in names)]
    body = table(column, heads, [_row(view, row) for row in rows])
    return el("section", el("h2", heading), el("p", text), body)


def _row(view: View, row: EvaluatedRow | PreparedRow) -> Markup:
    numbers = (row.confirmed, row.pending, row.disputed)
    name = peer_link(view, row.peer, name_in(view.state, row.peer))
    return el("tr", cell(name), *(number_cell(one, exact(one)) for one in numbers))
