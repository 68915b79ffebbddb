"""The picture of `dugnad top`: this peer, and who else is in the swarm."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dugnad.peer.render import cell, status_text

PEERS_SHOWN: Final = 30
"""More do not fit a terminal; `dugnad peers` has them all."""
_COLOURS: Final = {"training": "green", "paused": "yellow", "error": "red"}
_COLUMNS: Final = ("name", "state", "link", "tokens_per_s", "listed_tokens", "last_seen_s")

Row = Mapping[str, Any]
"""JSON of the control API; Any: its values are whatever JSON holds."""


def picture(status: Row, peers: Sequence[Row]) -> Group:
    """The whole view. What peers call themselves is text, never markup."""
    state = str(status["state"])
    head = Text(f" {state} ", style=f"bold reverse {_COLOURS.get(state, 'cyan')}")
    if status["reason"]:
        head.append(f" {cell(status['reason'])}", style="not reverse not bold")
    return Group(head, Panel(Text(status_text(status)), title="this peer"), _table(peers))


def _table(peers: Sequence[Row]) -> Table:
    table = Table(title=f"{len(peers)} peers", expand=True)
    for name in _COLUMNS:
        number = name.endswith(("_s", "tokens"))
        table.add_column(
            name.replace("_per_s", "/s").replace("_", " "), justify="right" if number else "left"
        )
    fastest = sorted(peers, key=lambda row: -float(row["tokens_per_s"] or 0.0))
    for row in fastest[:PEERS_SHOWN]:
        table.add_row(*(Text(cell(row.get(name))) for name in _COLUMNS))
    return table
