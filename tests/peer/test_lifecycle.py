"""What a person can ask of a peer: the whole product of states and inputs."""

import itertools

import pytest

from dugnad.peer.lifecycle import LASTING, SNOOZE_MS_MAX, Effect, Input, Life, State, rule

PEOPLE = (Input.PAUSE, Input.RESUME, Input.SNOOZE, Input.FINISH, Input.LEAVE, Input.DRAIN)
PARTS = tuple(one for one in Input if one not in PEOPLE)
RESTING = (State.PAUSED, State.SNOOZED, State.FAILED)
PAIRS = list(itertools.product(State, Input))


@pytest.mark.parametrize(("state", "given"), PAIRS)
def test_every_input_is_answered_in_every_state(state: State, given: Input) -> None:
    cell = rule(state, given)
    assert bool(cell.said) == (given in PEOPLE)  # whoever asks hears, nobody else
    assert len(set(cell.effects)) == len(cell.effects)


@pytest.mark.parametrize(("state", "given"), PAIRS)
def test_effects_take_the_learner_from_what_it_does_to_what_it_is_to_do(
    state: State, given: Input
) -> None:
    cell = rule(state, given)
    trains = Life(state).trains
    if Life(cell.to).stays and Life(state).stays:
        assert (Effect.HOLD in cell.effects) == (trains and not Life(cell.to).trains)
        assert (Effect.RELEASE in cell.effects) == (not trains and Life(cell.to).trains)
        assert (Effect.LAST_WORK in cell.effects) == (
            cell.to is State.FINISHING and state is not State.FINISHING
        )
        assert (Effect.MORE_WORK in cell.effects) == (
            state is State.FINISHING and cell.to is not State.FINISHING
        )
    assert (Effect.REVIVE in cell.effects) == (state is State.FAILED and cell.to in LASTING)


@pytest.mark.parametrize(("state", "given"), PAIRS)
def test_a_peer_hands_in_exactly_once_and_nothing_goes_back_from_leaving(
    state: State, given: Input
) -> None:
    cell = rule(state, given)
    assert (Effect.HAND_IN in cell.effects) == (
        cell.to is State.LEAVING and state is not State.LEAVING
    )
    if not Life(state).stays:
        assert not Life(cell.to).stays


@pytest.mark.parametrize(("state", "given"), PAIRS)
def test_what_outlives_the_daemon_is_written_down_when_it_changes(
    state: State, given: Input
) -> None:
    cell = rule(state, given)
    lasting = cell.to in LASTING and (cell.to is not state or given is Input.SNOOZE)
    back = state is State.FINISHING and cell.to is State.RUNNING  # the disk says running still
    assert (Effect.REMEMBER in cell.effects) == (lasting and not back)


@pytest.mark.parametrize(("state", "given"), list(itertools.product(State, PARTS)))
def test_a_part_that_speaks_too_late_changes_nothing(state: State, given: Input) -> None:
    expected = {
        (State.SNOOZED, Input.WAKE),
        (State.RUNNING, Input.FAIL),
        (State.FINISHING, Input.FAIL),
        (State.FINISHING, Input.WORK_DONE),
        (State.LEAVING, Input.HANDED_OVER),
    }
    cell = rule(state, given)
    assert (cell.to is not state) == ((state, given) in expected)
    if (state, given) not in expected:
        assert cell.effects == ()


@pytest.mark.parametrize("state", list(State))
def test_a_second_leave_goes_at_once(state: State) -> None:
    life = Life(state)
    life.handle(Input.LEAVE)
    effects, said = life.handle(Input.LEAVE)
    assert life.state is State.ENDED
    if state not in (State.LEAVING, State.ENDED):
        assert (effects, said) == ((Effect.GO,), "going at once")


@pytest.mark.parametrize("state", RESTING)
def test_finishing_at_rest_hands_in_and_waits_for_all_of_it(state: State) -> None:
    effects, _ = Life(state).handle(Input.FINISH)
    assert effects == (Effect.DRAIN, Effect.HAND_IN)


def test_a_snooze_ends_by_itself_and_a_clock_set_back_does_not_prolong_it() -> None:
    life = Life()
    life.handle(Input.SNOOZE, until_ms=5000)
    assert not life.due(4999)
    assert life.due(5000)
    assert life.due(5000 - SNOOZE_MS_MAX - 1)
    assert Effect.RELEASE in life.handle(Input.WAKE)[0]
    assert (life.state, life.until_ms) == (State.RUNNING, 0)
    assert not life.due(10**15)


def test_a_failure_keeps_its_cause_until_somebody_decides() -> None:
    life = Life()
    life.handle(Input.FAIL, cause="out of memory")
    assert (life.state, life.cause) == (State.FAILED, "out of memory")
    assert Effect.REVIVE in life.handle(Input.RESUME)[0]
    assert (life.state, life.cause) == (State.RUNNING, "")
