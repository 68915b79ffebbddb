"""The crowd's core alone: rumours, neighbours, silence, refutation, tables, bounds."""

import random
from array import array
from collections.abc import Iterable
from typing import TypeVar

from dugnad.dht.roster_crowd import (
    BEAT_S,
    LINKS_MAX,
    LINKS_MIN,
    PERIOD_MAX_S,
    PERIOD_MIN_S,
    QUEUE_MAX,
    REDIAL_S,
    SHUFFLE_S,
    SILENCE_S,
    SYNC_S,
    Crowd,
)
from dugnad.dht.roster_crowd_events import (
    Changed,
    Close,
    CrowdAction,
    Dial,
    Heard,
    Leave,
    LinkDown,
    LinkUp,
    Named,
    Tell,
    Tick,
    Unreached,
)
from dugnad.dht.roster_rumours import (
    ORDER_MASK,
    RUMOURS_MAX,
    SLOTS_MAX,
    CrowdMessage,
    Full,
    Greet,
    Rumours,
    Sync,
    TablePart,
    rumour,
)

ME = 0
A = TypeVar("A")


def only(kind: type[A], actions: Iterable[object]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def told(actions: list[CrowdAction], slot: int) -> list[CrowdMessage]:
    return [one.message for one in only(Tell, actions) if one.slot == slot]


def member(known: int = 20, links: Iterable[int] = (1, 2, 3, 4)) -> Crowd:
    """A member that knows `known` peers in incarnation 1 and has these neighbours."""
    core = Crowd(ME, 1, random.Random(1))
    core.adopt(array("I", [2] * known))
    for slot in links:
        core.handle(LinkUp(slot, outgoing=True), 0.0)
        core.handle(Heard(slot, Greet(2, wants_table=False)), 0.0)
    return core


def tick(core: Crowd, now: float) -> list[CrowdAction]:
    return core.handle(Tick(), now)


def test_news_goes_once_to_each_neighbour_but_not_back_to_its_source() -> None:
    core = member()
    news = rumour(30, 2)
    assert core.handle(Heard(1, Rumours((news,))), 0.1) == [Changed((news,))]
    core.handle(Heard(2, Rumours((news,))), 0.2)  # it knows meanwhile
    actions = tick(core, 0.5)
    assert [told(actions, slot) for slot in (1, 2)] == [[], []]
    assert [told(actions, slot) for slot in (3, 4)] == [[Rumours((news,))]] * 2
    assert not only(Tell, tick(core, 1.0))
    assert core.here(30)


def test_an_older_rumour_changes_nothing() -> None:
    core = member()
    core.handle(Heard(1, Rumours((rumour(5, 3),))), 0.1)
    assert not core.here(5)
    assert core.handle(Heard(2, Rumours((rumour(5, 2),))), 0.2) == []
    assert core.handle(Heard(2, Rumours((rumour(5, 4),))), 0.3) == [Changed((rumour(5, 4),))]
    assert core.here(5)
    assert core.count == 19


def test_a_silent_neighbour_is_dialled_once_more_and_then_called_gone() -> None:
    core = member()
    for now in (1.0, 3.0, 5.0):
        for slot in (2, 3, 4):
            core.handle(Heard(slot, Rumours(())), now)
        actions = tick(core, now)
    assert now >= SILENCE_S
    assert only(Dial, actions) == [Dial(1, REDIAL_S)]
    assert core.here(1)
    actions = core.handle(Unreached(1), 6.0)
    assert Changed((rumour(1, 3),)) in actions
    assert 1 not in core.links
    assert told(tick(core, 6.1), 2) == [Rumours((rumour(1, 3),))]


def test_a_neighbour_that_is_reached_again_or_heard_in_time_is_not_lost() -> None:
    core = member()
    assert only(Dial, core.handle(LinkDown(1), 1.0)) == [Dial(1, REDIAL_S)]
    core.handle(LinkUp(1, outgoing=True), 1.2)
    assert not only(Changed, core.handle(Unreached(1), 2.0))
    assert core.here(1)


def test_a_dialler_that_never_answers_counts_as_unreached() -> None:
    core = member()
    core.handle(LinkDown(1), 1.0)
    assert Changed((rumour(1, 3),)) in tick(core, 1.0 + 2 * REDIAL_S)


def test_who_is_called_gone_comes_back_with_a_higher_incarnation() -> None:
    core = member()
    core.handle(Heard(1, Rumours((rumour(ME, 3),))), 0.1)
    actions = tick(core, 0.5)
    assert told(actions, 1) == [Rumours((rumour(ME, 4),))]
    other = member()
    other.handle(Heard(1, Rumours((rumour(9, 3),))), 0.1)
    other.handle(Heard(1, Rumours((rumour(9, 4),))), 0.2)
    assert other.here(9)


def test_who_leaves_says_so_and_is_not_dialled_again() -> None:
    core = member()
    actions = core.handle(Leave(), 1.0)
    assert told(actions, 3) == [Rumours((rumour(ME, 3),))]
    assert len(only(Close, actions)) == 4
    assert core.handle(Heard(1, Rumours((rumour(8, 3),))), 2.0) == []
    other = member()
    other.handle(Heard(1, Rumours((rumour(1, 3),))), 1.0)
    assert not only(Dial, other.handle(LinkDown(1), 1.1))


def test_a_newcomer_asks_one_neighbour_for_the_table_and_the_next_one_if_that_goes() -> None:
    core = Crowd(ME, 1, random.Random(1))
    dials = only(Dial, core.handle(Named((1, 2, 3)), 0.0))
    assert {one.slot for one in dials} == {1, 2, 3}
    first = core.handle(LinkUp(1, outgoing=True), 0.1)
    assert told(first, 1) == [Greet(2, wants_table=True)]
    assert told(core.handle(LinkUp(2, outgoing=True), 0.1), 2) == [Greet(2, wants_table=False)]
    core.handle(Heard(1, TablePart((rumour(7, 2),), last=False)), 0.2)
    core.handle(LinkDown(1), 0.3)
    core.handle(Unreached(1), 0.4)
    assert told(tick(core, 0.5), 2) == [Greet(2, wants_table=True)]
    core.handle(Heard(2, TablePart((rumour(8, 2),), last=True)), 0.6)
    assert core.has_table
    assert core.here(7)
    assert core.here(8)


def test_the_table_goes_out_in_parts_of_bounded_size_and_without_the_gone() -> None:
    core = member(known=3 * RUMOURS_MAX)
    core.handle(Heard(1, Rumours((rumour(5, 3),))), 0.1)
    parts = only(TablePart, told(core.handle(Heard(2, Greet(2, wants_table=True)), 0.2), 2))
    assert [part.last for part in parts] == [False, False, True]
    assert max(len(part.codes) for part in parts) <= RUMOURS_MAX
    assert sum(len(part.codes) for part in parts) == core.count
    assert not any(code & 1 for part in parts for code in part.codes)


def test_a_member_with_neighbours_enough_hands_over_the_table_and_sends_on() -> None:
    core = member(links=range(1, LINKS_MAX + 1))
    core.handle(LinkUp(15, outgoing=False), 1.0)
    actions = core.handle(Heard(15, Greet(2, wants_table=True)), 1.1)
    assert [type(one) for one in told(actions, 15)] == [TablePart, Full]
    assert Close(15) in actions
    assert len(core.links) == LINKS_MAX


def test_who_is_sent_on_dials_others_until_it_has_neighbours_enough() -> None:
    core = member(links=range(1, LINKS_MIN + 1))
    actions = core.handle(Heard(1, Full()), 1.0)
    assert Close(1) in actions
    (dial,) = only(Dial, actions)
    assert core.here(dial.slot)
    assert core.here(1)


def test_one_neighbour_is_exchanged_now_and_then() -> None:
    core = member(links=(1, 2, 3, 4, 5))
    now, dials = 0.0, list[Dial]()
    while not dials:
        now += BEAT_S
        assert now <= 2 * SHUFFLE_S
        for slot in core.links:
            core.handle(Heard(slot, Rumours(())), now)
        dials = only(Dial, tick(core, now))
    core.handle(LinkUp(dials[0].slot, outgoing=True), now)
    actions = core.handle(Heard(dials[0].slot, Greet(2, wants_table=False)), now)
    assert only(Close, actions) == [Close(1)]
    assert len(core.links) == 5


def test_what_was_missed_is_found_by_comparing_a_few_members() -> None:
    knows, lacks = member(), member()
    knows.handle(Heard(1, Rumours((rumour(5, 3), rumour(25, 2)))), 0.1)
    sync = Sync(tuple(rumour(slot, 2) for slot in range(5, 10)))
    knows.handle(Heard(2, sync), 0.2)
    assert rumour(5, 3) in only(Rumours, told(tick(knows, 0.3), 2))[0].codes
    lacks.handle(Heard(2, Sync((rumour(25, 2),))), 0.2)
    assert lacks.here(25)
    now, seen = 0.0, set[int]()
    while now < 4 * SYNC_S:
        now += BEAT_S
        for slot in lacks.links:
            lacks.handle(Heard(slot, Rumours(())), now)
        for told_now in only(Tell, tick(lacks, now)):
            if isinstance(told_now.message, Sync):
                seen |= set(told_now.message.codes)
    assert {code & ORDER_MASK for code in seen} == {2}
    assert len(seen) == lacks.count


def test_a_quiet_swarm_collects_longer_than_a_busy_one() -> None:
    core = member()
    assert core.period() == PERIOD_MAX_S
    core.handle(Heard(1, Rumours(tuple(rumour(slot, 3) for slot in range(5, 15)))), 0.1)
    assert core.period() == PERIOD_MIN_S


def test_slots_and_queues_are_bounded() -> None:
    core = member()
    assert core.handle(Heard(1, Rumours((rumour(SLOTS_MAX, 2),))), 0.1) == []
    for first in range(0, 2 * QUEUE_MAX, RUMOURS_MAX):
        codes = tuple(rumour(slot, 2) for slot in range(first, first + RUMOURS_MAX))
        core.handle(Heard(1, Rumours(codes)), 0.1)
    now, sent = 0.1, 0
    for _ in range(2 * QUEUE_MAX // RUMOURS_MAX):
        now += 0.1
        for message in only(Rumours, told(tick(core, now), 2)):
            assert len(message.codes) <= RUMOURS_MAX
            sent += len(message.codes)
    assert sent == QUEUE_MAX
