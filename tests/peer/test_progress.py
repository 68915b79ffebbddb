"""The log of work: every step goes into each fragment's next contribution once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.formats import UnitPiece
from dugnad.peer.progress import ProgressLog, coalesced


def piece(index: int, start: int = 0, stop: int = 4) -> UnitPiece:
    """Sequences [start, stop) of a unit."""
    return UnitPiece(0, index, start, stop)


def log(fragments: int = 2) -> ProgressLog:
    """A log of two fragments with ten tokens a sequence."""
    return ProgressLog(fragments, 10)


def test_each_fragment_takes_every_step_once() -> None:
    work = log()
    work.trained(1, [piece(0)])
    work.trained(2, [piece(1)])
    first = work.take(0, 1, 1, speed_class=5, eligible=True)
    assert first is not None
    assert (first.tokens, first.steps, first.pieces) == (40, 1, (piece(0),))
    second = work.take(0, 2, 2, speed_class=5, eligible=True)
    other = work.take(1, 1, 2, speed_class=5, eligible=True)
    assert second is not None
    assert other is not None
    assert second.pieces == (piece(1),)
    assert (other.steps, other.pieces) == (2, (piece(0), piece(1)))
    assert work.take(1, 2, 2, speed_class=5, eligible=True) is None
    work.trained(3, [piece(2)])
    assert [one.step for one in work.steps] == [3], "what all fragments have taken is forgotten"


def test_work_that_comes_back_goes_with_the_next_contribution() -> None:
    work = log(1)
    work.trained(1, [piece(0)])
    work.take(0, 1, 1, speed_class=0, eligible=True)
    assert work.settled(0, 1, 1.0) == (piece(0),)
    assert work.settled(0, 1, 1.0) == (), "said once"
    work.trained(2, [piece(1)])
    after = work.take(0, 2, 2, speed_class=0, eligible=True)
    assert after is not None
    assert (after.steps, after.pieces) == (2, (piece(0), piece(1)))
    assert after.tokens == 80


def test_work_that_came_back_and_was_forgotten_is_not_lost() -> None:
    work = log(1)
    work.trained(1, [piece(0)])
    work.take(0, 1, 1, speed_class=0, eligible=True)
    work.settled(0, 1, 1.0)
    work.forget(0, 1)
    after = work.take(0, 2, 1, speed_class=0, eligible=True)
    assert after is not None
    assert after.pieces == (piece(0),)


def test_a_dead_learners_unsent_work_is_named_and_never_claimed() -> None:
    work = log()
    work.trained(1, [piece(0)])
    work.take(0, 1, 1, speed_class=0, eligible=True)
    work.trained(2, [piece(1)])
    assert work.abandon() == (piece(1),), "step 1 was handed in for one fragment"
    assert work.take(0, 2, 2, speed_class=0, eligible=True) is None
    assert work.take(1, 1, 2, speed_class=0, eligible=True) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 9)), max_size=30))
def test_coalescing_keeps_the_set_of_sequences(rows: list[tuple[int, int, int]]) -> None:
    pieces = [UnitPiece(0, index, start, start + size) for index, start, size in rows]

    def sequences(found: list[UnitPiece]) -> set[tuple[int, int]]:
        return {(p.index, s) for p in found for s in range(p.start, p.stop)}

    joined = coalesced(pieces)
    assert sequences(list(joined)) == sequences(pieces)
    total = sum(p.stop - p.start for p in joined)
    assert total == len(sequences(pieces)), "no sequence is in two pieces"


def test_a_learner_that_goes_on_from_a_capture_keeps_the_work_that_is_in_it() -> None:
    work = log()
    work.trained(1, [piece(0)])
    work.trained(2, [piece(1)])  # captured after this one
    work.trained(3, [piece(2)])
    work.take(0, 1, 3, speed_class=0, eligible=True)  # handed in after the capture
    work.trained(4, [piece(3)])
    assert work.abandon(2, (False, True)) == (piece(3),), "3 was handed in for one fragment"
    work.trained(5, [piece(3)])
    one = work.take(0, 2, 5, speed_class=0, eligible=True)
    other = work.take(1, 1, 5, speed_class=0, eligible=True)
    assert one is not None
    assert other is not None
    assert one.pieces == (piece(3),)
    assert (other.steps, other.pieces) == (3, (piece(0), piece(1), piece(3)))


def test_another_daemon_takes_up_the_work_that_was_not_handed_in() -> None:
    before = log()
    before.trained(1, [piece(0)])
    before.take(0, 1, 1, speed_class=0, eligible=True)
    before.trained(2, [piece(1)])
    after = log()
    stays = after.take_up(tuple(before.steps), tuple(before.place), (True, False), 2)
    assert stays == (piece(1),)
    one = after.take(0, 2, 2, speed_class=0, eligible=True)
    assert one is not None
    assert one.pieces == (piece(1),)
    assert after.take(1, 1, 2, speed_class=0, eligible=True) is None, "handed in since"


def test_the_work_of_a_draft_goes_with_the_contribution_of_its_number() -> None:
    work = log(1)
    work.trained(1, [piece(0)])
    assert work.take(0, 1, 1, speed_class=0, eligible=True) is not None
    work.take_back(0, 1)
    work.trained(2, [piece(1)])
    again = work.take(0, 1, 2, speed_class=0, eligible=True)
    assert again is not None
    assert (again.steps, again.pieces) == (2, (piece(0), piece(1)))
    assert list(work.sent[0]) == [1]
