"""Who prepares what, what is agreed on, and what it earns: the core, and the statements."""

import hashlib

import pytest

from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, verify_ed25519
from dugnad.peer.preparation import (
    AHEAD_BATCHES,
    BEHIND_BATCHES,
    OPEN_MAX,
    PREPARERS_MAX,
    REPLICAS,
    UNPLACED_MAX,
    Denied,
    Made,
    Preparation,
    Preparers,
    Standing,
)
from dugnad.peer.preparedunits import BATCH_UNITS, Prepared, read_prepared, signed
from dugnad.peer.unitplan import UnitPlan

RUN = RunId(bytes(range(32)))
IDS = [Identity.ephemeral(bytes([n]) * 32) for n in range(1, 4)]
A, B, C = (one.peer for one in IDS)
PLAN = UnitPlan(RUN, 10_000, 4)
TOKENS = BATCH_UNITS * 4 * 100


def digests(batch: int, salt: bytes = b"") -> tuple[bytes, ...]:
    names = (hashlib.sha256(salt + bytes([batch, n])).digest() for n in range(BATCH_UNITS))
    return tuple(names)


def standing(first: int, *waiting: int, begun: int = 0) -> Standing:
    """All batches from `first` on are open, and these before it; of `begun` something is listed."""
    rows = [*((one, True) for one in waiting)]
    rows += [(one, one < first + begun) for one in range(first, first + OPEN_MAX - len(rows))]
    return Standing(tuple(rows))


def core(me: PeerId = A, *, first: int | None = 0) -> Preparation:
    found = Preparation(me, RUN, PLAN, 100)
    found.handle(Preparers(tuple(sorted((A, B, C)))))
    if first is not None:
        found.handle(standing(first))
    return found


def test_each_batch_is_prepared_by_two_of_three_and_nobody_makes_one_twice() -> None:
    made: dict[int, int] = {}
    for me in (A, B, C):
        one = core(me)
        while (batch := one.next_batch()) is not None:
            (said,) = one.handle(Made(batch, digests(batch)))
            assert said == Prepared(me, batch, digests(batch))
            made[batch] = made.get(batch, 0) + 1
    assert made == dict.fromkeys(range(AHEAD_BATCHES), 2)


def test_what_waits_for_somebody_does_not_keep_what_comes_next_from_being_prepared() -> None:
    one = core()
    for batch in range(AHEAD_BATCHES):
        for peer in (B, C):
            one.hear(Prepared(peer, batch, digests(batch)))
    one.handle(standing(40, 0, 3, begun=2))
    while (mine := one.next_batch()) is not None:
        one.handle(Made(mine, digests(mine)))
    made = {said.batch for said in one.own()}
    assert made == {n for n in range(40, 42 + AHEAD_BATCHES) if one._rank(n) < REPLICAS}
    assert one.agreed(3 * BATCH_UNITS), "what waits can still be fetched"
    assert not one.hear(Prepared(B, 44, digests(44)))
    assert not one.hear(Prepared(B, 40 - BEHIND_BATCHES + 2, digests(1)))


def test_a_batch_that_is_done_with_earns_once_though_an_older_one_waits() -> None:
    one = core()
    for batch in (0, 1):
        for peer in (A, B):
            one.hear(Prepared(peer, batch, digests(batch)))
    one.handle(standing(60, 0))
    assert [row.confirmed for row in one.earned()] == [2 * TOKENS] * 2
    assert [said.batch for said in one.own()] == [0]
    again = core(first=None)
    again.restore(one.memory())
    for known in (one, again):
        assert "done with" in known.hear(Prepared(C, 1, digests(1)))
        known.handle(standing(60, 0, 1))
        assert "done with" in known.hear(Prepared(C, 1, digests(1))), "it opened again"
    one.handle(standing(61))
    assert one.memory().floor == 61 - BEHIND_BATCHES
    assert one.memory().done == ()
    assert [row.confirmed for row in one.earned()] == [2 * TOKENS] * 2


def test_what_two_have_prepared_is_left_alone() -> None:
    one = core()
    first = one.next_batch()
    assert first is not None
    for peer in (B, C):
        one.hear(Prepared(peer, first, digests(first)))
    assert one.next_batch() != first


def test_nothing_is_prepared_before_it_is_known_where_the_swarm_stands() -> None:
    assert core(first=None).next_batch() is None


def test_a_block_is_used_and_its_tokens_count_once_two_say_the_same() -> None:
    one = core()
    one.hear(Prepared(B, 2, digests(2)))
    assert one.agreed(2 * BATCH_UNITS) is None
    assert not one.any_agreed()
    assert [(row.confirmed, row.pending) for row in one.earned()] == [(0, TOKENS)]
    one.hear(Prepared(C, 2, digests(2)))
    assert one.agreed(2 * BATCH_UNITS + 5) == digests(2)[5]
    assert sorted(one.makers(2 * BATCH_UNITS)) == sorted((B, C))
    assert one.position_of(digests(2)[5]) == 2 * BATCH_UNITS + 5
    assert one.position_of(bytes(32)) is None
    assert [(row.confirmed, row.disputed) for row in one.earned()] == [(TOKENS, 0)] * 2


def test_two_that_contradict_each_other_earn_nothing_and_no_block_is_used() -> None:
    one = core()
    one.hear(Prepared(B, 2, digests(2)))
    one.hear(Prepared(C, 2, digests(2, b"other")))
    assert one.agreed(2 * BATCH_UNITS) is None
    assert {(row.confirmed, row.disputed) for row in one.earned()} == {(0, TOKENS)}


def test_whoever_says_what_the_text_contradicts_is_in_no_agreement() -> None:
    one = core()
    for peer in (A, B, C):
        one.hear(Prepared(peer, 2, digests(2, b"wrong" if peer != A else b"")))
    one.handle(Denied(B, 2))
    one.handle(Denied(C, 2))
    one.handle(Denied(C, 3))  # of which it has said nothing
    assert one.agreed(2 * BATCH_UNITS) is None
    found = {row.peer: (row.pending, row.disputed) for row in one.earned()}
    assert found == {A: (TOKENS, 0), B: (0, TOKENS), C: (0, TOKENS)}


def test_batches_are_done_with_when_the_swarm_is_far_beyond_them() -> None:
    one = core()
    for peer in (A, B):
        one.hear(Prepared(peer, 0, digests(0)))
    one.handle(standing(BEHIND_BATCHES + 1))
    assert one.own() == []
    assert [row.confirmed for row in one.earned()] == [TOKENS, TOKENS]
    assert "done with" in one.hear(Prepared(C, 0, digests(0)))
    again = core(first=None)
    again.restore(one.memory())
    assert again.earned() == one.earned()
    assert "done with" in again.hear(Prepared(A, 0, digests(0))), "nobody earns it twice"


def test_what_is_far_ahead_is_not_heard_and_tables_are_bounded() -> None:
    one = core()
    assert "not to be prepared yet" in one.hear(Prepared(B, OPEN_MAX, digests(1)))
    for n in range(PREPARERS_MAX):
        assert not one.hear(Prepared(PeerId(n.to_bytes(32, "big")), 1, digests(1)))
    assert one.hear(Prepared(B, 1, digests(1))) == "too many preparers"
    new = core(first=None)
    for batch in range(UNPLACED_MAX):
        assert not new.hear(Prepared(B, batch + 100, digests(1)))
    assert new.hear(Prepared(B, 1, digests(1))) == "too many batches"
    assert "there is no batch" in new.hear(Prepared(B, 1 << 56, digests(1)))
    new.handle(standing(100))
    assert not new.hear(Prepared(C, 100, digests(1)))
    assert len(new.others()) == OPEN_MAX + 1, "what is too far ahead is let go"
    new.handle(standing(0))
    assert new.earned() == [], "what a stranger said of the far future is nothing"


def test_a_newcomer_is_told_what_is_not_done_with() -> None:
    one = core()
    one.handle(Made(3, digests(3)))
    one.hear(Prepared(B, 3, digests(3)))
    assert one.own() == [Prepared(A, 3, digests(3))]
    assert one.others() == [Prepared(B, 3, digests(3))]


def test_a_statement_is_signed_by_its_maker() -> None:
    said = Prepared(A, 7, digests(7))
    found = read_prepared(signed(said, RUN, IDS[0]), RUN, verify_ed25519)
    assert (found.peer, found.batch, found.digests) == (A, 7, digests(7))
    with pytest.raises(RecordError, match="did not sign"):
        read_prepared(signed(said, RUN, IDS[1]), RUN, verify_ed25519)
    with pytest.raises(RecordError):
        read_prepared(signed(Prepared(A, 7, digests(7)[:3]), RUN, IDS[0]), RUN, verify_ed25519)
