"""Foreign records: what is well-formed, what is refused and why, and that decoding is total."""

import contextlib
import hashlib
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging import formats as fm
from dugnad.averaging.lineage import Lineage
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, encode

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    RULES,
    RUN,
    A,
    B,
    ack,
    chain,
    commit,
    contribution,
    listing,
    work,
)

LINEAGE = Lineage(RULES)
RECORD = commit(LINEAGE, LINEAGE.genesis, [listing(contribution(A, 1, 0))], B)


class Seal:
    """Signs for one peer with a hash, as the simulator does."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer

    def sign(self, message: bytes) -> bytes:
        one = hashlib.sha256(self.peer + message).digest()
        return one + one


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return Seal(peer).sign(message) == signature


def with_header(**changes: object) -> fm.CommitRecord:
    return fm.CommitRecord(msgspec.structs.replace(RECORD.header, **changes), RECORD.inputs)


def with_input(**changes: object) -> fm.CommitRecord:
    made = msgspec.structs.replace(RECORD.inputs[0].contribution, **changes)
    return fm.CommitRecord(RECORD.header, (listing(made),))


MESSAGES: list[fm.Message] = [
    fm.Announce(RECORD),
    fm.Witness(ack(A, RECORD)),
    fm.Heads((fm.HeadRow(0, 1, b"d" * 32),), True),
    fm.WantCommits(0, b"d" * 32, (b"e" * 32,)),
    fm.Commits(0, (RECORD,), fm.Checkpoint(RECORD, (), ())),
    fm.Claims(((0, 3), (1, 4))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: fm.Message) -> None:
    assert fm.decode_message(encode(message)) == message


def test_a_commit_survives_the_wire_and_keeps_its_name() -> None:
    back = fm.decode_commit(encode(RECORD))
    assert back == RECORD
    assert fm.header_digest(back.header, RUN) == fm.header_digest(RECORD.header, RUN)


def read_or_refused(data: bytes) -> None:
    """Anything but a message or a RecordError fails the test."""
    with contextlib.suppress(RecordError):
        assert isinstance(fm.decode_message(data), msgspec.Struct)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_a_reason_and_nothing_else(data: bytes) -> None:
    read_or_refused(data)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_spoiled_message_is_read_or_refused_but_never_crashes(
    message: fm.Message, data: st.DataObject
) -> None:
    wire = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(wire)))
    for bytes_in in (bytes(wire), bytes(wire[:end])):
        read_or_refused(bytes_in)


def test_an_oversized_message_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RecordError, match="more than the allowed"):
        fm.decode_message(b"\x00" * (fm.MESSAGE_BYTES_MAX + 1))


SPOILED = {
    "another format": (with_header(format=1), "format 1"),
    "a long header": (with_header(codec="x" * 1100), "over 1 KB"),
    "a short root": (with_header(theta_root=b"x"), "root of the wrong length"),
    "a long home": (with_header(home=b"x" * 33), "root of the wrong length"),
    "version 0": (with_header(version=0), "out of range"),
    "a negative time": (with_header(time_ms=-1), "out of range"),
    "a huge total": (with_header(tokens_total=fm.NUMBER_MAX + 1), "out of range"),
    "a wrong count": (with_header(inputs_count=2), "not as many"),
    "a short key": (with_input(peer=b"x"), "key or root"),
    "a negative seq": (with_input(seq=-1), "out of range"),
    "a wild class": (with_input(speed_class=129), "speed class"),
    "a clip over 1": (
        fm.CommitRecord(RECORD.header, (msgspec.structs.replace(RECORD.inputs[0], clip=1.5),)),
        "clip factor",
    ),
    "a clip that is no number": (
        fm.CommitRecord(
            RECORD.header, (msgspec.structs.replace(RECORD.inputs[0], clip=float("nan")),)
        ),
        "clip factor",
    ),
    "backward units": (
        fm.CommitRecord(
            RECORD.header,
            (msgspec.structs.replace(RECORD.inputs[0], pieces=(fm.UnitPiece(0, 0, 5, 5),)),),
        ),
        "impossible unit piece",
    ),
    "too many acks": (
        fm.CommitRecord(RECORD.header, RECORD.inputs, (ack(A, RECORD),) * (fm.ACKS_MAX + 1)),
        "too many acks",
    ),
}


@pytest.mark.parametrize(("record", "reason"), SPOILED.values(), ids=SPOILED.keys())
def test_a_malformed_commit_is_refused_with_its_reason(
    record: fm.CommitRecord, reason: str
) -> None:
    for message in (fm.Announce(record), fm.Commits(0, (record,))):
        with pytest.raises(RecordError, match=reason):
            fm.decode_message(encode(message))
    with pytest.raises(RecordError, match=reason):
        fm.decode_commit(encode(record))


@pytest.mark.parametrize(
    "message",
    [
        fm.Heads((fm.HeadRow(0, 1, b"d" * 32),) * (fm.FRAGMENTS_MAX + 1)),
        fm.WantCommits(0, b"d" * 32, (b"e" * 32,) * (fm.COMMITS_PER_REPLY_MAX + 1)),
        fm.Commits(0, (RECORD,) * (fm.COMMITS_PER_REPLY_MAX + 1)),
        fm.Claims(((0, 1),) * (fm.CLAIMS_MAX + 1)),
        fm.Witness(fm.Ack(b"short", 0, 1, b"d" * 32)),
        fm.Witness(fm.Ack(A, -1, 1, b"d" * 32)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_message_beyond_its_bounds_is_refused(message: fm.Message) -> None:
    with pytest.raises(RecordError):
        fm.decode_message(encode(message))


def test_too_many_unit_pieces_are_refused() -> None:
    pieces = (fm.UnitPiece(0, 0, 0, 1),) * (fm.PIECES_MAX + 1)
    assert "too many unit pieces" in fm.contribution_fault(contribution(A, 1, 0), pieces)
    assert fm.contribution_fault(contribution(A, 1, 0), pieces[:-1]) == ""


T = TypeVar("T", fm.Contribution, fm.Header, fm.Ack)


def check_signature(record: T) -> None:
    signed = fm.sign_record(record, RUN, Seal(fm.maker(record)))
    assert fm.signature_holds(signed, RUN, verify)
    assert not fm.signature_holds(signed, RunId(b"x" * 32), verify)
    changed = msgspec.structs.replace(signed, fragment=1)
    assert not fm.signature_holds(changed, RUN, verify)
    stranger = fm.sign_record(record, RUN, Seal(PeerId(b"x" * 32)))
    assert not fm.signature_holds(stranger, RUN, verify)
    cut = msgspec.structs.replace(signed, signature=signed.signature[:-1])
    assert not fm.signature_holds(cut, RUN, verify)


def test_a_signature_holds_for_its_maker_its_run_and_its_bytes_only() -> None:
    check_signature(contribution(A, 1, 0))
    check_signature(RECORD.header)
    check_signature(ack(A, RECORD))


def test_a_signature_of_one_kind_of_record_is_none_of_another() -> None:
    one, other = contribution(A, 1, 0), ack(A, RECORD)
    assert b"contribution/1" in fm.signed_bytes(one, RUN)
    assert b"witness/1" in fm.signed_bytes(other, RUN)


def test_a_second_signature_gives_a_commit_no_second_name() -> None:
    other = msgspec.structs.replace(RECORD.header, signature=b"z" * 64)
    assert fm.header_digest(other, RUN) == fm.header_digest(RECORD.header, RUN)
    assert fm.header_digest(other, RUN) != fm.header_digest(other, RunId(b"x" * 32))


def test_roots_depend_on_rows_order_and_domain() -> None:
    two = (fm.UnitPiece(0, 0, 0, 1), fm.UnitPiece(0, 1, 0, 1))
    roots = {
        fm.pieces_root(RUN, two),
        fm.pieces_root(RUN, two[::-1]),
        fm.pieces_root(RUN, two[:1]),
        fm.pieces_root(RUN, work(1)),
        fm.list_root("other/1", RUN, two),
        fm.genesis_digest(RUN, 0, b"r" * 32),
        fm.genesis_digest(RUN, 1, b"r" * 32),
    }
    assert len(roots) == 6  # work(1) is two[:1]


def test_an_honest_header_fits_into_a_kilobyte_even_with_long_numbers() -> None:
    head = chain(Lineage(RULES), [A, B], 2)[-1]
    assert head.record is not None
    wide = msgspec.structs.replace(
        head.record.header,
        time_ms=fm.NUMBER_MAX,
        tokens_total=fm.NUMBER_MAX,
        version=fm.NUMBER_MAX,
        payload_bytes=fm.NUMBER_MAX,
    )
    assert len(encode(wide)) <= fm.HEADER_BYTES_MAX
