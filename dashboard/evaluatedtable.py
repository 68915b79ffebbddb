"""Evaluated tokens: what evaluators earn, beside the board of training and never in it."""

from __future__ import annotations

from dugnad.dashboard.events import EvaluatedRow
from dugnad.dashboard.layout import View, cell, head, number_cell, peer_link, table
from dugnad.dashboard.markup import Markup, el
from dugnad.dashboard.state import name_in
from dugnad.dashboard.text import exact


def evaluated_section(view: View) -> Markup:
    """The table, under its heading; empty where nobody evaluates."""
    rows = view.state.evaluated
    if not rows:
        return el("div")
    heads = [
        head("Name"),
        *(head(one, number=True) for one in ("Evaluated tokens", "Pending", "Disputed")),
    ]
    return el(
        "section",
        el("h2", "Who evaluates it"),
        el(
            "p",
            "Tokens of held-out text that were scored with the agreed model. They count once "
            "another evaluator found the same loss, and have no part in the board above.",
        ),
        table("Evaluated tokens", heads, [_row(view, row) for row in rows]),
    )


def _row(view: View, row: EvaluatedRow) -> Markup:
    numbers = (row.confirmed, row.pending, row.disputed)
    name = peer_link(view, row.peer, name_in(view.state, row.peer))
    return el("tr", cell(name), *(number_cell(one, exact(one)) for one in numbers))
