"""The queue gives every sequence once, in order, and says which part of which unit it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.peer.learner.protocol import QUEUED_SEQUENCES_MAX, WORK_SEQUENCES_MAX, Piece, Work
from dugnad.peer.learner.workqueue import WorkQueue


def test_a_batch_spans_units_and_names_its_pieces() -> None:
    queue = WorkQueue()
    queue.add(Work(0, 7, 4, [40, 41, 42], 0))
    queue.add(Work(1, 0, 0, [10, 11, 12], 0))
    batch = queue.take(4)
    assert batch.sequences == [40, 41, 42, 10]
    assert batch.pieces == (Piece(0, 7, 4, 7), Piece(1, 0, 0, 1))
    assert queue.take(9).pieces == (Piece(1, 0, 1, 3),)
    assert queue.take(1).sequences == []


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(1, 7), max_size=30))
def test_nothing_is_lost_or_given_twice(sizes: list[int], takes: list[int]) -> None:
    queue = WorkQueue()
    numbers = iter(range(1000))
    for index, size in enumerate(sizes):
        queue.add(Work(0, index, 0, [next(numbers) for _ in range(size)], 0))
    taken: list[int] = []
    for count in [*takes, sum(sizes)]:
        batch = queue.take(count)
        assert sum(piece.stop - piece.start for piece in batch.pieces) == len(batch.sequences)
        taken += batch.sequences
    assert taken == list(range(sum(sizes)))
    assert len(queue) == 0


def test_the_queue_is_bounded() -> None:
    queue = WorkQueue()
    unit = Work(0, 0, 0, [0] * WORK_SEQUENCES_MAX, 0)
    for _ in range(QUEUED_SEQUENCES_MAX // WORK_SEQUENCES_MAX):
        queue.add(unit)
    with pytest.raises(OverflowError):
        queue.add(Work(0, 1, 0, [0], 0))
