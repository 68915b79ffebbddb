"""The page of a machine with several runs: a list of them."""

from __future__ import annotations

from collections.abc import Mapping

from dugnad.dashboard.layout import View, document, when
from dugnad.dashboard.markup import Markup, el
from dugnad.dashboard.text import amount, count, percent


def start_page(views: Mapping[str, View]) -> str:
    """Links to the runs under their `base`, with how far each is."""
    items = [_card(view) for view in views.values()]
    return document(
        "Runs",
        el("h1", "Runs on this machine"),
        el("ul", items, cls="cards") if items else el("p", "There is none."),
    )


def _card(view: View) -> Markup:
    state = view.state
    run = state.run
    budget = run.token_budget if run is not None else 0
    share = f" ({percent(min(state.tokens / budget, 1.0))} of the target)" if budget else ""
    ended = "ended; " if state.ended is not None else ""
    purpose = run.purpose.split("\n", 1)[0] if run is not None else ""
    return el(
        "li",
        el("h2", el("a", view.title, href=f"{view.base}/")),
        el("p", purpose) if purpose else None,
        el(
            "p",
            f"{ended}{count(state.live, 'peer')} here, "
            f"{amount(state.tokens)} tokens merged{share}, as of ",
            when(state.as_of_ms, view.now_ms),
        ),
    )
