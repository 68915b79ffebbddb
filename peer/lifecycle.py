"""What a person wants of this peer, as a table: state × input → next state, effects, answer.

Whether the peer *may* train is another matter: that is `dugnad.peer.limits`. This is a core: no
clock, no disk, no waiting. `Life.handle` changes the state and returns the effects, in order.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class State(StrEnum):
    """What was asked of this peer last."""

    RUNNING = "running"
    PAUSED = "paused"
    SNOOZED = "snoozed"
    FAILED = "failed"
    """The learner died too often; a person decides."""
    FINISHING = "finishing"
    LEAVING = "leaving"
    ENDED = "ended"


class Input(StrEnum):
    """What a person, a clock or a part of the daemon says."""

    PAUSE = "pause"
    RESUME = "resume"
    SNOOZE = "snooze"
    FINISH = "finish"
    LEAVE = "leave"
    DRAIN = "leave --drain"
    WAKE = "the snooze is over"
    FAIL = "the learner died too often"
    WORK_DONE = "the work in hand is done"
    HANDED_OVER = "everything is in other hands, or the time is up"


class Effect(StrEnum):
    """What the shell has to do, in this order."""

    HOLD = "train no further than the step under way"
    RELEASE = "train again"
    REVIVE = "forget the learner's deaths and start it again"
    LAST_WORK = "take no new work"
    MORE_WORK = "take new work again"
    HAND_IN = "hand in what there is, then stop"
    DRAIN = "wait longer for it"
    GO = "stop at once"
    REMEMBER = "write to the disk what is wanted"


@dataclass(frozen=True, slots=True)
class Rule:
    """One cell of the table. `said` is the answer to whoever asked; empty where nobody did."""

    to: State
    effects: tuple[Effect, ...] = ()
    said: str = ""


S, I, E = State, Input, Effect  # noqa: E741  a table is read by its columns
_NOW: Final = (I.WAKE, I.FAIL, I.WORK_DONE, I.HANDED_OVER)
_TABLE: Final[dict[tuple[State, Input], Rule]] = {
    # Running.
    (S.RUNNING, I.PAUSE): Rule(S.PAUSED, (E.HOLD, E.REMEMBER), "paused"),
    (S.RUNNING, I.RESUME): Rule(S.RUNNING, (), "it was not paused"),
    (S.RUNNING, I.SNOOZE): Rule(S.SNOOZED, (E.HOLD, E.REMEMBER), "snoozing"),
    (S.RUNNING, I.FINISH): Rule(S.FINISHING, (E.LAST_WORK,), "finishing the work in hand"),
    (S.RUNNING, I.LEAVE): Rule(S.LEAVING, (E.HAND_IN,), "leaving"),
    (S.RUNNING, I.DRAIN): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "leaving, when all is handed in"),
    (S.RUNNING, I.FAIL): Rule(S.FAILED, (E.HOLD,)),
    # Paused by a person: until a person says otherwise.
    (S.PAUSED, I.PAUSE): Rule(S.PAUSED, (), "it was paused already"),
    (S.PAUSED, I.RESUME): Rule(S.RUNNING, (E.RELEASE, E.REMEMBER), "resumed"),
    (S.PAUSED, I.SNOOZE): Rule(S.SNOOZED, (E.REMEMBER,), "snoozing"),
    (S.PAUSED, I.FINISH): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "handing in, then stopping"),
    (S.PAUSED, I.LEAVE): Rule(S.LEAVING, (E.HAND_IN,), "leaving"),
    (S.PAUSED, I.DRAIN): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "leaving, when all is handed in"),
    # Snoozed: paused with an end.
    (S.SNOOZED, I.PAUSE): Rule(S.PAUSED, (E.REMEMBER,), "paused"),
    (S.SNOOZED, I.RESUME): Rule(S.RUNNING, (E.RELEASE, E.REMEMBER), "resumed"),
    (S.SNOOZED, I.SNOOZE): Rule(S.SNOOZED, (E.REMEMBER,), "snoozing"),
    (S.SNOOZED, I.FINISH): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "handing in, then stopping"),
    (S.SNOOZED, I.LEAVE): Rule(S.LEAVING, (E.HAND_IN,), "leaving"),
    (S.SNOOZED, I.DRAIN): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "leaving, when all is handed in"),
    (S.SNOOZED, I.WAKE): Rule(S.RUNNING, (E.RELEASE, E.REMEMBER)),
    # Failed: as paused, and resuming starts the learner anew.
    (S.FAILED, I.PAUSE): Rule(S.PAUSED, (E.REVIVE, E.REMEMBER), "paused"),
    (S.FAILED, I.RESUME): Rule(S.RUNNING, (E.REVIVE, E.RELEASE, E.REMEMBER), "starting it again"),
    (S.FAILED, I.SNOOZE): Rule(S.SNOOZED, (E.REVIVE, E.REMEMBER), "snoozing"),
    (S.FAILED, I.FINISH): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "handing in, then stopping"),
    (S.FAILED, I.LEAVE): Rule(S.LEAVING, (E.HAND_IN,), "leaving"),
    (S.FAILED, I.DRAIN): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "leaving, when all is handed in"),
    # Finishing: the person may change their mind until the work is done.
    (S.FINISHING, I.PAUSE): Rule(S.PAUSED, (E.MORE_WORK, E.HOLD, E.REMEMBER), "paused instead"),
    (S.FINISHING, I.RESUME): Rule(S.RUNNING, (E.MORE_WORK,), "going on instead"),
    (S.FINISHING, I.SNOOZE): Rule(S.SNOOZED, (E.MORE_WORK, E.HOLD, E.REMEMBER), "snoozing instead"),
    (S.FINISHING, I.FINISH): Rule(S.FINISHING, (), "it is finishing already"),
    (S.FINISHING, I.LEAVE): Rule(S.LEAVING, (E.HAND_IN,), "leaving"),
    (S.FINISHING, I.DRAIN): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN), "leaving, when all is handed in"),
    (S.FINISHING, I.WORK_DONE): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN)),
    (S.FINISHING, I.FAIL): Rule(S.LEAVING, (E.DRAIN, E.HAND_IN)),
    # Leaving: a second word goes at once, as a second Ctrl-C does.
    (S.LEAVING, I.PAUSE): Rule(S.LEAVING, (), "it is leaving already"),
    (S.LEAVING, I.RESUME): Rule(S.LEAVING, (), "it is leaving already; start it again afterwards"),
    (S.LEAVING, I.SNOOZE): Rule(S.LEAVING, (), "it is leaving already"),
    (S.LEAVING, I.FINISH): Rule(S.LEAVING, (E.DRAIN,), "handing in, then stopping"),
    (S.LEAVING, I.LEAVE): Rule(S.ENDED, (E.GO,), "going at once"),
    (S.LEAVING, I.DRAIN): Rule(S.LEAVING, (E.DRAIN,), "leaving, when all is handed in"),
    (S.LEAVING, I.HANDED_OVER): Rule(S.ENDED),
}
_GONE: Final = Rule(S.ENDED, (), "it has stopped")
LASTING: Final = frozenset({State.RUNNING, State.PAUSED, State.SNOOZED})
"""States that outlive the daemon. A peer that left is running when it is started again; one that
was paused is still paused, whatever stopped its process."""
SNOOZE_MS_MAX: Final = 31 * 86_400_000
"""A longer rest is a pause."""


def rule(state: State, given: Input) -> Rule:
    """The cell of the table; every pair has one. Inputs of parts that come too late change
    nothing."""
    if state is State.ENDED:
        return _GONE if given not in _NOW else Rule(State.ENDED)
    found = _TABLE.get((state, given))
    if found is None:
        assert given in _NOW, f"a person can say {given} at any time"
        return Rule(state)
    return found


@dataclass(slots=True)
class Life:
    """One peer's life. `until_ms` is the end of a snooze (wall clock), `cause` why it failed."""

    state: State = State.RUNNING
    until_ms: int = 0
    cause: str = ""

    def handle(
        self, given: Input, *, until_ms: int = 0, cause: str = ""
    ) -> tuple[tuple[Effect, ...], str]:
        """Take an input: what to do, and what to answer. `until_ms` with SNOOZE, `cause` with
        FAIL."""
        cell = rule(self.state, given)
        self.state = cell.to
        if given is Input.SNOOZE and cell.to is State.SNOOZED:
            self.until_ms = until_ms
        elif cell.to is not State.SNOOZED:
            self.until_ms = 0
        if given is Input.FAIL and cell.to is State.FAILED:
            self.cause = cause
        elif cell.to is not State.FAILED:
            self.cause = ""
        return cell.effects, cell.said

    def due(self, now_ms: int) -> bool:
        """Whether a snooze is over. A clock that was set back far does not prolong it for ever."""
        if self.state is not State.SNOOZED:
            return False
        return now_ms >= self.until_ms or self.until_ms - now_ms > SNOOZE_MS_MAX

    @property
    def trains(self) -> bool:
        """Whether the person wants it to train now."""
        return self.state in (State.RUNNING, State.FINISHING)

    @property
    def stays(self) -> bool:
        """Whether it goes on taking part."""
        return self.state not in (State.LEAVING, State.ENDED)
