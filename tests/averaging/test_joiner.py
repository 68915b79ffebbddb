"""Who takes the other side in, and who waits (DESIGN.md rule 11), at the level of one core."""

import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.join import JOIN
from dugnad.averaging.joiner import RETRY_S, STANDS_MAX, WAIT_MIN_S
from dugnad.averaging.node import Node
from dugnad.averaging.outer import float_of
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_S,
    A,
    B,
    C,
    D,
    Peer,
    ack,
    named,
    only,
    root,
)
from .join_makers import branch, join_of  # noqa: TID252  a helper of these tests

VERSIONS = 7
"""Versions on each side: more than F."""


def apart(
    me: PeerId,
    mine: list[PeerId],
    others: list[PeerId],
    *,
    ours: int = VERSIONS,
    theirs: int = VERSIONS,
) -> tuple[Peer, Node]:
    """A peer on one side of a split that has just ended, and the other side's head.

    The other side's commits are known; its head is held where its makers are more.
    """
    peer = Peer(me, [one for one in mine if one != me], learner=False)
    for _ in range(2):
        peer.advance([A, B, C, D], next(one for one in mine if one != me))
    fork = peer.core.head
    for _ in range(ours):
        peer.advance(mine, next(one for one in mine if one != me))
    other = branch(peer.core.view.lineage, fork, others, theirs)[-1]
    for one in others:
        peer.tell(ev.PeerUp(one))
    return peer, other


def stand(peer: Peer, other: Node, who: list[PeerId]) -> list[ev.Action]:
    found: list[ev.Action] = []
    for one in who:
        found += peer.tell(ev.HeadIn(one, fm.HeadRow(0, other.version, other.digest)))
    return found


def home_of(mine: list[PeerId]) -> PeerId:
    """Who of this side is home of the next version."""
    peer, _ = apart(mine[0], mine, [D])
    home = peer.core.view.current_home()
    assert home is not None
    return home


@pytest.fixture
def heavy() -> tuple[Peer, Node]:
    """The home of the heavier side, three against one."""
    mine = [A, B, C]
    return apart(home_of(mine), mine, [D])


@pytest.fixture
def light() -> tuple[Peer, Node]:
    """One of the lighter side, two against two with fewer versions."""
    return apart(C, [C, D], [A, B], ours=VERSIONS - 1)


def test_the_home_of_the_heavier_side_asks_for_the_others_anchors_and_joins_them(
    heavy: tuple[Peer, Node],
) -> None:
    peer, other = heavy
    (obtain,) = only(stand(peer, other, [D]), ev.Obtain)
    assert (obtain.digest, obtain.whole, obtain.sources[0]) == (other.digest, True, D)
    actions = peer.tell(ev.Obtained(other.digest)) + peer.wait(1.0)
    (join,) = only(actions, ev.Join)
    assert (join.parent, join.other) == (peer.core.head.digest, other.digest)
    assert float_of(join.alpha_bits) == pytest.approx(0.1)
    assert {one.contribution.peer for one in join.inputs} == {D}
    assert len(join.inputs) == VERSIONS
    done = ev.Merged(
        join.parent,
        join.inputs,
        "float16",
        root("joined"),
        100,
        root("theta"),
        root("momentum"),
        other=join.other,
        alpha_bits=join.alpha_bits,
    )
    (sign,) = only(peer.tell(done), ev.Sign)
    header = sign.header
    assert (header.kind, header.other, header.version) == (
        JOIN,
        other.digest,
        peer.core.head.version + 1,
    )
    record = fm.CommitRecord(header, sign.inputs)
    assert peer.core.view.lineage.judge(record, header.time_ms) == ""


def test_a_home_merges_as_usual_while_the_others_anchors_are_on_their_way(
    heavy: tuple[Peer, Node],
) -> None:
    peer, other = heavy
    peer.tell(ev.LearnerState(True))
    stand(peer, other, [D])
    peer.wait(INTERVAL_S)
    peer.hand_in()
    assert only(peer.wait(3 * INTERVAL_S), ev.Merge)


def test_anchors_that_nobody_serves_are_asked_for_again(heavy: tuple[Peer, Node]) -> None:
    peer, other = heavy
    stand(peer, other, [D])
    assert not only(peer.tell(ev.ObtainFailed(other.digest, "gone")), ev.Obtain)
    assert only(peer.wait(RETRY_S + 0.1), ev.Obtain)


def test_nobody_joins_a_head_that_no_live_peer_stands_at(heavy: tuple[Peer, Node]) -> None:
    peer, other = heavy
    stand(peer, other, [D])
    peer.tell(ev.PeerDown(D))
    assert peer.core.joiner.target is None
    moved = fm.HeadRow(0, peer.core.head.version, peer.core.head.digest)
    peer.tell(ev.PeerUp(D))
    peer.tell(ev.HeadIn(D, moved))
    assert peer.core.joiner.target is None


def test_who_is_not_home_joins_nothing() -> None:
    mine = [A, B, C]
    other_than_home = next(one for one in mine if one != home_of(mine))
    peer, other = apart(other_than_home, mine, [D])
    assert not only(stand(peer, other, [D]) + peer.wait(1.0), ev.Obtain)


def test_a_side_within_the_horizon_is_not_joined() -> None:
    mine = [A, B, C]
    peer, other = apart(home_of(mine), mine, [D], theirs=4)
    assert not only(stand(peer, other, [D]), ev.Obtain)


def hold(peer: Peer, other: Node) -> list[ev.Action]:
    """The other side's anchors come and a member vouches for its head."""
    assert other.record is not None
    return peer.tell(ev.Obtained(other.digest)) + peer.tell(ev.AckIn(ack(B, other.record)))


def test_the_lighter_side_takes_no_head_that_would_lose_its_work(
    light: tuple[Peer, Node],
) -> None:
    peer, other = light
    assert peer.core.view.lineage.better(other, peer.core.head)
    actions = stand(peer, other, [A, B]) + hold(peer, other)
    assert not only(actions, ev.Adopt)
    assert [one.kind for one in only(actions, ev.Note)] == ["join"]
    assert not only(peer.wait(INTERVAL_S), ev.Adopt)


def test_a_waiting_side_merges_nothing(light: tuple[Peer, Node]) -> None:
    peer, other = light
    peer.tell(ev.LearnerState(True))
    stand(peer, other, [A, B])
    peer.wait(INTERVAL_S)
    peer.hand_in()
    assert not only(peer.wait(3 * INTERVAL_S), ev.Merge)


def test_the_lighter_side_goes_over_when_it_is_joined_and_takes_nothing_back(
    light: tuple[Peer, Node],
) -> None:
    peer, other = light
    stand(peer, other, [A, B])
    hold(peer, other)
    old = peer.core.head
    record = join_of(peer.core.view.lineage, other, old, A)
    peer.tell(ev.CommitIn(A, record))
    actions = peer.tell(ev.Obtained(named(record))) + peer.tell(ev.AckIn(ack(B, record)))
    (adopt,) = only(actions, ev.Adopt)
    assert (adopt.digest, adopt.undone, adopt.gap) == (named(record), (), False)
    assert [one.header.version for one in adopt.applied] == list(range(3, other.version + 2))
    assert all(one.share == 0.0 for one in only(actions, ev.Settle))
    assert not peer.core.joiner.waits()


def test_who_is_not_joined_in_time_goes_over_as_it_is(light: tuple[Peer, Node]) -> None:
    peer, other = light
    stand(peer, other, [A, B])
    hold(peer, other)
    actions = peer.wait(max(WAIT_MIN_S, 6 * INTERVAL_S) + 0.1)
    (adopt,) = only(actions, ev.Adopt)
    assert adopt.digest == other.digest
    assert len(adopt.undone) == VERSIONS - 1
    assert "given up" in [one.kind for one in only(actions, ev.Note)]


def test_a_wait_ends_when_the_other_side_is_gone_again(light: tuple[Peer, Node]) -> None:
    peer, other = light
    stand(peer, other, [A, B])
    assert peer.core.joiner.waits()
    peer.tell(ev.PeerDown(A))
    peer.tell(ev.PeerDown(B))
    assert not peer.core.joiner.waits()


def test_heads_of_strangers_fill_no_table(light: tuple[Peer, Node]) -> None:
    peer, other = light
    for number in range(STANDS_MAX + 20):
        stand(peer, other, [PeerId(root(f"stranger {number}"))])
    assert len(peer.core.joiner.stands) == STANDS_MAX


def test_of_one_message_the_first_row_of_a_fragment_is_the_senders_head() -> None:
    rows = (fm.HeadRow(0, 3, b"a" * 32), fm.HeadRow(0, 4, b"b" * 32), fm.HeadRow(1, 2, b"c" * 32))
    assert [(one.row, one.stands) for one in ev.heads_in(A, fm.Heads(rows))] == [
        (rows[0], True),
        (rows[1], False),
        (rows[2], True),
    ]
