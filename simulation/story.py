"""What a simulated peer was told and did: kept as it came, put into words for a violation."""

from __future__ import annotations

from collections.abc import Iterable

from dugnad.averaging import formats as fm

Told = tuple[float, str, object]
"""When, which way, and the event or action (None: the words say all)."""


def told(number: int, story: Iterable[Told]) -> str:
    """The story of peer ``number``, a line for each thing that happened."""
    return "\n".join(
        f"{when:9.3f} peer {number} {which}"
        + (f" {type(what).__name__} {brief(what)}" if what is not None else "")
        for when, which, what in story
    )


def brief(what: object) -> str:
    """A short text for an event or action."""
    parts = []
    for name in getattr(what, "__dataclass_fields__", {}):
        value = getattr(what, name)
        if isinstance(value, bytes):
            parts.append(f"{name}={value.hex()[:6]}")
        elif isinstance(value, int | float | str):
            parts.append(f"{name}={value}")
        elif isinstance(value, fm.CommitRecord):
            parts.append(f"v{value.header.version} T={value.header.tokens_total}")
        elif isinstance(value, fm.HeadRow):
            parts.append(f"v{value.version} {value.digest.hex()[:6]}")
        elif isinstance(value, fm.Contribution):
            parts.append(f"seq={value.seq} base={value.base} by={value.peer.hex()[:6]}")
    return " ".join(parts)
