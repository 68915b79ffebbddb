"""The leaderboard for people and programs: a table in a terminal, plain lines elsewhere, JSON.

Everything shown comes out of the board; nothing is computed here but ages and widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

from dugnad.averaging.board import Board, BoardRow, board_json
from dugnad.dht.ids import PeerId, peer_text
from dugnad.peer.views import printable

ROWS_SHOWN: Final = 20
"""Rows of a table unless more are asked for: a screenful."""
PEERS_TITLE: Final = "Who trained this model"

_COLUMNS: Final = ("#", "name", "key", "tokens", "share", "recent", "pending", "twice", "last seen")
_YEAR_9999_S: Final = 253_402_300_799
"""The last second that datetime knows; commit times are foreign numbers."""
_UNITS: Final = ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k"))
_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def board_view(board: Board) -> dict[str, Any]:  # Any: nested JSON values
    """The board as plain dictionaries and lists, for the control API and the dashboard."""
    view = msgspec.to_builtins(board)
    assert isinstance(view, dict)
    return view


def board_text(board: Board) -> str:
    """The board as one line of JSON, the same on every peer that has the same receipts."""
    return board_json(board).decode()


def read_board(view: Mapping[str, Any]) -> Board:
    """The board that :func:`board_view` made into builtins; msgspec.ValidationError when not."""
    return msgspec.convert(view, Board)


def basis_line(board: Board) -> str:
    """What the board was computed from, as a sentence."""
    versions = sum(board.versions)
    receipts = f"{board.receipts} receipt{'' if board.receipts == 1 else 's'}"
    if not board.as_of_ms:
        return f"Computed from {receipts} in {versions} merges; nothing is settled yet."
    seconds = min(board.as_of_ms // 1000, _YEAR_9999_S)
    when = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"Computed from {receipts} in {versions} merges, settled as of {when} ({board.formula})."


def board_lines(
    board: Board, *, now_ms: int, own: PeerId | None = None, rows_max: int = ROWS_SHOWN
) -> list[str]:
    """The board as plain aligned lines, the best first; ``own`` is marked and always shown."""
    table = [_COLUMNS, *(_cells(row, now_ms, own) for row in _shown(board, own, rows_max))]
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
    lines = ["  ".join(_aligned(line, widths)).rstrip() for line in table]
    return [*lines, *_notes(board, rows_max)]


def print_board(
    board: Board,
    stream: TextIO,
    *,
    now_ms: int,
    own: PeerId | None = None,
    rows_max: int = ROWS_SHOWN,
) -> None:
    """Write the board to ``stream``: a table where that is a terminal, else plain lines."""
    if not stream.isatty():
        for line in board_lines(board, now_ms=now_ms, own=own, rows_max=rows_max):
            stream.write(line + "\n")
        return
    from rich.console import Console  # here, since it takes 50 ms and `--json` has no use for it
    from rich.table import Table
    from rich.text import Text

    table = Table(title=PEERS_TITLE, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("name", "key") else "right")
    for row in _shown(board, own, rows_max):
        style = "bold" if _is_own(row, own) else ""
        table.add_row(*(Text(cell) for cell in _cells(row, now_ms, own)), style=style)
    console = Console(file=stream)
    console.print(table)
    for line in _notes(board, rows_max):
        console.print(Text(line))


def _shown(board: Board, own: PeerId | None, rows_max: int) -> list[BoardRow]:
    rest = [row for row in board.rows[rows_max:] if _is_own(row, own)]
    return [*board.rows[:rows_max], *rest]


def _is_own(row: BoardRow, own: PeerId | None) -> bool:
    return own is not None and any(one.peer == peer_text(own) for one in (row, *row.machines))


def _cells(row: BoardRow, now_ms: int, own: PeerId | None) -> tuple[str, ...]:
    return (
        str(row.rank),
        _name(row, own),
        row.peer[-6:],
        _amount(row.tokens),
        f"{100 * row.share:.1f} %",
        _amount(row.recent),
        _amount(row.provisional),
        _amount(row.twice),
        _age(now_ms - row.last_ms),
    )


def _name(row: BoardRow, own: PeerId | None) -> str:
    machines = f" ({len(row.machines)} machines)" if len(row.machines) > 1 else ""
    return printable(row.name) + machines + (" (you)" if _is_own(row, own) else "")


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if column in (1, 2) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def _notes(board: Board, rows_max: int) -> list[str]:
    notes = []
    hidden = len(board.rows) - rows_max
    if hidden > 0:
        notes.append(f"… and {hidden} more.")
    notes.append(
        f"{_amount(board.tokens)} tokens settled, {_amount(board.provisional)} pending,"
        f" {_amount(board.twice)} trained twice; {board.units_covered} units covered."
    )
    unwitnessed = sum(row.unwitnessed for row in board.rows)
    if unwitnessed:
        notes.append(
            f"{_amount(unwitnessed)} of the pending wait for another peer to confirm them."
        )
    for row in board.rows[:rows_max]:
        if row.dispute:
            text = f"{_amount(row.disputed)} tokens of {printable(row.name)} are disputed"
            notes.append(f"{text}: {printable(row.dispute, 200)}.")
    notes.append(basis_line(board))
    return notes


def _amount(tokens: int) -> str:
    """A number of tokens with three significant digits."""
    for size, letter in _UNITS:
        if tokens >= size:
            value = tokens / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {letter}"
    return str(tokens)


def _age(age_ms: int) -> str:
    """How long ago, in the largest unit that gives at least one."""
    seconds = max(age_ms, 0) // 1000
    for size, unit in _AGES:
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
