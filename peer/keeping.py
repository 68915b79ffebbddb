"""What a daemon heard from others and keeps on its disk under a name: read at its start, written
now and then. A disk that fails loses the memory, not the daemon, and is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.store import StoreError

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

T = TypeVar("T")


async def recall(daemon: Daemon, key: str, type: type[T], limit: int, what: str) -> T | None:
    """What is kept under ``key``; None when nothing is, or when it cannot be read: then ``what``
    is said to be forgotten."""
    data = await daemon.store.call(lambda store: store.kept(key))
    if data is None:
        return None
    try:
        return decode(data, type, limit)
    except RecordError as error:
        daemon.note("disk", f"{what} is forgotten: {error.reason}")
        return None


async def keep(daemon: Daemon, key: str, memory: object) -> None:
    """Keep ``memory`` under ``key``, in place of what was there."""
    data = encode(memory)
    try:
        await daemon.store.call(lambda store: store.keep(key, data))
    except StoreError as error:
        daemon.note("disk", f"{error.reason}; {error.fix}")
