"""Signed records: one reading of signed bytes, and decoding that survives any bytes."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht import records
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId

RUN = RunId(b"r" * 32)


class Inner(msgspec.Struct, frozen=True, array_like=True):
    name: str
    score: float


class Outer(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    count: int
    parts: tuple[Inner, ...]
    table: dict[str, int]


OUTER = Outer(b"k", 3, (Inner("a", 0.5),), {"b": 1, "a": 2})


def test_records_come_back_as_they_were() -> None:
    assert records.decode(records.encode(OUTER), Outer, 1000) == OUTER


def test_encoding_does_not_depend_on_the_order_of_a_map() -> None:
    other = Outer(b"k", 3, (Inner("a", 0.5),), {"a": 2, "b": 1})
    assert records.encode(OUTER) == records.encode(other)


def test_the_limit_is_checked_before_parsing() -> None:
    data = records.encode(OUTER)
    assert records.decode(data, Outer, len(data)) == OUTER
    with pytest.raises(records.RecordError, match=f"{len(data)} bytes, more than the allowed"):
        records.decode(data, Outer, len(data) - 1)


@given(
    st.binary(max_size=300),
    st.sampled_from([Outer, Inner, dict, object, tuple[int, ...], bytes, str]),
)
def test_random_bytes_raise_nothing_but_record_errors(data: bytes, kind: Any) -> None:
    with contextlib.suppress(records.RecordError):
        records.decode(data, kind, 1000)


@given(st.data())
def test_damaged_records_raise_nothing_but_record_errors(data: st.DataObject) -> None:
    raw = bytearray(records.encode(OUTER))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(records.RecordError):
        records.decode(bytes(raw), Outer, 1000)


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x10\xff\xff\xff",  # an array that claims 268 million items
        b"\xdf\x0f\xff\xff\xff",  # a map likewise
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\x91" * 900,  # nesting deeper than the interpreter's stack allows
        b"\xc7\x0c\xff" + b"\xff" * 12,  # an impossible timestamp
        b"\xa1\xff",  # text that is not UTF-8
    ],
)
def test_bombs_are_refused(data: bytes) -> None:
    for kind in (object, Outer, tuple[int, ...], str):
        if kind is object and data.startswith(b"\x91"):
            data = b"\x91" * 20_000
        with pytest.raises(records.RecordError):
            records.decode(data, kind, 20_000)


def test_reasons_carry_no_control_characters() -> None:
    error = records.RecordError("bad \x1b[31mname\n" + "x" * 500)
    assert error.reason.isprintable()
    assert len(error.reason) == 200


def test_a_signature_holds_for_one_domain_run_and_body_only() -> None:
    me, other = Identity.ephemeral(bytes([1]) * 32), Identity.ephemeral(bytes([2]) * 32)
    message = records.framed("advert", RUN, b"body")
    signature = me.sign(message)
    assert records.verify_ed25519(me.peer, message, signature)
    assert not records.verify_ed25519(other.peer, message, signature)
    for wrong in (
        records.framed("commit", RUN, b"body"),
        records.framed("advert", RunId(b"q" * 32), b"body"),
        records.framed("advert", RUN, b"bodY"),
    ):
        assert not records.verify_ed25519(me.peer, wrong, signature)


@given(st.binary(max_size=40), st.binary(max_size=80))
def test_verifying_garbage_is_false_and_never_raises(peer: bytes, signature: bytes) -> None:
    assert not records.verify_ed25519(PeerId(peer), b"message", signature)


def test_framing_is_exact() -> None:
    assert records.framed("a b", RUN, b"xyz") == b"dugnad signed 1\0a b\0" + RUN + b"xyz"


@pytest.mark.parametrize("domain", ["", "A", "a\0b", "ä", "a" * 65])
def test_a_malformed_domain_is_a_programmers_error(domain: str) -> None:
    with pytest.raises(AssertionError, match="domain"):
        records.framed(domain, RUN, b"")
