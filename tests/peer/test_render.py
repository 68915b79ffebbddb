"""Plain text for the terminal."""

from collections.abc import Callable

import msgspec

from dugnad.peer.render import ROWS_SHOWN_MAX, cell, pairs, status_text, table
from dugnad.peer.views import Status


def test_a_table_aligns_text_left_and_numbers_right() -> None:
    rows = [{"name": "one", "tokens": 5}, {"name": "three", "tokens": 12_345}]
    assert table(rows).splitlines() == [
        "name   tokens",
        "one         5",
        "three  12,345",
    ]


def test_a_table_shows_the_columns_asked_for_and_dashes_for_what_is_unknown() -> None:
    rows = [{"a": None, "b": 1.25, "c": True}]
    assert table(rows, ("c", "a", "last_seen_s", "tokens_per_s")).splitlines() == [
        "c    a  last seen, s  tokens/s",
        "yes  -             -         -",
    ]


def test_no_rows_are_said_plainly() -> None:
    assert table([]) == "none"


def test_a_long_table_says_how_much_is_left_out() -> None:
    text = table([{"n": i} for i in range(ROWS_SHOWN_MAX + 5)])
    assert text.splitlines()[-1] == "and 5 more (--json shows all)"


def test_hostile_names_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in table([{"name": "\x1b[2J[bold]x[/bold]\r\n"}])
    assert cell("x" * 1000).endswith("…")


def test_cells_are_short() -> None:
    assert [cell(v) for v in (0.12345, 1234.56, 10_000, [1, 2], {"open": 3})] == [
        "0.123",
        "1,234.6",
        "10,000",
        "1 2",
        "open 3",
    ]


def test_pairs_are_aligned() -> None:
    assert pairs([("a", "1"), ("long", "2")]) == "a     1\nlong  2"


def test_a_status_says_the_state_and_why(status_of: Callable[..., Status]) -> None:
    paused = status_of(state="paused", reason="on battery")
    lines = status_text(msgspec.to_builtins(paused)).splitlines()
    assert lines[0].split(maxsplit=1) == ["state", "paused: on battery"]
    assert any("2.5" in line and "not measured yet" in line for line in lines)
    training = status_text(msgspec.to_builtins(status_of()))
    assert training.splitlines()[0].split() == ["state", "training"]


def test_status_names_the_page_where_there_is_one(status_of: Callable[..., Status]) -> None:
    without = status_text(msgspec.to_builtins(status_of()))
    served = status_text(msgspec.to_builtins(status_of(dashboard="http://127.0.0.1:8080/")))
    assert "page" not in without
    assert "http://127.0.0.1:8080/" in served
