"""Text that people write and others read: what may not be in it."""

import unicodedata
from typing import Final

HOSTILE_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move, hide or disguise what stands around them on a screen."""


def text_fault(text: str, limit: int) -> str:
    """Why `text` may not be a name or a reason ('' when it may): more than `limit` characters, or
    invisible ones.
    """
    if len(text) > limit:
        return f"has {len(text)} characters, at most {limit} are allowed"
    if any(unicodedata.category(c) in HOSTILE_CATEGORIES for c in text):
        return "has control or invisible characters"
    return ""
