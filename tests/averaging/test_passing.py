"""Messages that go along links: each once, and only what its maker signed."""

import msgspec

from dugnad.averaging.formats import Claims, decode_message
from dugnad.averaging.passing import (
    AGE_MS,
    MAKER_MAX,
    MAKER_S,
    PASSED_MAX,
    Passing,
    claims_fault,
    name_of_message,
    sign_claims,
)
from dugnad.dht.identity import Identity
from dugnad.dht.ids import RunId
from dugnad.dht.records import encode, verify_ed25519

RUN = RunId(b"r" * 32)
ME = Identity.ephemeral(b"\x01" * 32)
OTHER = Identity.ephemeral(b"\x02" * 32)
NOW = 1_800_000_000_000


def test_claims_are_believed_from_anybody_when_their_maker_signed_them() -> None:
    claims = sign_claims([(0, 5), (1, 7)], NOW, RUN, ME)
    assert decode_message(encode(claims)) == claims
    assert claims_fault(claims, NOW + 1000, RUN, verify_ed25519) == ""
    other = msgspec.structs.replace(claims, units=((0, 6),))
    assert "not signed" in claims_fault(other, NOW, RUN, verify_ed25519)
    assert "not signed" in claims_fault(claims, NOW, RunId(b"s" * 32), verify_ed25519)


def test_claims_cannot_be_played_again_later() -> None:
    claims = sign_claims([(0, 5)], NOW, RUN, ME)
    for moment in (NOW + AGE_MS + 1, NOW - AGE_MS - 1):
        assert "another time" in claims_fault(claims, moment, RUN, verify_ed25519)


def test_a_message_is_known_once_it_was_taken_and_the_memory_has_an_end() -> None:
    passing, message = Passing(), Claims(((0, 1),))
    name = name_of_message(message)
    assert not passing.known(name)
    passing.take(name)
    assert passing.known(name_of_message(Claims(((0, 1),))))
    for number in range(PASSED_MAX):
        passing.take(number.to_bytes(32))
    assert not passing.known(name)


def judged(passing: Passing, seconds: float, *, by: Identity = ME, units: int = 0) -> str:
    """The verdict on claims that were made and came ``seconds`` after NOW."""
    wall_ms = NOW + round(1000 * seconds)
    claims = sign_claims([(0, units)], wall_ms, RUN, by)
    here = (ME.peer, OTHER.peer)
    return passing.claims(claims, here, verify_ed25519, RUN, wall_ms=wall_ms, now=seconds)


def test_of_one_maker_only_so_many_claims_are_taken_in_a_minute() -> None:
    passing = Passing()
    assert not any(judged(passing, float(n)) for n in range(MAKER_MAX))
    assert "too often" in judged(passing, MAKER_S - 1)
    assert not judged(passing, MAKER_S)
    assert not judged(passing, MAKER_S - 1, by=OTHER)
    assert "not here" in judged(passing, 0.0, by=Identity.ephemeral(b"\x03" * 32))


def test_forged_claims_use_up_nobodys_allowance() -> None:
    passing = Passing()
    forged = msgspec.structs.replace(sign_claims([(0, 1)], NOW, RUN, OTHER), peer=ME.peer)
    for _ in range(2 * MAKER_MAX):
        fault = passing.claims(forged, (ME.peer,), verify_ed25519, RUN, wall_ms=NOW, now=0.0)
        assert "not signed" in fault
    assert not judged(passing, 0.0)


def test_a_message_goes_on_once_and_only_when_it_is_found_good() -> None:
    passing, message, asked = Passing(), Claims(((0, 1),)), list[bool]()

    def take(good: bool) -> bool:
        asked.append(good)
        return good

    assert not passing.heard(message, lambda: take(False))
    assert passing.heard(message, lambda: take(True))
    assert not passing.heard(message, lambda: take(True))
    assert asked == [False, True]
