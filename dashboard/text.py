"""Numbers, times and foreign words as people read them.

Foreign text is judged here once, when an event is folded; whatever writes a page escapes it again
(`dugnad.dashboard.markup`), so that neither rests on the other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from dugnad.dht.advert import clean_text

NAME_CHARS_MAX: Final = 32
"""Of a peer's label, as everywhere else (volunteers.md 2.4)."""
WORD_CHARS_MAX: Final = 40
LINE_CHARS_MAX: Final = 300
PARAGRAPH_CHARS_MAX: Final = 4000
_YEAR_9999_MS: Final = 253_402_300_799_000
"""The last moment that datetime knows; foreign times are foreign numbers."""

_SIZES: Final = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_SPANS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def line(text: str, limit: int = LINE_CHARS_MAX) -> str:
    """`text` on one line, printable, at most `limit` characters."""
    if len(text) <= limit and text.isascii() and text.isprintable() and "  " not in text:
        return text.strip()  # the usual case, ten times as fast
    return clean_text(text, limit)


def paragraph(text: str, limit: int = PARAGRAPH_CHARS_MAX) -> str:
    """`text` with its line ends, every line printable, at most `limit` characters."""
    lines = text[:limit].replace("\r\n", "\n").split("\n")
    return "\n".join(map(_spaced, lines))[:limit].strip("\n")


def _spaced(text: str) -> str:
    """`text` as by `line`, with one space kept where it begins or ends with some."""
    kept = line(text, PARAGRAPH_CHARS_MAX)
    return f"{' ' if text[:1] == ' ' else ''}{kept}{' ' if kept and text[-1:] == ' ' else ''}"


def amount(value: float) -> str:
    """A number with three significant digits and k, M, G …: 1234567 is '1.23 M'."""
    for size, letter in _SIZES:
        if abs(value) >= size:
            return f"{_three(value / size)} {letter}"
    return str(value) if isinstance(value, int) else _three(value)


def _three(value: float) -> str:
    whole = abs(value)
    if whole >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if whole >= 10 else f"{value:.2f}"


def exact(value: int) -> str:
    """A whole number with thin spaces between thousands, as in 1 234 567."""
    return f"{value:,}".replace(",", "\u202f")


def bytes_text(value: float) -> str:
    """An amount of bytes: '1.23 MB'."""
    text = amount(value)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def count(value: int, one: str, many: str = "") -> str:
    """'1 peer', '2 peers'."""
    return f"{exact(value)} {one if value == 1 else many or one + 's'}"


def percent(share: float) -> str:
    """A share between 0 and 1 as '12.3 %'; small ones keep a digit that says something."""
    value = 100 * share
    if 0 < value < 0.1:
        return "< 0.1 %"
    return f"{value:.1f} %"


def span(seconds: float) -> str:
    """How long something takes in two units at most: '3 d 4 h', '12 min 5 s', '8 s'."""
    whole = max(int(seconds), 0)
    for position, (size, unit) in enumerate(_SPANS):
        if whole >= size:
            rest = whole % size
            below, below_unit = (*_SPANS, (1, "s"))[position + 1]
            more = f" {rest // below} {below_unit}" if rest // below and whole < 10 * size else ""
            return f"{whole // size} {unit}{more}"
    return f"{whole} s"


def ago(at_ms: int, now_ms: int) -> str:
    """How long before `now_ms` something was, in one unit: '3 min ago'; never negative."""
    seconds = max(now_ms - at_ms, 0) // 1000
    for size, unit in _SPANS:
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def moment(at_ms: int) -> datetime:
    """`at_ms` as a time in UTC, held inside what datetime knows."""
    return datetime.fromtimestamp(min(max(at_ms, 0), _YEAR_9999_MS) / 1000, UTC)


def iso(at_ms: int) -> str:
    """`at_ms` as a `datetime` attribute: 2026-11-30T02:42:19Z."""
    return f"{moment(at_ms).isoformat(timespec='seconds')[:19]}Z"


def clock_text(at_ms: int) -> str:
    """`at_ms` for people: 2026-11-30 02:42:19 UTC."""
    return f"{moment(at_ms).isoformat(' ', 'seconds')[:19]} UTC"


def fingerprint(peer: str) -> str:
    """The end of a peer's key, which tells equal names apart."""
    return peer[-6:]
