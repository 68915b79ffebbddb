"""The crowd's core in the daemon's manner: others watch its streams, spare ones end in peace."""

import random
from array import array
from collections.abc import Iterable

from dugnad.dht.messages import (
    MESSAGE_BYTES_MAX,
    TALK_GONE_MAX,
    TALK_ROW_BYTES,
    TALK_ROWS_MAX,
    Gone,
    Talk,
    decode_message,
    encode_message,
)
from dugnad.dht.roster_crowd import BEAT_S, SILENCE_S, Crowd, Manner
from dugnad.dht.roster_crowd_events import (
    Changed,
    Close,
    CrowdAction,
    Dial,
    Heard,
    LinkUp,
    Lost,
    Parted,
    Tell,
    Tick,
)
from dugnad.dht.roster_crowd_manner import HASTE_S, THIN_S
from dugnad.dht.roster_rumours import (
    RUMOURS_MAX,
    CrowdMessage,
    Full,
    Greet,
    Rumours,
    Spare,
    Sync,
    TablePart,
    rumour,
)

from .roster_world import peer_id  # noqa: TID252  the tests are no installed package

DAEMON = Manner(3, 6, 0.1, 0.3, 20.0, 5.0, 256, watches=False)


def member(links: Iterable[int], known: int = 20) -> Crowd:
    """A member that knows 20 others and was linked with some when the crowd began."""
    core = Crowd(0, 1, random.Random(1), DAEMON)
    core.adopt(array("I", [0, *[2] * known]))
    for slot in links:
        core.handle(LinkUp(slot, outgoing=True, kept=True), 0.0)
        core.handle(Heard(slot, Greet(2, False)), 0.0)
    return core


def told(actions: Iterable[CrowdAction]) -> list[tuple[int, CrowdMessage]]:
    return [(one.slot, one.message) for one in actions if isinstance(one, Tell)]


def test_of_too_many_streams_three_are_kept_and_the_others_are_offered() -> None:
    core = member(range(1, 11))
    assert not [m for _, m in told(core.handle(Tick(), THIN_S / 2)) if isinstance(m, Spare)]
    spare = [slot for slot, m in told(core.handle(Tick(), THIN_S)) if isinstance(m, Spare)]
    assert len(spare) == 10 - DAEMON.links_min
    mine = next(slot for slot in core.links if slot not in spare)
    assert core.handle(Heard(mine, Spare()), THIN_S) == [], "it stays for the one that needs it"
    actions = core.handle(Heard(spare[0], Spare()), THIN_S)
    assert actions == [Tell(spare[0], Full()), Close(spare[0])]
    assert spare[0] not in core.links
    assert core.here(spare[0]), "it is still a member"


def test_who_needs_an_offered_stream_looks_for_another_first() -> None:
    core = member((1, 2, 3))
    actions = core.handle(Heard(2, Spare()), 5.0)
    assert [type(one) for one in actions] == [Dial]
    assert 2 in core.links


def test_while_a_mesh_is_about_to_come_back_no_stream_ends() -> None:
    core = member(range(1, 11))
    core.roomy = True
    assert not [m for _, m in told(core.handle(Tick(), THIN_S)) if isinstance(m, Spare)]
    assert core.handle(Heard(1, Spare()), THIN_S) == []


def test_silence_is_not_judged_here_and_no_beats_are_sent() -> None:
    core = member((1, 2, 3))
    actions = core.handle(Tick(), BEAT_S + SILENCE_S)
    assert not [one for one in actions if isinstance(one, Dial) and one.slot in (1, 2, 3)]
    assert not [m for _, m in told(actions) if m == Rumours(())]


def test_a_neighbour_that_was_sought_in_vain_is_called_gone_to_the_others() -> None:
    core = member((1, 2, 3))
    assert Changed((rumour(1, 3),)) in core.handle(Lost(1), 1.0)
    news = {slot: m for slot, m in told(core.handle(Tick(), 2.0)) if isinstance(m, Rumours)}
    assert set(news) == {2, 3}
    assert all(rumour(1, 3) in m.codes for m in news.values())


def test_a_stream_that_ended_in_peace_makes_nobody_gone_and_another_is_looked_for() -> None:
    core = member((1, 2, 3))
    actions = core.handle(Parted(1), 1.0)
    assert [type(one) for one in actions] == [Dial]
    assert core.here(1)


def test_a_new_neighbour_is_shown_all_of_a_small_crowd_and_answers_what_it_knows_better() -> None:
    core = member((1, 2, 3))
    core.handle(LinkUp(4, outgoing=False), 1.0)
    shown = [m for _, m in told(core.handle(Heard(4, Greet(2, False)), 1.0)) if isinstance(m, Sync)]
    assert len(shown) == 1
    assert len(shown[0].codes) == 20
    core.handle(Lost(9), 2.0)
    core.handle(Tick(), 2.0)
    core.handle(Heard(4, TablePart((rumour(9, 2), rumour(30, 2)), True)), 3.0)
    answer = [m for slot, m in told(core.handle(Tick(), 4.0)) if slot == 4]
    assert any(rumour(9, 3) in m.codes for m in answer if isinstance(m, Rumours))
    assert core.here(30)


def test_a_forgotten_member_is_told_of_no_more() -> None:
    core = member((1, 2, 3))
    core.handle(Lost(9), 2.0)
    core.forget(9)
    assert core.order_of(9) == 0
    news = [m.codes for _, m in told(core.handle(Tick(), 3.0)) if isinstance(m, Rumours)]
    assert not any(rumour(9, 3) in codes for codes in news)


def test_after_word_of_a_loss_somebody_is_dialled_soon() -> None:
    core = member((1, 2, 3))
    core.handle(Tick(), 0.5)
    core.hasten(1.0)
    dials = [one for one in core.handle(Tick(), 1.0 + HASTE_S) if isinstance(one, Dial)]
    assert len(dials) == 1


def test_the_longest_word_of_a_crowd_fits_a_control_message() -> None:
    assert RUMOURS_MAX == TALK_ROWS_MAX
    gone = Gone(peer_id(1), 1 << 31, peer_id(2), bytes(64))
    talk = Talk(0, 1 << 31, 1, bytes(TALK_ROW_BYTES * TALK_ROWS_MAX), (gone,) * TALK_GONE_MAX)
    data = encode_message(talk)
    assert len(data) <= MESSAGE_BYTES_MAX
    assert decode_message(data) == talk
