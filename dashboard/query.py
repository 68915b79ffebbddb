"""What a reader may ask of a table in the address: order, filter, page. Wrong values are defaults.

Everything here comes from strangers: lengths and numbers are bounded, and nothing is echoed
without going through `dugnad.dashboard.markup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlencode

from dugnad.dashboard.text import line

FILTER_CHARS_MAX: Final = 64
PAGE_MAX: Final = 100_000
ROWS_PER_PAGE: Final = 50
"""A few screens; a thousand rows at once would be slow on a telephone."""


@dataclass(frozen=True, slots=True)
class TableQuery:
    """How a table is wanted. `page` counts from 1; `choices` are other fixed choices of a page."""

    sort: str
    descending: bool
    words: str = ""
    page: int = 1
    choices: tuple[tuple[str, str], ...] = ()

    def address(self, path: str, **changes: str | int | bool) -> str:
        """The address of this table with some of `sort`, `descending`, `words`, `page` changed."""
        sort = str(changes.get("sort", self.sort))
        descending = bool(changes.get("descending", self.descending))
        parts: list[tuple[str, str]] = [("sort", sort), ("dir", "down" if descending else "up")]
        words = str(changes.get("words", self.words))
        if words:
            parts.append(("q", words))
        parts.extend(self.choices)
        page = int(changes.get("page", 1))
        if page > 1:
            parts.append(("page", str(page)))
        return f"{path}?{urlencode(parts)}"

    def with_page(self, rows: int) -> TableQuery:
        """The same with a page that exists among `rows` rows."""
        return replace(self, page=min(self.page, max(1, pages_of(rows))))


def pages_of(rows: int) -> int:
    """How many pages `rows` rows fill."""
    return -(-rows // ROWS_PER_PAGE)


def table_query(
    query: Mapping[str, str],
    columns: Mapping[str, bool],
    default: str,
    choices: Mapping[str, tuple[str, ...]] | None = None,
) -> TableQuery:
    """What `query` asks of a table with `columns` (name → whether the first order is falling).

    `choices` name other parameters and the values they may have, the first being the default and
    left out of addresses.
    """
    sort = query.get("sort", default)
    sort = sort if sort in columns else default
    descending = {"down": True, "up": False}.get(query.get("dir", ""), columns[sort])
    chosen = []
    for name, values in (choices or {}).items():
        value = query.get(name, values[0])
        if value in values[1:]:
            chosen.append((name, value))
    return TableQuery(
        sort,
        descending,
        line(query.get("q", ""), FILTER_CHARS_MAX),
        whole(query.get("page", "1"), 1, PAGE_MAX),
        tuple(chosen),
    )


def whole(text: str, default: int, limit: int) -> int:
    """The whole number from 1 to `limit` in `text`, else `default`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        return default
    return min(max(int(text), 1), limit)
