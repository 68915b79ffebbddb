"""Verdicts and what they do to a board: the middle counts, nobody judges itself."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.board import DAY_MS, Tally
from dugnad.averaging.dispute import CLAIM_MS_MIN, judged
from dugnad.averaging.statements import HELD_ALREADY, UNKNOWN, StatementSet
from dugnad.averaging.verdicts import (
    KEPT_PER_PEER,
    VERDICT_BYTES_MAX,
    Outcome,
    Verdict,
    by_peer,
    sign_verdict,
    verdict_fault,
)
from dugnad.dht.identity import Identity
from dugnad.dht.ids import RunId
from dugnad.dht.records import encode

RUN = RunId(b"r" * 32)
WHO = [Identity.ephemeral(bytes([n]) * 32) for n in range(1, 9)]
PEERS = [one.peer for one in WHO]
NOW = 1_764_500_000_000


def tally(tokens: int, speed: float) -> Tally:
    """A peer whose receipts imply `speed` tokens a second."""
    made = Tally(tokens=tokens, provisional=10, contributions=3, span_ms=CLAIM_MS_MIN)
    made.claimed = round(speed * CLAIM_MS_MIN / 1000)
    made.days = {NOW // DAY_MS: tokens}
    return made


def verdict(examiner: int, peer: int, speed: float, number: int = NOW) -> Verdict:
    outcome: Outcome = "proven" if speed else "wrong"
    return Verdict(PEERS[examiner], PEERS[peer], number, outcome, round(1000 * speed))


def fair(rows: list[Verdict], speed: float = 1000.0) -> tuple[int, str]:
    """What the first of six peers is credited of 6000 tokens at that implied speed, and why."""
    totals = {peer: tally(6000, speed if peer == PEERS[0] else 100.0) for peer in PEERS[:6]}
    after, claims = judged(totals, by_peer(rows))
    left = after[PEERS[0]]
    assert left.tokens + left.provisional + claims[PEERS[0]].tokens == 6010
    assert sum(left.days.values()) == left.tokens
    return left.tokens, claims[PEERS[0]].reason


def test_a_claim_is_capped_at_the_middle_of_what_was_timed() -> None:
    tokens, reason = fair([verdict(1, 0, 100), verdict(2, 0, 110), verdict(3, 0, 9000)])
    assert tokens == 660
    assert "3 timed it: at most 110" in reason
    assert fair([verdict(1, 0, 700), verdict(2, 0, 700), verdict(3, 0, 700)]) == (6000, "")


def test_half_of_the_examiners_can_take_nothing_from_anybody() -> None:
    liars = [verdict(1, 0, 0), verdict(2, 0, 0)]
    assert fair([*liars, verdict(3, 0, 1000), verdict(4, 0, 1000)])[0] == 6000
    tokens, reason = fair([*liars, verdict(3, 0, 0)])
    assert tokens == 0
    assert "3 got wrong answers" in reason


def test_who_was_not_timed_counts_as_the_middle_of_those_who_were() -> None:
    others = [verdict(a, b, 100 * b) for b in (1, 2, 3) for a in (4, 5, 2 if b != 2 else 1)]
    tokens, reason = fair([*others, verdict(1, 0, 1000)])
    assert tokens == 1200
    assert "not timed by enough members yet" in reason
    two = [verdict(1, 0, 500), verdict(2, 0, 600)]
    assert fair([*others, *two])[0] == 3000, "unless two proved more"
    assert fair([*others, *two[:1], verdict(2, 0, 0)])[0] == 1200
    assert fair([])[0] == 6000, "where nobody was timed, nobody is capped"


def test_only_peers_with_receipts_are_heard_and_short_work_claims_nothing() -> None:
    assert fair([verdict(6, 0, 1), verdict(7, 0, 1), verdict(1, 0, 1)])[0] == 6000
    short = tally(50, 1e6)
    short.span_ms -= 1
    totals = {PEERS[0]: short, **{peer: tally(100, 10.0) for peer in PEERS[1:5]}}
    after, claims = judged(totals, by_peer([verdict(n, 0, 1) for n in (1, 2, 3)]))
    assert (after[PEERS[0]].tokens, claims[PEERS[0]].reason) == (50, "")


def test_in_a_swarm_of_two_the_other_one_is_enough() -> None:
    totals = {PEERS[0]: tally(100, 1000.0), PEERS[1]: tally(100, 10.0)}
    after, _ = judged(totals, by_peer([verdict(1, 0, 10)]))
    assert after[PEERS[0]].tokens == 1
    alone, _ = judged({PEERS[0]: tally(100, 1000.0)}, by_peer([verdict(1, 0, 10)]))
    assert alone[PEERS[0]].tokens == 100


def test_a_verdict_is_signed_by_its_examiner_for_this_run_about_another() -> None:
    good = sign_verdict(verdict(1, 0, 100), RUN, WHO[1])
    assert verdict_fault(good, RUN) == ""
    assert len(encode(msgspec.structs.replace(good, number=1 << 62))) <= VERDICT_BYTES_MAX
    assert "not signed" in verdict_fault(good, RunId(b"o" * 32))
    assert "not signed" in verdict_fault(msgspec.structs.replace(good, speed=1), RUN)
    assert "about itself" in verdict_fault(msgspec.structs.replace(good, peer=PEERS[1]), RUN)
    assert "do not fit" in verdict_fault(msgspec.structs.replace(good, outcome="wrong"), RUN)
    assert "do not fit" in verdict_fault(msgspec.structs.replace(good, speed=0), RUN)


@pytest.mark.parametrize("unlisted", [0, 1])
def test_verdicts_of_and_about_peers_without_receipts_are_not_kept(unlisted: int) -> None:
    found = StatementSet(RUN, lambda peer: peer != PEERS[unlisted])
    assert found.take(encode(sign_verdict(verdict(1, 0, 5), RUN, WHO[1])), NOW) == UNKNOWN


def test_an_examiner_has_one_word_about_a_peer_and_the_newest_five_are_kept() -> None:
    found = StatementSet(RUN, lambda peer: True, lambda *signed: True)
    for number, speed in ((2, 20.0), (1, 10.0), (3, 30.0)):
        found.take(encode(verdict(1, 0, speed, NOW + number)), NOW)
    assert [one.speed for one in found.verdicts(PEERS[0])] == [30_000]
    for examiner in range(2, 8):
        assert found.take(encode(verdict(examiner, 0, 7.0, NOW + 10 + examiner)), NOW) == ""
    kept = {one.examiner for one in found.verdicts(PEERS[0])}
    assert kept == set(PEERS[3:8])
    assert len(found.names()) == KEPT_PER_PEER
    assert found.take(encode(verdict(1, 0, 9.0, NOW + 4)), NOW) == HELD_ALREADY


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)),
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
def test_verdicts_in_any_order_give_the_same_set(
    told: list[tuple[int, int, int, int]], rng: Random
) -> None:
    records = [
        encode(verdict(examiner, peer, float(speed), NOW + number))
        for examiner, peer, speed, number in told
        if examiner != peer
    ]
    first, second = (StatementSet(RUN, lambda peer: True, lambda *s: True) for _ in range(2))
    for record in records:
        first.take(record, NOW)
    rng.shuffle(records)
    for record in records * 2:
        second.take(record, NOW)
    assert first.everything() == second.everything()
    assert first.said() == second.said()
