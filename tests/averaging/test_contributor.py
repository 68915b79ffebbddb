"""One's own contributions: when they are made, where they go, what comes back (rules 2, 3, 8)."""

import msgspec
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging.contributor import IN_FLIGHT_MAX, RESEND_S

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_S,
    RULES,
    A,
    B,
    C,
    D,
    Peer,
    ack,
    commit,
    contribution,
    grow,
    listing,
    named,
    only,
)


@pytest.fixture
def peer() -> Peer:
    """D, no home of the next version, among A, B and C, at version 1."""
    one = Peer(D, [A, B, C])
    one.advance([A, B, C], A)
    return one


def test_progress_is_handed_in_when_it_is_due_and_not_sooner(peer: Peer) -> None:
    assert not only(peer.wait(INTERVAL_S - 0.1), ev.HandIn)
    (asked,) = only(peer.wait(0.2), ev.HandIn)
    assert (asked.base, asked.base_digest) == (1, peer.core.head.digest)


def test_it_goes_to_the_home_of_the_next_version_once(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    assert (sent.seq, sent.to) == (made.seq, peer.core.view.current_home())
    peer.tell(ev.SendDone(made.seq, sent.to, ""))
    assert not only(peer.wait(0.5), ev.SendContribution)


def test_numbers_rise_strictly_even_when_there_was_no_progress(peer: Peer) -> None:
    (first,) = only(peer.wait(INTERVAL_S), ev.HandIn)
    peer.tell(ev.HandedIn(first.seq, None, ()))
    (second,) = only(peer.wait(INTERVAL_S), ev.HandIn)
    assert second.seq > first.seq


def test_one_contribution_is_made_for_each_head(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    peer.hand_in()
    assert not only(peer.wait(0.9), ev.HandIn)
    assert not only(peer.tell(ev.HandedIn(99, contribution(D, 99, 1), ())), ev.HandIn)
    assert 99 not in peer.core.contributor.own  # nobody asked for it


def test_a_broken_sending_is_tried_again_soon(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    assert not only(peer.tell(ev.SendLost(made.seq, sent.to)), ev.SendContribution)
    (again,) = only(peer.wait(RESEND_S + 0.01), ev.SendContribution)
    assert again == sent


def test_what_a_lost_home_had_accepted_goes_to_its_heir_at_once(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    peer.tell(ev.SendDone(made.seq, sent.to, ""))
    (again,) = only(peer.tell(ev.PeerDown(sent.to)), ev.SendContribution)
    assert again.to == peer.core.view.current_home() != sent.to


def test_what_is_under_way_to_who_is_home_no_more_is_ended(peer: Peer) -> None:
    """A slow line would carry both, and both would be late."""
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    peer.core.view.passed.add(sent.to)
    actions = peer.wait(0.1)
    assert only(actions, ev.CancelSend) == [ev.CancelSend(made.seq, sent.to)]
    (again,) = only(actions, ev.SendContribution)
    assert again.to == peer.core.view.current_home() != sent.to
    assert not only(peer.wait(0.1), ev.CancelSend)


def test_what_is_listed_while_it_is_under_way_is_ended(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    view = peer.core.view
    record = commit(view.lineage, view.head, [listing(made)], sent.to, time_ms=view.wall_ms)
    assert ev.CancelSend(made.seq, sent.to) in peer.hear(record, A)


def test_what_a_home_has_taken_is_not_ended(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    peer.tell(ev.SendDone(made.seq, sent.to, ""))
    peer.core.view.passed.add(sent.to)
    actions = peer.wait(0.1)
    assert not only(actions, ev.CancelSend)
    assert only(actions, ev.SendContribution)


def test_what_is_listed_in_part_comes_back_in_part(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    head = peer.core.head
    record = commit(peer.core.view.lineage, head, [listing(made, clip=0.25)], A)
    actions = peer.hear(record, A)
    assert only(actions, ev.Settle) == [ev.Settle(made.seq, 0.75)]
    assert peer.core.contributor.open() == []


def test_what_is_listed_in_full_stays_and_is_forgotten_when_it_is_settled(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    peer.hear(commit(peer.core.view.lineage, peer.core.head, [listing(made)], A), A)
    forgotten: list[ev.Forget] = []
    for _ in range(6):
        assert forgotten == []
        record = commit(
            peer.core.view.lineage,
            peer.core.head,
            [listing(contribution(A, peer.core.head.version + 1, peer.core.head.version))],
            A,
        )
        actions = peer.hear(record, A)
        assert not only(actions, ev.Settle)
        forgotten = only(actions, ev.Forget)
    assert forgotten == [ev.Forget(made.seq)]  # S + F versions after its base


def test_what_is_not_listed_comes_back_only_when_its_window_has_closed(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()  # on version 1: versions 2 and 3 may list it
    shares: list[list[float]] = []
    for _ in range(2):
        head = peer.core.head
        number = head.version + 1
        inputs = [listing(contribution(A, number, head.version))]
        actions = peer.hear(commit(peer.core.view.lineage, head, inputs, A), A)
        shares.append([one.share for one in only(actions, ev.Settle)])
    assert shares == [[], [1.0]]
    assert made.seq not in peer.core.contributor.open()


def test_a_switch_of_lineage_settles_anew(peer: Peer) -> None:
    # S3: C1 lists it, C2 does not and wins after all, and the other way round
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    lineage, base = peer.core.view.lineage, peer.core.head
    with_it = commit(lineage, base, [listing(made, clip=0.5)], A)
    peer.hear(with_it, A)
    assert peer.core.contributor.own[made.seq].share == 0.5
    rich = [listing(contribution(p, 2, 1, sequences=20)) for p in (A, B)]
    without = commit(lineage, base, rich, B)
    settled = only(peer.hear(without, B), ev.Settle)
    assert peer.core.head.digest == named(without)
    assert settled == [ev.Settle(made.seq, 0.0)]  # in flight again: version 3 may still list it


def test_not_more_than_a_few_are_under_way(peer: Peer) -> None:
    for seq in range(100, 100 + IN_FLIGHT_MAX):
        peer.core.contributor.making = seq
        peer.tell(ev.HandedIn(seq, contribution(D, seq, 1), ()))
    peer.core.contributor.last_base = None
    assert len(peer.core.contributor.open()) == IN_FLIGHT_MAX
    assert not only(peer.wait(INTERVAL_S), ev.HandIn)


def test_numbers_go_on_above_what_the_lineage_lists(peer: Peer) -> None:
    # a disk that is an older copy: its next number was used already
    head = peer.core.head
    record = commit(peer.core.view.lineage, head, [listing(contribution(D, 50, 1))], A)
    peer.hear(record, A)
    (asked,) = only(peer.wait(INTERVAL_S + 0.1), ev.HandIn)
    assert asked.seq > 50


def test_what_came_back_late_is_kept_as_long_as_a_switch_may_say_otherwise(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    for _ in range(RULES.staleness):
        peer.advance([A, B], A)
    assert peer.core.contributor.own[made.seq].share == 1.0
    back_at = peer.core.head.version
    while peer.core.head.version < back_at + RULES.horizon:
        peer.advance([A, B], A)
        assert made.seq in peer.core.contributor.own
    peer.advance([A, B], A)
    assert made.seq not in peer.core.contributor.own


def test_a_switch_that_returns_an_old_contribution_keeps_it_f_versions_longer() -> None:
    peer = Peer(D, [A, B, C])
    for _ in range(2):
        peer.advance([A, B, C, D], A)
    lineage, fork = peer.core.view.lineage, peer.core.head
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    inputs = [listing(made)]
    record = commit(lineage, fork, inputs, A, time_ms=peer.core.view.wall_ms)
    peer.hear(record, A)
    other = fork
    for _ in range(RULES.horizon + RULES.staleness + 3):
        other = grow(lineage, other, [A, B, C], A)
    assert other.version > made.base + RULES.staleness + RULES.horizon
    assert other.record is not None
    actions = peer.tell(ev.Obtained(other.digest)) + peer.tell(ev.AckIn(ack(B, other.record)))
    assert [(one.seq, one.share) for one in only(actions, ev.Settle)] == [(made.seq, 1.0)]
    assert not only(actions, ev.Forget)
    assert peer.core.contributor.own[made.seq].settled_at == other.version


def test_without_a_learner_nothing_is_handed_in() -> None:
    peer = Peer(D, [A], learner=False)
    assert not only(peer.wait(3 * INTERVAL_S), ev.HandIn)


def test_a_leaving_peer_hands_in_at_once_and_is_done_when_it_is_accepted(peer: Peer) -> None:
    actions = peer.tell(ev.LeaveNow(), after=1.0)
    assert only(actions, ev.HandIn)
    assert not peer.core.left()
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    assert sent.to != D
    assert not peer.core.left()
    peer.tell(ev.SendLost(made.seq, sent.to))
    assert not peer.core.left()
    peer.wait(RESEND_S)
    peer.tell(ev.SendDone(made.seq, sent.to, ""))
    assert peer.core.left()


def test_a_leaving_peer_without_progress_is_done_at_once(peer: Peer) -> None:
    (asked,) = only(peer.tell(ev.LeaveNow(), after=1.0), ev.HandIn)
    peer.tell(ev.HandedIn(asked.seq, None, ()))
    assert peer.core.left()


def test_a_refusal_is_told_and_not_pressed(peer: Peer) -> None:
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (sent,) = only(peer.actions, ev.SendContribution)
    actions = peer.tell(ev.SendDone(made.seq, sent.to, "it is stale"))
    assert [note.kind for note in only(actions, ev.Note)] == ["refused"]
    assert not only(peer.wait(0.5), ev.SendContribution)
    assert peer.core.contributor.own[made.seq].share == 0.0  # the chain decides, not the answer


def test_answers_about_unknown_numbers_do_no_harm(peer: Peer) -> None:
    peer.tell(ev.SendDone(77, A, ""))
    peer.tell(ev.SendLost(77, A))
    assert peer.core.contributor.own == {}
    assert msgspec.structs.replace(contribution(D, 1, 1)).peer == D


def test_a_leaving_peer_that_is_refused_asks_the_next_until_nobody_is_left() -> None:
    # two that left at once handed their last work to each other, and both counted it as delivered
    peer = Peer(D, [A, B])
    peer.tell(ev.LeaveNow(), after=1.0)
    made = peer.hand_in()
    (first,) = only(peer.actions, ev.SendContribution)
    (second,) = only(
        peer.tell(ev.SendDone(made.seq, first.to, "this peer is leaving")), ev.SendContribution
    )
    assert {first.to, second.to} == {A, B}
    assert not peer.core.left()
    assert not only(peer.tell(ev.SendDone(made.seq, second.to, "no")), ev.SendContribution)
    assert peer.core.left()
