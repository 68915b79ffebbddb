"""HTML and SVG from small calls. All escaping of the dashboard happens in `el` and `escape`.

A child that is a `Markup` was made here and goes in as it is; any other child is foreign text and
is escaped. There is no way to write an attribute or a text without passing here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

Value = str | int | float | bool | None
_VOID: Final = frozenset({"br", "col", "hr", "input", "link", "meta"})


class Markup(str):
    """Text that is markup already. Made by this package only, from literals and escaped parts."""

    __slots__ = ()


_NAMES: Final = {"cls": "class"}

_SPECIAL: Final = re.compile("[&<>\"']")
"""All that `html.escape` replaces; most text has none of it."""
EMPTY: Final = Markup("")


def escape(text: str) -> str:
    """`text` as it may stand between tags and inside a quoted attribute."""
    return html.escape(text) if _SPECIAL.search(text) else text


def el(name: str, /, *children: object, **attributes: Value) -> Markup:
    """The element `name`. A child is text, a number, `Markup`, None, or a list of these.

    Attribute names are written in Python: `cls` for class, a trailing underscore is dropped and
    others become hyphens. None and False leave an attribute out, True writes it without a value.
    """
    start = f"<{name}{_attributes(attributes)}>"
    if name in _VOID:
        return Markup(start)
    return Markup(f"{start}{''.join(map(_text, children))}</{name}>")


def join(*children: object) -> Markup:
    """The children one after the other, without an element around them."""
    return Markup("".join(map(_text, children)))


def _text(child: object) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    if child is None:
        return ""
    if isinstance(child, int | float):
        return str(child)
    assert isinstance(child, Iterable), f"{type(child).__name__} is no child of an element"
    return "".join(map(_text, child))


def _attributes(attributes: dict[str, Value]) -> str:
    parts = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = _NAMES.get(key) or _name(key)
        if value is True:
            parts.append(f" {name}")
        elif isinstance(value, str) and not value.isalnum():
            parts.append(f' {name}="{escape(value)}"')
        else:  # nothing to escape in letters and digits
            parts.append(f' {name}="{value}"')
    return "".join(parts)


def _name(key: str) -> str:
    """The attribute that a Python name stands for; written in our own code, so there are few."""
    name = _NAMES[key] = key.rstrip("_").replace("_", "-")
    return name
