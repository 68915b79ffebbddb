"""The run's entries in the swarm's address book: who takes part, in a few shards.

Peers behind a link that has gone stale are found here, through any peer that still answers. What is
read is a hint: whoever is dialled proves its key, and adverts carry their makers' signatures.
"""

from __future__ import annotations

from typing import Final

from dugnad.dht.advert import Advert, decode_advert, verify_advert
from dugnad.dht.ids import PeerId, RunId, run_text
from dugnad.dht.ports import AddressBook
from dugnad.dht.records import RecordError, encode, verify_ed25519

SHARDS: Final = 16
"""Adverts of a run are spread over so many keys: one key would be one value on a few nodes
(schedules.md section 5)."""
TTL_S: Final = 900.0
"""An advert lives this long unless renewed; clocks differ by up to half a minute."""


def shard_key(run: RunId, shard: int) -> str:
    """The key of one shard of a run's adverts."""
    return f"dugnad/1/{run_text(run)}/{shard}"


async def publish(book: AddressBook, run: RunId, advert: Advert) -> bool:
    """Store our advert; whether somebody took it."""
    return await book.store(shard_key(run, advert.peer[0] % SHARDS), encode(advert), TTL_S)


async def look_up(book: AddressBook, run: RunId, shard: int) -> list[Advert]:
    """The adverts in one shard whose signatures hold for this run."""
    found: list[Advert] = []
    entries: dict[PeerId, bytes] = await book.get(shard_key(run, shard))
    for peer in sorted(entries):
        try:
            advert = decode_advert(entries[peer])
        except RecordError:
            continue
        if advert.peer == peer and verify_advert(advert, run, verify_ed25519):
            found.append(advert)
    return found
