"""A core that the organiser's word reaches: it decides what is done, never what stands."""

from dugnad.averaging import events as ev
from dugnad.averaging.succession import home_order
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_S,
    RUN,
    A,
    B,
    C,
    D,
    Peer,
    contribution,
    listing,
    merged,
    only,
    work,
)

ALL = [A, B, C, D]
NOBODY: frozenset[PeerId] = frozenset()


def at_place(place: int) -> Peer:
    """The peer that is ``place`` in the order of homes of version 2; all are live."""
    scout = Peer(A, [B, C, D])
    scout.advance(ALL, A)
    me = home_order(RUN, 0, scout.core.head, [])[0][place]
    peer = Peer(me, [p for p in ALL if p != me], learner=False)
    peer.advance(ALL, A)
    return peer


def arrive(peer: Peer, maker: PeerId) -> list[ev.Action]:
    return peer.tell(ev.ContributionIn(contribution(maker, 2, 1), work(8)))


def two_alike() -> tuple[Peer, Peer]:
    """Two peers of one key at the same version 1, to compare what they come to."""
    first = at_place(1)
    record = first.core.head.record
    assert record is not None
    second = Peer(first.core.view.me, others(first), learner=False)
    second.wait(INTERVAL_S)
    second.hear(record, others(first)[0])
    return second, first


def others(peer: Peer) -> list[PeerId]:
    return [p for p in ALL if p != peer.core.view.me]


def test_a_banned_makers_contribution_is_refused_with_the_reason_until_it_is_unbanned() -> None:
    peer = at_place(0)
    maker = others(peer)[0]
    peer.tell(ev.Ordered(False, frozenset({maker})))
    assert "banned" in only(arrive(peer, maker), ev.DropPayload)[0].reason
    assert not peer.core.home.inbox
    peer.tell(ev.Ordered(False, NOBODY))
    arrive(peer, maker)
    assert (maker, 2) in peer.core.home.inbox


def test_a_ban_purges_the_inbox_of_that_peer_alone() -> None:
    peer = at_place(0)
    bad, *good = others(peer)
    for maker in (bad, *good):
        arrive(peer, maker)
    dropped = only(peer.tell(ev.Ordered(False, frozenset({bad}))), ev.DropPayload)
    assert [one.key for one in dropped] == [(bad, 2)]
    assert set(peer.core.home.inbox) == {(one, 2) for one in good}
    merge = only(peer.wait(INTERVAL_S + 2.0), ev.Merge)[0]
    assert merge.keys == tuple((one, 2) for one in sorted(good))


def test_a_banned_home_is_skipped_and_nobody_waits_for_its_hand_in() -> None:
    heir = at_place(1)
    first = heir.core.view.succession()[0]
    heir.tell(ev.Ordered(False, frozenset({first})))
    assert heir.core.view.current_home() == heir.core.view.me
    for maker in others(heir):
        if maker != first:
            arrive(heir, maker)
    assert only(heir.wait(INTERVAL_S + 1.0), ev.Merge)


def test_a_commit_of_a_banned_home_is_followed_all_the_same() -> None:
    told, untold = two_alike()
    home = told.core.view.succession()[0]
    told.tell(ev.Ordered(False, frozenset({home})))
    record = untold.advance(ALL, home)
    told.wait(INTERVAL_S)
    told.hear(record, others(told)[0])
    assert told.core.head.digest == untold.core.head.digest


def test_after_a_stop_a_home_merges_nothing_and_a_merge_under_way_is_not_signed() -> None:
    peer = at_place(0)
    for maker in others(peer):
        arrive(peer, maker)
    assert only(peer.wait(INTERVAL_S + 2.0), ev.Merge)
    done = merged(peer.core.head, [listing(contribution(others(peer)[0], 2, 1))])
    peer.tell(ev.Ordered(True, NOBODY))
    assert not only(peer.tell(done), ev.Sign)
    assert not only(peer.wait(10 * INTERVAL_S), ev.Merge)
    late = peer.tell(ev.ContributionIn(contribution(others(peer)[0], 3, 1), work(8)))
    assert "stopped" in only(late, ev.DropPayload)[-1].reason


def test_after_a_stop_nothing_is_handed_in_and_the_view_has_ended() -> None:
    peer = Peer(A, [B, C, D])
    peer.tell(ev.Ordered(True, NOBODY))
    assert peer.core.view.ended()
    assert not only(peer.wait(10 * INTERVAL_S), ev.HandIn)
    assert only(peer.tell(ev.Ordered(False, NOBODY)), ev.HandIn), "a stop can be taken back"


def test_a_commit_made_by_a_home_that_had_not_heard_of_the_stop_is_followed() -> None:
    told, untold = two_alike()
    told.tell(ev.Ordered(True, NOBODY))
    record = untold.advance(ALL, untold.core.view.succession()[0])
    told.wait(INTERVAL_S)
    told.hear(record, others(told)[0])
    assert told.core.head.digest == untold.core.head.digest


def test_whoever_leaves_after_a_stop_leaves_at_once() -> None:
    peer = Peer(A, [B, C, D])
    peer.tell(ev.Ordered(True, NOBODY))
    peer.tell(ev.LeaveNow())
    assert peer.core.left()
