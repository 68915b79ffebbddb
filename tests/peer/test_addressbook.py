"""Adverts in the address book: found by shard, and only if their makers signed them."""

from __future__ import annotations

from dugnad.dht.advert import Advert, sign_advert
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import encode
from dugnad.peer.addressbook import SHARDS, look_up, publish, shard_key

RUN = RunId(b"r" * 32)


class Book:
    """An address book that keeps what it is given."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.entries: dict[str, dict[PeerId, bytes]] = {}

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        self.entries.setdefault(key, {})[self.me] = value
        return ttl_s > 0

    async def get(self, key: str) -> dict[PeerId, bytes]:
        return self.entries.get(key, {})


def signed(identity: Identity, run: RunId = RUN) -> Advert:
    """An advert of this identity."""
    draft = Advert(peer=identity.peer, boot=1, addresses=("/ip4/127.0.0.1/tcp/9",))
    return sign_advert(draft, identity, run)


async def test_a_published_advert_is_found_in_its_shard() -> None:
    identity = Identity.ephemeral(b"a" * 32)
    book, advert = Book(identity.peer), signed(Identity.ephemeral(b"a" * 32))
    assert await publish(book, RUN, advert)
    assert await look_up(book, RUN, identity.peer[0] % SHARDS) == [advert]
    assert await look_up(book, RUN, (identity.peer[0] + 1) % SHARDS) == []


async def test_what_is_garbage_foreign_or_of_another_run_is_left_out() -> None:
    identity, other = Identity.ephemeral(b"a" * 32), Identity.ephemeral(b"b" * 32)
    book = Book(identity.peer)
    key = shard_key(RUN, 0)
    book.entries[key] = {
        identity.peer: encode(signed(identity, RunId(b"x" * 32))),
        other.peer: encode(signed(identity)),
        PeerId(b"c" * 32): b"garbage",
    }
    assert await look_up(book, RUN, 0) == []
