"""When a learner that died is started again, and when it is not."""

import pytest

from dugnad.peer.revival import FAILURES_MAX, HEALTHY_S, PAUSE_S, Again, GivenUp, Revival


def test_five_deaths_in_a_row_end_it_with_the_last_reason() -> None:
    revival, answers = Revival(), []
    for death in range(FAILURES_MAX):
        answers.append(revival.died(f"cause {death}", 8))
        revival.stepped(death)  # a step between two deaths is no recovery
    assert answers[-1] == GivenUp("the learner died 5 times in a row: cause 4")
    assert [one.after_s for one in answers if isinstance(one, Again)] == [
        PAUSE_S * n for n in range(4)
    ]


@pytest.mark.parametrize(("used", "following"), [(8, 4), (3, 1), (1, 1)])
def test_each_start_uses_half_as_many_sequences_at_a_time(used: int, following: int) -> None:
    assert Revival().died("out of memory", used) == Again(0.0, following)


def test_a_learner_that_trained_for_long_is_well_again() -> None:
    revival = Revival()
    for _ in range(3):
        for _ in range(FAILURES_MAX - 1):
            assert isinstance(revival.died("killed", 4), Again)
        revival.stepped(100.0)
        revival.stepped(100.0 + HEALTHY_S - 0.1)
        assert revival.failures == FAILURES_MAX - 1
        revival.stepped(100.0 + HEALTHY_S)
    assert revival.died("killed", 4) == Again(0.0, 2)


def test_time_before_a_death_does_not_count_for_the_next_learner() -> None:
    revival = Revival()
    revival.stepped(0.0)
    revival.died("killed", 4)
    revival.stepped(HEALTHY_S)
    assert revival.failures == 1


def test_its_owner_can_have_it_tried_again() -> None:
    revival = Revival()
    for _ in range(FAILURES_MAX):
        revival.died("killed", 4)
    revival.forgive()
    assert revival.died("killed", 4) == Again(0.0, 2)
