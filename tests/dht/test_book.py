"""The rules for entries of the address book, without a network."""

import msgspec
import pytest

from dugnad.dht.book import (
    CLOCK_SLACK_S,
    DHT_TTL_MAX_S,
    VALUE_BYTES_MAX,
    EntryRules,
    SealedEntry,
)
from dugnad.dht.identity import Identity

ME, OTHER = Identity.ephemeral(b"a" * 32), Identity.ephemeral(b"b" * 32)
KEY = b"k" * 20
NOW = 1_000_000.0
EXPIRES = NOW + 120


@pytest.fixture
def rules() -> EntryRules:
    return EntryRules(ME, lambda: NOW)


def subkey(identity: Identity) -> bytes:
    return msgspec.msgpack.encode(bytes(identity.peer))


def test_a_sealed_entry_is_accepted_and_opens(rules: EntryRules) -> None:
    sealed = rules.seal(KEY, b"value", EXPIRES)
    assert rules.accepts(KEY, subkey(ME), sealed, EXPIRES)
    assert rules.open(sealed) == b"value"


def test_an_entry_counts_only_for_its_key_peer_and_expiry(rules: EntryRules) -> None:
    sealed = rules.seal(KEY, b"value", EXPIRES)
    assert not rules.accepts(b"x" * 20, subkey(ME), sealed, EXPIRES)
    assert not rules.accepts(KEY, subkey(OTHER), sealed, EXPIRES)
    assert not rules.accepts(KEY, subkey(ME), sealed, EXPIRES + 1)


def test_a_changed_entry_is_refused(rules: EntryRules) -> None:
    sealed = bytearray(rules.seal(KEY, b"value", EXPIRES))
    for position in range(len(sealed)):
        changed = bytearray(sealed)
        changed[position] ^= 1
        assert not rules.accepts(KEY, subkey(ME), bytes(changed), EXPIRES)


def test_an_entry_may_not_live_too_long(rules: EntryRules) -> None:
    for expires, fine in ((DHT_TTL_MAX_S + CLOCK_SLACK_S - 1, True), (5000.0, False)):
        sealed = rules.seal(KEY, b"value", NOW + expires)
        assert rules.accepts(KEY, subkey(ME), sealed, NOW + expires) == fine


def test_an_entry_may_not_be_too_long(rules: EntryRules) -> None:
    for size, fine in ((VALUE_BYTES_MAX, True), (VALUE_BYTES_MAX + 1, False)):
        sealed = rules.seal(KEY, bytes(size), EXPIRES)
        assert rules.accepts(KEY, subkey(ME), sealed, EXPIRES) == fine


@pytest.mark.parametrize("wrong", [b"", b"\xc0", b"\xa3abc", b"\xc4\x20" + bytes(31)])
def test_a_subkey_that_is_no_peer_is_refused(rules: EntryRules, wrong: bytes) -> None:
    assert not rules.accepts(KEY, wrong, rules.seal(KEY, b"v", EXPIRES), EXPIRES)


def test_garbage_is_refused(rules: EntryRules) -> None:
    forged = msgspec.msgpack.encode(SealedEntry(int(EXPIRES * 1000), b"v", b"short"))
    for sealed in (b"", b"\xc0", b"\x93", forged, bytes(5000)):
        assert not rules.accepts(KEY, subkey(ME), sealed, EXPIRES)
