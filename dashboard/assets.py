"""The style sheet and the script, under names that change with their content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_FILES: Final = {"css": ("dugnad.css", "text/css"), "js": ("dugnad.js", "text/javascript")}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that pages load. `name` has a piece of its SHA-256, so it may be kept for ever."""

    name: str
    kind: str
    data: bytes


@cache
def assets() -> dict[str, Asset]:
    """'css' and 'js', read from the installed package once."""
    folder = files("dugnad.dashboard") / "static"
    found = {}
    for key, (file, kind) in _FILES.items():
        data = (folder / file).read_bytes()
        digest = hashlib.sha256(data).hexdigest()[:16]
        found[key] = Asset(f"{digest}.{key}", kind, data)
    return found
