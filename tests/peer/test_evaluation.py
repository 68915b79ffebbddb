"""Evaluating held-out text: who scores what, what the scores say, and what they earn."""

import hashlib
import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, encode, verify_ed25519
from dugnad.peer import evaluation
from dugnad.peer.evaluation import (
    Drop,
    Evaluated,
    Evaluation,
    Evaluators,
    Heard,
    Keep,
    Publish,
    Reached,
    Scored,
    Task,
)
from dugnad.peer.scores import HeldOut, Score, basis_of, read_score, signed

RUN = RunId(bytes(range(32)))
HELD = HeldOut(first=1000, count=320, context=16)  # ten units of 512 tokens
A, B, C = (PeerId(hashlib.sha256(word).digest()) for word in (b"a", b"b", b"c"))
HEADS = (b"0" * 32, b"1" * 32)
BASIS = basis_of(HEADS, RUN)


def core(me: PeerId = A, evaluators: Sequence[PeerId] = (A, B, C)) -> Evaluation:
    made = Evaluation(me, RUN, 2, HELD)
    made.handle(Evaluators(tuple(evaluators)))
    return made


def reach(made: Evaluation, version: int) -> list[object]:
    return [
        action
        for fragment, digest in enumerate(HEADS)
        for action in made.handle(Reached(fragment, version, digest, 10_000 * version))
    ]


def tasks(made: Evaluation) -> list[Task]:
    found = []
    while (task := made.next_task()) is not None:
        found.append(task)
    return found


def score(peer: PeerId, unit: int, per_token: float = 2.0, version: int = 8) -> Score:
    return Score(peer, version, BASIS, unit, per_token * HELD.tokens, HELD.tokens, 80_000)


def test_held_out_units_are_spread_and_stay_within_the_held_out_text() -> None:
    assert HELD.units == 10
    assert HELD.sequences(0) == list(range(1000, 1032))
    assert HELD.sequences(9)[-1] == 1319
    large = HeldOut(0, 100_000, 16)
    assert large.units == 64
    assert large.sequences(63)[-1] == 99_999
    small = HeldOut(50, 3, 16)
    assert (small.units, small.sequences(0), small.tokens) == (1, [50, 51, 52], 48)


def test_a_round_is_scored_when_every_fragment_has_reached_its_version() -> None:
    made = core()
    assert reach(made, 7) == []
    assert made.handle(Reached(0, 8, HEADS[0], 1)) == [Keep(8, 0, HEADS[0])]
    assert made.next_task() is None
    assert made.handle(Reached(1, 8, HEADS[1], 2)) == [Keep(8, 1, HEADS[1]), Drop(8)]
    first = made.next_task()
    assert first is not None
    assert (first.version, first.basis) == (8, BASIS)


def test_each_unit_goes_to_two_of_the_evaluators_and_to_the_same_ones_for_all() -> None:
    given_out: list[int] = []
    for me in (A, B, C):
        made = core(me)
        reach(made, 8)
        given_out += [task.unit for task in tasks(made)]
    assert sorted(given_out) == sorted([*range(10), *range(10)])


def test_who_does_not_evaluate_keeps_nothing_and_is_given_nothing() -> None:
    made = core(A, (B, C))
    assert reach(made, 8) == []
    assert tasks(made) == []
    assert made.hear(score(B, 0)) == ""
    assert len(made.curve()) == 1


def test_a_unit_that_two_have_scored_is_left_alone() -> None:
    made = core(A, (A, B))
    reach(made, 8)
    made.hear(score(B, 3))
    made.hear(score(C, 3))
    assert 3 not in [task.unit for task in tasks(made)]


def test_a_score_is_published_once_and_not_for_a_round_that_is_over() -> None:
    made = core(A, (A,))
    reach(made, 8)
    task = made.next_task()
    assert task is not None
    (action,) = made.handle(Scored(task, 2.5))
    assert isinstance(action, Publish)
    assert action.score.loss == pytest.approx(2.5 * HELD.tokens)
    assert action.score.total == 80_000
    reach(made, 16)
    assert made.handle(Scored(task, 2.5)) == []
    assert made.own(9) == [action.score]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 9}, "no round 9"),
        ({"version": 8 + 8 * 5}, "no round 48"),
        ({"version": 0}, "no round 0"),
        ({"unit": 10}, "no held-out unit 10"),
        ({"tokens": 511}, "of 511 tokens"),
    ],
)
def test_a_score_of_nothing_that_exists_is_refused(changes: dict[str, int], why: str) -> None:
    made = core()
    reach(made, 8)
    assert why in made.hear(msgspec.structs.replace(score(B, 0), **changes))
    assert made.curve() == ()


def test_the_curve_is_the_mean_over_units_of_the_median_over_evaluators() -> None:
    made = core()
    reach(made, 8)
    for one in (score(A, 0, 2.0), score(B, 0, 2.0), score(C, 0, 50.0), score(A, 1, 3.0)):
        made.handle(Heard(one))
    made.handle(Heard(score(A, 1, 99.0)))  # the first word of a maker stands
    (point,) = made.curve()
    assert point.loss == pytest.approx(2.5)
    assert (point.version, point.total, point.units, point.peers) == (8, 80_000, 2, 3)


def test_tokens_are_confirmed_by_another_who_found_the_same() -> None:
    made = core()
    reach(made, 8)
    for one in (score(A, 0), score(B, 0, 2.000001), score(A, 1), score(A, 2), score(C, 2, 2.5)):
        made.hear(one)
    earned = {one.peer: one for one in made.earned()}
    assert earned[A] == Evaluated(A, 512, 512, 512)
    assert earned[B] == Evaluated(B, 512, 0, 0)
    assert earned[C] == Evaluated(C, 0, 0, 512)
    other = msgspec.structs.replace(score(B, 1), basis=b"x" * 32)
    made.hear(other)  # other parameters confirm nothing
    assert {one.peer: one for one in made.earned()}[A].pending == 512


def test_rounds_are_folded_without_changing_what_was_earned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "ROUNDS_KEPT", 2)
    made = core()
    for version in (8, 16, 24, 32):
        reach(made, version)
        made.hear(score(A, 0, version=version))
        made.hear(score(B, 0, version=version))
    assert [point.version for point in made.curve()] == [8, 16, 24, 32]
    assert [one.confirmed for one in made.earned()] == [2048, 2048]
    assert "no round 8" in made.hear(score(C, 0, version=8))


def test_what_was_kept_goes_on_after_a_restart() -> None:
    made = core()
    reach(made, 8)
    made.hear(score(A, 0))
    made.hear(score(B, 0))
    again = core()
    again.restore(msgspec.msgpack.decode(encode(made.memory()), type=evaluation.Memory))
    assert (again.curve(), again.earned()) == (made.curve(), made.earned())
    assert "no round 8" in again.hear(score(A, 1))
    reach(again, 16)
    assert again.hear(score(A, 1, version=16)) == ""
    assert again.earned()[0].confirmed == 512


def test_a_signed_score_survives_the_wire_and_a_changed_one_does_not() -> None:
    identity = Identity.ephemeral()
    made = score(identity.peer, 4)
    data = signed(made, RUN, identity)
    read = read_score(data, RUN, verify_ed25519)
    assert msgspec.structs.replace(read, signature=b"") == made
    with pytest.raises(RecordError, match="did not sign"):
        read_score(data, RunId(bytes(32)), verify_ed25519)
    forged = encode(msgspec.structs.replace(read, loss=read.loss + 1))
    with pytest.raises(RecordError, match="did not sign"):
        read_score(forged, RUN, verify_ed25519)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0, 1e9])
def test_a_loss_that_cannot_be_is_refused(loss: float) -> None:
    identity = Identity.ephemeral()
    data = signed(msgspec.structs.replace(score(identity.peer, 0), loss=loss), RUN, identity)
    with pytest.raises(RecordError):
        read_score(data, RUN, verify_ed25519)


@given(st.binary(max_size=300))
def test_foreign_bytes_are_a_score_or_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        read_score(data, RUN, verify_ed25519)
