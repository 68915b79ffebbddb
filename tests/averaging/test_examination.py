"""The timed challenge: over-claims are capped at the truth and shown; honest peers pay little."""

from random import Random

import pytest

from dugnad.averaging.examinee import Examinee
from dugnad.averaging.examiner import (
    ATTEMPTS_MAX,
    DEADLINE_S,
    RETRY_S,
    SILENT_MIN,
    Action,
    AnswerIn,
    Ask,
    Examiner,
    Look,
    Missed,
    Recompute,
    Recomputed,
    Say,
    Subject,
    trial_seconds,
)
from dugnad.averaging.trial import (
    CHAINS_MAX,
    EXAMINERS,
    FIRST_EXAMINERS,
    SLOT_MS,
    STEPS,
    Answer,
    Challenge,
    Mark,
    TrialRules,
    agree,
    examiners,
    mark_in,
    sized,
    tokens_of,
    work_of,
)
from dugnad.dht.ids import PeerId, RunId, peer_text

from .exam_world import Person, World, truth  # noqa: TID252  the world is no installed package

RUN = RunId(b"r" * 32)
RULES = TrialRules(RUN, 8, 128, 10_000)
PEERS = [PeerId(bytes([n]) * 32) for n in range(6)]
MARK = Mark(b"m" * 32, 7, frozenset(PEERS))
SPEEDS = (100, 140, 200, 90, 120, 160)


def swarm(manner: str, claims: float, seed: int) -> World:
    """Six peers of whom the first two claim so many times what they do."""
    people = [
        Person(n, speed, claims if n < 2 else 1.0, manner if n < 2 else "honest")
        for n, speed in enumerate(SPEEDS)
    ]
    return World(people, seed)


def disputed(world: World) -> set[str]:
    return {row.peer for row in world.board().rows if row.disputed and row.dispute}


@pytest.mark.slow
@pytest.mark.parametrize("claims", [3.0, 10.0])
@pytest.mark.parametrize("manner", ["honest", "colludes"])
def test_with_two_of_six_over_claiming_the_board_stays_within_a_percent_of_the_truth(
    manner: str, claims: float
) -> None:
    """`honest`: they answer challenges, since a machine cannot compute faster than it can.
    `colludes`: they also prove each other ten times as fast and call everybody else a liar.
    """
    world = swarm(manner, claims, seed=1).run(2400).settled()
    assert world.error(world.fold.board()) > 0.5, "what the receipts alone would credit"
    assert world.error(world.board()) <= 0.01
    assert disputed(world) == {peer_text(one.peer) for one in world.people[:2]}


@pytest.mark.slow
def test_over_claims_are_capped_within_twenty_minutes() -> None:
    world = swarm("honest", 10.0, 3).run(1000).settled()
    assert world.error(world.board()) <= 0.01
    rows = {row.peer: row for row in world.board().rows}
    liar = rows[peer_text(world.people[0].peer)]
    assert "its receipts claim" in liar.dispute
    assert liar.timed_per_s == pytest.approx(SPEEDS[0], rel=0.05)
    assert liar.claimed_per_s == pytest.approx(10 * SPEEDS[0], rel=0.05)
    assert sum(world.trials) / len(SPEEDS) / world.now < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("manner", ["skips", "silent"])
def test_whoever_leaves_chains_out_or_does_not_answer_is_credited_no_more_than_it_did(
    manner: str,
) -> None:
    world = swarm(manner, 3.0, 1).run(1800).settled()
    rows = {row.peer: row.tokens + row.provisional for row in world.board().rows}
    for one in world.people:
        told = rows[peer_text(one.peer)]
        if one.manner == manner:
            assert told < 0.3 * one.trained
        else:
            assert told == pytest.approx(one.trained, rel=0.01)
    assert disputed(world) == {peer_text(one.peer) for one in world.people[:2]}


@pytest.mark.slow
def test_nobody_is_disputed_where_nobody_lies() -> None:
    world = swarm("honest", 1.0, 4).run(700).settled()
    assert disputed(world) == set()
    assert {say.outcome for say in world.said} == {"proven"}


# -- the trial itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [0.0, 1.0, 300.0, 1e5, 1e30])
def test_a_trial_fits_the_claimed_speed_and_its_bounds(speed: float) -> None:
    made = sized(MARK.digest, b"s" * 16, speed, RULES)
    assert 1 <= made.batch <= RULES.batch
    assert 2 <= made.chains <= CHAINS_MAX
    if speed == 1e5:
        assert trial_seconds(made, speed, RULES) == pytest.approx(1.0, rel=0.2)
    work = work_of(made, RULES)
    assert [len(chain) for chain in work] == [STEPS * made.batch] * made.chains
    assert max(max(chain) for chain in work) < RULES.sequences
    assert sum(map(len, work)) * RULES.context == tokens_of(made, RULES)


def test_another_seed_is_other_work_and_the_same_seed_the_same() -> None:
    one, other = (sized(MARK.digest, seed * 16, 1e5, RULES) for seed in (b"a", b"b"))
    assert work_of(one, RULES) == work_of(one, RULES)
    assert work_of(one, RULES) != work_of(other, RULES)


def test_rounding_agrees_and_a_guess_does_not() -> None:
    assert agree((2.0, 0.5), (2.005, 0.51))
    for told in ((2.1, 0.5), (2.0, 0.6), (float("nan"), 0.5), (2.0, float("inf"))):
        assert not agree((2.0, 0.5), told)


def test_the_mark_is_the_first_commit_of_the_newest_slot() -> None:
    chain = [(b"c", 2 * SLOT_MS + 5), (b"b", 2 * SLOT_MS), (b"a", 2 * SLOT_MS - 1)]
    found = mark_in(chain, MARK.members, complete=False)
    assert found == Mark(b"b", 2, MARK.members)
    assert mark_in(chain[:2], MARK.members, complete=False) is None, "it may have begun before"
    assert mark_in(chain[:2], MARK.members, complete=True) == found
    assert mark_in([], MARK.members, complete=True) is None


def test_examiners_follow_from_the_mark_and_nobody_examines_itself() -> None:
    chosen = {peer: examiners(RUN, MARK, peer, EXAMINERS) for peer in PEERS}
    assert all(peer not in two and len(two) == EXAMINERS for peer, two in chosen.items())
    other = Mark(b"n" * 32, 8, frozenset(PEERS))
    assert any(examiners(RUN, other, peer, EXAMINERS) != chosen[peer] for peer in PEERS)


# -- the examiner ----------------------------------------------------------------------------------


def asking(verdicts: int = 0) -> tuple[Examiner, PeerId, Look]:
    """An examiner, somebody whom it is to examine, and the look that makes it ask."""
    me, peer = next(
        (me, peer) for peer in PEERS for me in examiners(RUN, MARK, peer, EXAMINERS)[:1]
    )
    look = Look(1000, MARK, [Subject(peer, 5e4, verdicts, 2000)], 3)
    return Examiner(me, RULES, Random(1)), peer, look


def only(actions: list[Action], kind: type[Ask] | type[Recompute] | type[Say]) -> object:
    assert [type(one) for one in actions] == [kind]
    return actions[0]


def asked(core: Examiner, look: Look, now: float = 0.0) -> Challenge:
    action = only(core.handle(look, now), Ask)
    assert isinstance(action, Ask)
    return action.challenge


def answered(challenge: Challenge) -> Answer:
    values = tuple(truth(challenge, chain) for chain in range(challenge.chains))
    return Answer(challenge.seed, (b"h" * 32,), values)


def test_a_right_answer_proves_the_speed_and_the_best_of_a_day_stands() -> None:
    core, peer, look = asking()
    challenge = asked(core, look)
    assert core.handle(look, 0.1) == [], "one trial at a time"
    check = only(core.handle(AnswerIn(peer, answered(challenge)), 0.5), Recompute)
    assert isinstance(check, Recompute)
    assert check.heads == (b"h" * 32,)
    assert core.handle(AnswerIn(peer, answered(challenge)), 0.6) == [], "and one answer"
    values = tuple(truth(challenge, chain) for chain in check.chains)
    say = only(core.handle(Recomputed(values), 1.0), Say)
    assert isinstance(say, Say)
    assert (say.outcome, say.speed) == ("proven", 2000 * tokens_of(challenge, RULES))
    assert core.handle(look, 5.0) == [], "once in a slot"
    later = Look(2000, Mark(MARK.digest, 8, MARK.members), look.subjects, 3)
    challenge = asked(core, later, 600.0)
    core.handle(AnswerIn(peer, answered(challenge)), 602.0)
    assert core.trial is not None
    values = tuple(truth(challenge, chain) for chain in core.trial.chains)
    slow = only(core.handle(Recomputed(values), 603.0), Say)
    assert isinstance(slow, Say)
    assert slow.speed == say.speed


@pytest.mark.parametrize("short", [False, True])
def test_a_wrong_answer_is_said(short: bool) -> None:
    core, peer, look = asking()
    challenge = asked(core, look)
    wrong = tuple((9.0, 9.0) for _ in range(challenge.chains - short))
    actions = core.handle(AnswerIn(peer, Answer(challenge.seed, (), wrong)), 0.5)
    if not short:
        check = only(actions, Recompute)
        assert isinstance(check, Recompute)
        values = tuple(truth(challenge, chain) for chain in check.chains)
        actions = core.handle(Recomputed(values), 1.0)
    say = only(actions, Say)
    assert isinstance(say, Say)
    assert (say.outcome, say.speed) == ("wrong", 0)


def test_an_answer_to_something_else_or_of_somebody_else_is_not_heard() -> None:
    core, peer, look = asking()
    challenge = asked(core, look)
    other = next(one for one in PEERS if one != peer)
    assert core.handle(AnswerIn(other, answered(challenge)), 0.5) == []
    assert core.handle(AnswerIn(peer, Answer(b"?" * 16)), 0.5) == []
    assert core.handle(Recomputed(((1.0, 1.0),)), 0.5) == []


def test_what_cannot_be_computed_again_says_nothing_and_is_tried_once_more() -> None:
    core, peer, look = asking()
    challenge = asked(core, look)
    core.handle(AnswerIn(peer, answered(challenge)), 0.5)
    assert core.handle(Recomputed(None), 1.0) == [
        Missed(peer, "it could not be computed again here")
    ]
    assert core.handle(look, 2.0) == []
    assert asked(core, look, 1.0 + RETRY_S).seed != challenge.seed


def test_silence_is_said_after_slots_of_it_while_receipts_go_on() -> None:
    core, _, look = asking()
    said: list[Action] = []
    now, sizes = 0.0, []
    for slot in range(7, 7 + SILENT_MIN):
        mark = Mark(MARK.digest, slot, MARK.members)
        for _ in range(ATTEMPTS_MAX):
            challenge = asked(core, Look(1000, mark, look.subjects, 3), now)
            sizes.append(tokens_of(challenge, RULES))
            now += DEADLINE_S + 1
            said = core.handle(Look(1000, mark, look.subjects, 3), now)
            now += RETRY_S
    say = only(said, Say)
    assert isinstance(say, Say)
    assert say.outcome == "silent"
    assert say.speed == round(1000 * sizes[-1] / DEADLINE_S)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0], "who claimed too much gets less to do next time"


def test_a_peer_whose_receipts_stopped_as_well_is_called_nothing() -> None:
    core, peer, _ = asking()
    quiet = [Subject(peer, 5e4, 0, 900)]
    now = 0.0
    for slot in range(7, 12):
        for _ in range(ATTEMPTS_MAX):
            mark = Mark(MARK.digest, slot, MARK.members)
            asked(core, Look(1000, mark, quiet, 3), now)
            excuse = Answer(core.trial.challenge.seed if core.trial else b"", excuse="paused")
            assert core.handle(AnswerIn(peer, excuse), now + 1) == [Missed(peer, "paused")]
            now += RETRY_S + 2


def test_whom_the_mark_did_not_choose_asks_nobody_and_untimed_peers_have_more_examiners() -> None:
    for count, verdicts in ((EXAMINERS, 3), (FIRST_EXAMINERS, 2)):
        peer = PEERS[0]
        look = Look(1000, MARK, [Subject(peer, 5e4, verdicts, 2000)], 3)
        asking_now = [me for me in PEERS[1:] if Examiner(me, RULES, Random(1)).handle(look, 0.0)]
        assert sorted(asking_now) == sorted(examiners(RUN, MARK, peer, count))


# -- the examinee ----------------------------------------------------------------------------------


def test_only_the_chosen_are_answered_one_at_a_time_and_not_for_long() -> None:
    me = PEERS[0]
    core = Examinee(me, RULES)
    chosen = examiners(RUN, MARK, me, FIRST_EXAMINERS)
    other = next(peer for peer in PEERS[1:] if peer not in chosen)
    challenge = sized(MARK.digest, b"s" * 16, 1e5, RULES)
    assert "chose other" in core.judge(other, challenge, MARK, 1e5)
    assert core.judge(chosen[0], challenge, MARK, 1e5) == ""
    assert "under way" in core.judge(chosen[1], challenge, MARK, 1e5)
    core.done()
    assert "too long" in core.judge(chosen[1], challenge, MARK, 1e3)
    assert "too long" in core.judge(chosen[1], challenge, MARK, 0.0)
    strange = sized(b"?" * 32, b"s" * 16, 1e5, RULES)
    assert "another commit" in core.judge(chosen[0], strange, MARK, 1e5)
    spent = 1
    while not core.judge(chosen[spent % FIRST_EXAMINERS], challenge, MARK, 1e5):
        core.done()
        spent += 1
    assert spent == FIRST_EXAMINERS * ATTEMPTS_MAX or core.spent_s <= 12.0
    assert core.judge(chosen[0], challenge, Mark(MARK.digest, 8, MARK.members), 1e5) == ""


def test_a_newcomer_takes_the_first_that_ask() -> None:
    core = Examinee(PEERS[0], RULES)
    challenge = sized(MARK.digest, b"s" * 16, 1e5, RULES)
    taken = []
    for peer in PEERS[1:]:
        taken.append(core.judge(peer, challenge, None, 1e5) == "")
        core.done()
    assert taken == [True] * FIRST_EXAMINERS + [False]
