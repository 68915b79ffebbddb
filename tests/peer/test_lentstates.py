"""Anchors that are being fetched when the swarm goes on."""

import numpy as np

from dugnad.averaging.buffers import AnchorState
from dugnad.peer.lentstates import LENT_MAX, LENT_S, LentStates

STATES = [AnchorState.fresh(np.full(8, n, np.float32)) for n in range(LENT_MAX + 2)]
NAMES = [bytes([n]) * 32 for n in range(LENT_MAX + 2)]


def test_anchors_that_were_let_go_of_are_still_served_to_who_draws_from_them() -> None:
    lent = LentStates()
    assert lent.find(0, NAMES[0], STATES[0], 0.0) is STATES[0]
    for n in range(1, 6):
        assert lent.find(0, NAMES[0], None, n * (LENT_S - 1.0)) is STATES[0]


def test_what_nobody_draws_from_any_more_is_let_go_of() -> None:
    lent = LentStates()
    lent.find(0, NAMES[0], STATES[0], 0.0)
    lent.sweep(LENT_S - 0.1)
    assert len(lent) == 1
    lent.sweep(LENT_S)
    assert len(lent) == 0
    assert lent.find(0, NAMES[0], None, LENT_S) is None


def test_what_was_never_lent_is_not_here() -> None:
    lent = LentStates()
    lent.find(0, NAMES[0], STATES[0], 0.0)
    assert lent.find(0, NAMES[1], None, 1.0) is None
    assert lent.find(1, NAMES[0], None, 1.0) is None
    assert len(lent) == 1


def test_of_one_fragment_only_the_newest_drawn_are_kept() -> None:
    lent = LentStates()
    for n, (name, state) in enumerate(zip(NAMES, STATES, strict=True)):
        lent.find(0, name, state, float(n))
        lent.find(1, name, state, float(n))
    assert len(lent) == 2 * LENT_MAX
    assert lent.find(0, NAMES[0], None, 9.0) is None
    assert lent.find(0, NAMES[-1], None, 9.0) is STATES[-1]
