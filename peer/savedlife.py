"""What of the owner's wishes and of the month's traffic outlives the daemon: two small files.

A damaged file is as good as none: then the peer runs, and counts from nothing.
"""

from typing import Annotated, Final

import msgspec

from dugnad.peer.lifecycle import LASTING, Life, State
from dugnad.peer.paths import Home, read_bounded, write_private
from dugnad.peer.ratelimit import DAYS_KEPT, Usage

_BYTES_MAX: Final = 1 << 14
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Life(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: State
    until_ms: _Count = 0


class _Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    days: Annotated[dict[str, _Count], msgspec.Meta(max_length=2 * DAYS_KEPT)]


def load_life(home: Home) -> Life:
    """What its owner wanted last; running when nothing is known."""
    try:
        saved = msgspec.json.decode(read_bounded(home.life_file, _BYTES_MAX), type=_Life)
    except (OSError, ValueError):  # a ValidationError is a ValueError, too
        return Life()
    return Life(saved.state, saved.until_ms) if saved.state in LASTING else Life()


def save_life(home: Home, life: Life) -> None:
    """Write it down. UserError when the disk refuses."""
    assert life.state in LASTING, "the others end with the daemon"
    write_private(home.life_file, msgspec.json.encode(_Life(life.state, life.until_ms)))


def load_usage(home: Home) -> Usage:
    """The traffic of the last days."""
    try:
        saved = msgspec.json.decode(read_bounded(home.usage_file, _BYTES_MAX), type=_Usage)
        return Usage({int(day): size for day, size in saved.days.items()})
    except (OSError, ValueError):
        return Usage()


def save_usage(home: Home, usage: Usage) -> None:
    """Write it down. UserError when the disk refuses."""
    days = {str(day): size for day, size in usage.days.items()}
    write_private(home.usage_file, msgspec.json.encode(_Usage(days)))
