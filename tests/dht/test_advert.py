"""Adverts: signed, small, and harmless to read."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht.advert import (
    ADVERT_BYTES_MAX,
    SLOW_BYTES_PER_S,
    Advert,
    Device,
    Speed,
    advert_fault,
    clean_text,
    decode_advert,
    fitted,
    sign_advert,
    verify_advert,
)
from dugnad.dht.identity import Identity
from dugnad.dht.ids import RunId, name_of
from dugnad.dht.records import RecordError, encode

RUN = RunId(bytes(range(32)))
ANNA = Identity.ephemeral(bytes(range(32)))
BERT = Identity.ephemeral(bytes(range(1, 33)))


def draft(**changes: object) -> Advert:
    advert = Advert(peer=ANNA.peer, boot=7, name="Anna", addresses=("/ip4/10.0.0.1/tcp/4001",))
    return msgspec.structs.replace(advert, **changes)


def test_a_signed_advert_survives_the_wire_and_verifies() -> None:
    devices = (Device("cuda", "RTX 3060", 2, 12 << 30),)
    signed = sign_advert(draft(devices=devices, speeds=(Speed("float32", 1e12),)), ANNA, RUN)
    received = decode_advert(encode(signed))
    assert received == signed
    assert verify_advert(received, RUN)


def test_whole_numbers_in_fields_for_fractions_do_not_break_the_signature() -> None:
    signed = sign_advert(draft(tokens_per_s=12), ANNA, RUN)
    assert verify_advert(decode_advert(encode(signed)), RUN)


def test_a_changed_advert_another_run_and_another_signer_do_not_verify() -> None:
    signed = sign_advert(draft(), ANNA, RUN)
    assert not verify_advert(msgspec.structs.replace(signed, seq=signed.seq + 1), RUN)
    assert not verify_advert(signed, RunId(bytes(32)))
    assert not verify_advert(msgspec.structs.replace(signed, peer=BERT.peer), RUN)


def test_nobody_signs_for_somebody_else() -> None:
    with pytest.raises(ValueError, match="signed by the peer it describes"):
        sign_advert(draft(), BERT, RUN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens_per_s": float("inf")}, "finite"),
        ({"speeds": (Speed("float32", float("nan")),)}, "finite"),
        ({"addresses": ("not an address",)}, "multiaddr"),
        ({"addresses": ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/1")}, "twice"),
        ({"addresses": tuple(f"/dns4/{'x' * 150}{n}/tcp/1" for n in range(8))}, "bytes"),
    ],
)
def test_faults_are_named(changes: dict[str, object], reason: str) -> None:
    assert reason in (advert_fault(draft(**changes)) or "")


def test_an_advert_that_is_too_long_is_refused_by_reader_and_signer() -> None:
    long = draft(addresses=tuple(f"/dns4/{'x' * 150}{n}/tcp/1" for n in range(8)))
    with pytest.raises(RecordError):
        decode_advert(encode(long))
    with pytest.raises(ValueError, match="bytes"):
        sign_advert(long, ANNA, RUN)


def test_a_long_advert_is_made_to_fit_and_keeps_its_best_address() -> None:
    long = draft(addresses=tuple(f"/dns4/{'x' * 150}{n}/tcp/1" for n in range(8)))
    signed = sign_advert(fitted(long), ANNA, RUN)
    assert len(encode(signed)) <= ADVERT_BYTES_MAX
    assert signed.addresses[0] == long.addresses[0]


def test_a_name_too_long_does_not_decode() -> None:
    with pytest.raises(RecordError):
        decode_advert(encode(draft(name="x" * 33)))


def test_unknown_bandwidth_counts_as_slow() -> None:
    assert draft().up_assumed == SLOW_BYTES_PER_S
    assert draft(down_bytes_per_s=10**7).down_assumed == 10**7


def test_a_shown_name_has_no_control_bidi_or_invisible_characters() -> None:
    hostile = "\x1b[31mEve\u202e\u200b\n bob\ue000"
    label = draft(name=hostile).label
    assert label.isprintable()
    assert "\u202e" not in label
    assert "\x1b" not in label


def test_an_empty_or_invisible_name_falls_back_to_three_words() -> None:
    assert draft(name="\u200b \u202e").label == name_of(ANNA.peer)


def test_combining_marks_do_not_tower() -> None:
    assert len(clean_text("a" + "\u0336" * 20, 32)) <= 3


@given(st.text(max_size=200), st.integers(1, 64))
def test_clean_text_is_printable_short_and_stable(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit)
    assert len(cleaned) <= limit
    assert cleaned.isprintable()
    assert clean_text(cleaned, limit) == cleaned


def test_the_newer_of_two_adverts_has_the_higher_incarnation_then_sequence() -> None:
    assert draft(incarnation=2, seq=1).order > draft(incarnation=1, seq=9).order
    assert draft(incarnation=2, seq=2).order > draft(incarnation=2, seq=1).order
