"""Which commits are fetched, witnessed, adopted, served and refused (rules 6, 7, 10 and 12)."""

import msgspec
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.chains import CHAIN_MAX
from dugnad.averaging.follower import (
    ASK_AGAIN_S,
    BACKOFF_FIRST_S,
    BAD_MAX,
    CATCH_UP_MAX,
    SEEN_MAX,
    WITNESSES_ENOUGH,
)
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import Node
from dugnad.averaging.view import HOLDERS_DIGESTS_MAX
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    RULES,
    A,
    B,
    C,
    D,
    Peer,
    ack,
    chain,
    commit,
    contribution,
    listing,
    named,
    only,
    root,
)


def record_of(node: Node) -> fm.CommitRecord:
    assert node.record is not None
    return node.record


@pytest.fixture
def peer() -> Peer:
    """D, an onlooker without a learner, among A, B and C at version 1."""
    one = Peer(D, [A, B, C], learner=False)
    one.advance([A, B, C], A)
    one.wait(60.0)  # the wall clock is beyond what these tests date
    return one


@pytest.fixture
def member() -> Peer:
    """C, a member."""
    one = Peer(C, [A, B, D], learner=False)
    one.advance([A, B, C], A)
    one.wait(60.0)
    return one


def following(
    peer: Peer, makers: tuple[PeerId, ...] = (A, B, C), home: PeerId = A, **changes: object
) -> fm.CommitRecord:
    """A valid commit on the peer's head."""
    head = peer.core.head
    inputs = [listing(contribution(m, head.version + 1, head.version)) for m in makers]
    return commit(peer.core.view.lineage, head, inputs, home, **changes)


def test_a_header_alone_is_no_head(peer: Peer) -> None:
    record = following(peer)
    (obtain,) = only(peer.tell(ev.CommitIn(A, record)), ev.Obtain)  # S2
    assert (obtain.digest, obtain.whole) == (named(record), False)
    assert A in obtain.sources
    assert not only(peer.tell(ev.Obtained(named(record))), ev.Adopt)  # held, but nobody vouches
    adopt = only(peer.tell(ev.AckIn(ack(B, record))), ev.Adopt)
    assert [one.digest for one in adopt] == [named(record)]


def test_a_witness_without_the_payload_is_no_head_either(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    assert not only(peer.tell(ev.AckIn(ack(B, record))), ev.Adopt)
    assert only(peer.tell(ev.Obtained(named(record))), ev.Adopt)


def test_neither_its_home_nor_a_stranger_is_a_witness(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    peer.tell(ev.Obtained(named(record)))
    stranger = PeerId(root("stranger"))
    for who in (A, D, stranger):
        assert not only(peer.tell(ev.AckIn(ack(who, record))), ev.Adopt)


def test_strangers_cannot_crowd_out_the_witness(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    peer.tell(ev.Obtained(named(record)))
    for number in range(fm.ACKS_MAX + 5):
        peer.tell(ev.AckIn(ack(root(f"sybil {number}"), record)))
    assert only(peer.tell(ev.AckIn(ack(B, record))), ev.Adopt)


def test_a_members_word_that_it_holds_a_commit_is_as_good_as_its_ack(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    peer.tell(ev.Obtained(named(record)))
    assert not only(peer.tell(ev.HeadIn(A, peer.row(record))), ev.Adopt)
    assert only(peer.tell(ev.HeadIn(B, peer.row(record))), ev.Adopt)


def test_a_commit_on_top_by_another_member_vouches_for_it(peer: Peer) -> None:
    first = following(peer)
    peer.tell(ev.CommitIn(A, first))
    peer.tell(ev.Obtained(named(first)))
    node = peer.core.view.lineage.get(named(first))
    assert node is not None
    second = commit(peer.core.view.lineage, node, [listing(contribution(B, 3, 2))], B)
    assert [one.digest for one in only(peer.tell(ev.CommitIn(B, second)), ev.Adopt)] == [
        named(first)
    ]


def test_where_no_other_member_lives_nobody_has_to_vouch(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    peer.tell(ev.Obtained(named(record)))
    peer.tell(ev.PeerDown(B))
    assert only(peer.tell(ev.PeerDown(C)), ev.Adopt)


def test_a_member_that_computed_it_acknowledges_once_and_adopts(member: Peer) -> None:
    record = following(member)
    member.tell(ev.CommitIn(A, record))
    actions = member.tell(ev.Obtained(named(record)))
    assert only(actions, ev.Acknowledge) == [ev.Acknowledge(2, named(record))]
    assert only(actions, ev.Adopt)
    assert not only(member.tell(ev.CommitIn(B, record)), ev.Acknowledge)


def test_nobody_adds_an_ack_to_enough(member: Peer) -> None:
    makers = sorted([A, B, C, *(PeerId(root(f"m{n}")) for n in range(3))])
    record = following(member, tuple(makers))
    member.tell(ev.CommitIn(A, record))
    for who in [m for m in makers if m not in (A, C)][:WITNESSES_ENOUGH]:
        member.tell(ev.AckIn(ack(who, record)))
    assert not only(member.tell(ev.Obtained(named(record))), ev.Acknowledge)


def test_an_onlooker_acknowledges_nothing(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    assert not only(peer.tell(ev.Obtained(named(record))), ev.Acknowledge)


# -- what is refused -------------------------------------------------------------------------------


def test_a_commit_that_breaks_a_rule_is_refused_for_good_and_once_noted(peer: Peer) -> None:
    record = following(peer, members_root=fm.NO_DIGEST)
    actions = peer.tell(ev.CommitIn(A, record))
    assert [note.kind for note in only(actions, ev.Note)] == ["refused"]
    assert peer.tell(ev.CommitIn(B, record)) == []


def test_rates_that_are_not_the_runs_are_refused(peer: Peer) -> None:
    record = following(peer, eta_bits=0x40000000)
    assert "outer rates" in only(peer.tell(ev.CommitIn(A, record)), ev.Note)[0].text


def test_a_commit_from_the_future_is_not_taken_now_but_its_time_may_come(peer: Peer) -> None:
    # one peer's slow clock must not make it refuse a lineage for ever
    ahead = peer.core.view.wall_ms + 61_000
    record = following(peer, time_ms=ahead)
    assert not only(peer.tell(ev.CommitIn(A, record)), ev.Obtain)
    assert only(peer.tell(ev.CommitIn(A, record), after=2.0), ev.Obtain)


def test_a_payload_that_gives_other_roots_is_refused_for_good(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    actions = peer.tell(ev.ObtainFailed(named(record), "other roots", lied=True))
    assert [note.kind for note in only(actions, ev.Note)] == ["refused"]
    assert not only(peer.tell(ev.HeadIn(B, peer.row(record))), ev.Obtain)
    node = peer.core.view.lineage.get(named(record))
    assert node is not None
    child = commit(peer.core.view.lineage, node, [listing(contribution(B, 3, 2))], B)
    assert not only(peer.tell(ev.CommitIn(B, child)), ev.Obtain)  # nor what is built on it


# -- getting ---------------------------------------------------------------------------------------


def test_an_unserved_payload_is_tried_again_later_and_later(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    wait = BACKOFF_FIRST_S
    for _ in range(3):
        assert not only(peer.tell(ev.ObtainFailed(named(record), "no answer")), ev.Obtain)
        assert not only(peer.wait(wait - 0.1), ev.Obtain)
        assert only(peer.wait(0.2), ev.Obtain)
        wait *= 2


def test_whoever_had_to_wait_for_its_turn_asks_at_once_for_what_is_newest_by_then(
    peer: Peer,
) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    failed = ev.ObtainFailed(named(record), "another fragment came first", waited=True)
    assert only(peer.tell(failed), ev.Obtain)
    assert only(peer.tell(failed), ev.Obtain)


def test_a_new_source_is_tried_at_once(peer: Peer) -> None:
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    peer.tell(ev.ObtainFailed(named(record), "no answer"))
    (obtain,) = only(peer.tell(ev.AckIn(ack(B, record))), ev.Obtain)
    assert B in obtain.sources


def test_a_payload_that_nobody_has_any_more_is_replaced_by_whole_anchors(peer: Peer) -> None:
    # two peers that need each other's word would wait for ever for a payload that died
    record = following(peer)
    peer.tell(ev.CommitIn(A, record))
    peer.tell(ev.AckIn(ack(B, record)))
    for _ in range(2):
        peer.tell(ev.ObtainFailed(named(record), "no answer"))
        found = only(peer.wait(2.0), ev.Obtain)
    assert [one.whole for one in found] == [True]


def test_a_stale_failure_does_not_keep_the_core_awake(peer: Peer) -> None:
    lost = following(peer, (C,), C)
    peer.tell(ev.CommitIn(C, lost))
    peer.tell(ev.ObtainFailed(named(lost), "no answer"))
    peer.advance([A, B, C], A, wait=0.0)
    peer.wait(30.0)
    assert peer.core.deadline is None


def test_far_behind_it_takes_whole_anchors_of_the_newest_witnessed(peer: Peer) -> None:
    lineage = Lineage(RULES)
    nodes = chain(lineage, [A, B, C], CATCH_UP_MAX + 3)
    fresh = Peer(D, [A, B, C], learner=False)
    fresh.wait(200.0)
    records = tuple(record_of(node) for node in nodes[1:])
    assert not only(fresh.tell(ev.CommitsIn(A, records, None)), ev.Obtain)  # nobody vouches
    found = only(fresh.tell(ev.AckIn(ack(B, records[-2]))), ev.Obtain)
    assert [(one.digest, one.whole) for one in found] == [(nodes[-2].digest, True)]


def test_a_payload_on_what_is_held_does_not_wait_for_anchors_that_nobody_may_have(
    peer: Peer,
) -> None:
    head, made = peer.core.head, list[fm.CommitRecord]()
    node = head
    for _ in range(CATCH_UP_MAX + 2):
        inputs = [listing(contribution(m, node.version + 1, node.version)) for m in (A, B, C)]
        made.append(commit(peer.core.view.lineage, node, inputs, A))
        peer.tell(ev.ObtainFailed(named(made[0]), "no answer"))
        peer.tell(ev.CommitIn(A, made[-1]))
        found = peer.core.view.lineage.get(named(made[-1]))
        assert found is not None
        node = found
    peer.tell(ev.ObtainFailed(named(made[0]), "no answer"))
    (far,) = only(peer.tell(ev.AckIn(ack(B, made[-1]))), ev.Obtain)
    assert (far.digest, far.whole) == (named(made[-1]), True)
    rival = commit(
        peer.core.view.lineage,
        head,
        [listing(contribution(m, head.version + 1, head.version)) for m in (A, B)],
        B,
    )
    (near,) = only(peer.tell(ev.CommitIn(B, rival)), ev.Obtain)
    assert (near.digest, near.whole) == (named(rival), False)
    assert not only(peer.tell(ev.AckIn(ack(C, made[-1]))), ev.Obtain)  # each is asked for once
    peer.tell(ev.AckIn(ack(A, rival)))
    (taken,) = only(peer.tell(ev.Obtained(named(rival))), ev.Adopt)
    assert taken.digest == named(rival)


def test_an_unknown_parent_is_asked_for_once_in_a_while() -> None:
    nodes = chain(Lineage(RULES), [A, B, C], 3)
    peer = Peer(D, [A], learner=False)
    (asked,) = only(peer.tell(ev.CommitIn(A, record_of(nodes[3]))), ev.Send)
    assert isinstance(asked.message, fm.WantCommits)
    assert asked.message.digest == nodes[3].digest
    assert peer.core.head.digest in asked.message.known
    assert not only(peer.tell(ev.CommitIn(A, record_of(nodes[3]))), ev.Send)
    assert only(peer.tell(ev.CommitIn(A, record_of(nodes[3])), after=ASK_AGAIN_S), ev.Send)


def test_the_rest_of_a_long_chain_is_asked_for_above_what_came() -> None:
    nodes = chain(Lineage(RULES), [A, B, C], 6)
    peer = Peer(D, [A], learner=False)
    peer.wait(100.0)
    peer.tell(ev.HeadIn(A, fm.HeadRow(0, 6, nodes[6].digest)))
    first = tuple(record_of(node) for node in nodes[1:4])
    (again,) = only(peer.tell(ev.CommitsIn(A, first, None)), ev.Send)
    assert isinstance(again.message, fm.WantCommits)
    assert nodes[3].digest in again.message.known
    assert not only(peer.tell(ev.CommitsIn(A, first, None)), ev.Send)  # nothing new: no storm
    assert not only(peer.tell(ev.CommitsIn(A, (record_of(nodes[4]),), None)), ev.Adopt)
    assert not only(peer.tell(ev.CommitsIn(B, (record_of(nodes[5]),), None)), ev.Send)


def test_a_chain_with_a_hole_is_taken_up_to_it() -> None:
    nodes = chain(Lineage(RULES), [A, B, C], 4)
    peer = Peer(D, [A], learner=False)
    peer.wait(100.0)
    peer.tell(ev.CommitsIn(A, (record_of(nodes[1]), record_of(nodes[3])), None))
    lineage = peer.core.view.lineage
    assert lineage.get(nodes[1].digest) is not None
    assert lineage.get(nodes[3].digest) is None


# -- serving ---------------------------------------------------------------------------------------


def served(peer: Peer, digest: bytes, known: tuple[bytes, ...]) -> fm.Commits:
    (sent,) = only(peer.tell(ev.CommitsWanted(B, digest, known)), ev.Send)
    assert sent.to == B
    assert isinstance(sent.message, fm.Commits)
    return sent.message


def test_a_chain_is_served_with_its_acks_oldest_first(peer: Peer) -> None:
    first = peer.core.head.digest
    records = [peer.advance([A, B, C], A) for _ in range(3)]
    answer = served(peer, peer.core.head.digest, (first,))
    assert [one.header for one in answer.commits] == [one.header for one in records]
    assert {one.peer for one in answer.commits[0].acks} == {B, C}
    assert answer.checkpoint is None


def test_what_is_not_known_is_not_answered(peer: Peer) -> None:
    assert peer.tell(ev.CommitsWanted(B, b"x" * 32, ())) == []
    assert peer.tell(ev.CommitsWanted(B, peer.core.view.lineage.genesis.digest, ())) == []


def test_an_answer_holds_a_bounded_number_of_commits(peer: Peer) -> None:
    for _ in range(fm.COMMITS_PER_REPLY_MAX + 5):
        peer.advance([A, B, C], A)
    known = (peer.core.view.lineage.genesis.digest,)
    answer = served(peer, peer.core.head.digest, known)
    assert len(answer.commits) == fm.COMMITS_PER_REPLY_MAX
    assert answer.commits[0].header.version == 1


def test_where_the_history_is_gone_a_checkpoint_is_served_and_everything_above_it() -> None:
    veteran = Peer(D, [A, B, C], learner=False)
    for _ in range(CHAIN_MAX + 20):
        veteran.advance([A, B, C], A)
    head = veteran.core.head
    answer = served(veteran, head.digest, (veteran.core.view.lineage.genesis.digest,))
    assert answer.checkpoint is not None
    newcomer = Peer(PeerId(b"n" * 32), [A, B, C, D], learner=False)
    newcomer.wait(veteran.now)
    newcomer.tell(ev.CommitsIn(D, answer.commits, answer.checkpoint))
    assert newcomer.core.view.lineage.get(head.digest) is not None  # not the checkpoint alone
    (obtain,) = only(newcomer.actions, ev.Obtain)
    assert (obtain.digest, obtain.whole) == (head.digest, True)
    adopt = only(newcomer.tell(ev.Obtained(head.digest)), ev.Adopt)
    assert [(one.version, one.gap) for one in adopt] == [(head.version, True)]


def checkpoint_of(length: int, makers: list[PeerId]) -> tuple[fm.Checkpoint, Node]:
    lineage = Lineage(RULES)
    node = chain(lineage, makers, length)[-1]
    point = lineage.checkpoint(node)
    assert point is not None
    return point, node


def test_a_checkpoint_that_is_lighter_than_my_head_is_ignored() -> None:
    peer = Peer(D, [A, B, C], learner=False)
    for _ in range(3):
        peer.advance([A, B, C], A)
    point, node = checkpoint_of(3, [A])
    peer.tell(ev.CommitsIn(A, (), point))
    assert peer.core.view.lineage.get(node.digest) is None


def test_a_checkpoint_with_wrong_tables_is_refused() -> None:
    peer = Peer(D, [A, B, C], learner=False)
    peer.wait(60.0)
    point, node = checkpoint_of(3, [A])
    bad = msgspec.structs.replace(point, members=())
    assert only(peer.tell(ev.CommitsIn(A, (), bad)), ev.Note)
    assert peer.core.view.lineage.get(node.digest) is None


# -- forks -----------------------------------------------------------------------------------------


def test_the_heavier_sibling_wins_and_the_way_over_is_told(member: Peer) -> None:
    light = following(member, (A,), A)
    heavy = following(member, (A, B, C), B)
    member.hear(light, A)
    assert member.core.head.digest == named(light)
    (adopt,) = only(member.hear(heavy, B), ev.Adopt)
    assert (adopt.digest, adopt.undone) == (named(heavy), (named(light),))
    assert [named(one) for one in adopt.applied] == [named(heavy)]
    assert not adopt.gap


def test_a_lighter_sibling_changes_nothing(member: Peer) -> None:
    heavy = following(member, (A, B, C), B)
    light = following(member, (A,), A)
    member.hear(heavy, B)
    assert not only(member.hear(light, A), ev.Adopt)


def alone(peer: Peer, length: int) -> None:
    """All others are lost and the peer merges its own work ``length`` times."""
    for other in list(peer.core.view.live):
        peer.tell(ev.PeerDown(other))
    for _ in range(length):
        head, me = peer.core.head, peer.core.view.me
        inputs = [listing(contribution(me, head.version + 1, head.version, sequences=20))]
        record = commit(peer.core.view.lineage, head, inputs, me)
        peer.tell(ev.Signed(record, named(record)))
        assert peer.core.head.digest == named(record)


def test_a_head_that_i_made_alone_gives_way_to_one_with_witnesses(member: Peer) -> None:
    base = member.core.head
    lineage = Lineage(RULES)
    lineage.nodes = dict(member.core.view.lineage.nodes)
    theirs = commit(lineage, base, [listing(contribution(A, 2, 1))], A)
    alone(member, 3)  # heavier than theirs, but nobody ever saw it
    for other in (A, B):
        member.tell(ev.PeerUp(other))
    member.tell(ev.CommitIn(A, theirs))
    actions = member.tell(ev.AckIn(ack(B, theirs)))
    assert [one.digest for one in only(actions, ev.Obtain)] == [named(theirs)]
    assert [one.digest for one in only(member.tell(ev.Obtained(named(theirs))), ev.Adopt)] == [
        named(theirs)
    ]


def test_a_head_that_i_made_alone_stays_while_there_is_no_other(member: Peer) -> None:
    alone(member, 2)
    head = member.core.head
    member.tell(ev.PeerUp(A))
    member.wait(5.0)
    assert member.core.head is head


# -- memory ----------------------------------------------------------------------------------------


def test_tables_stay_bounded_whatever_peers_name(peer: Peer) -> None:
    known = following(peer)
    for number in range(SEEN_MAX + HOLDERS_DIGESTS_MAX):
        peer.tell(ev.HeadIn(A, fm.HeadRow(0, 9, root(f"digest {number}"))))
        unknown = msgspec.structs.replace(known.header, boot=number, parent=root("unknown"))
        peer.tell(ev.CommitIn(A, fm.CommitRecord(unknown, known.inputs)))
    follower = peer.core.follower
    assert len(peer.core.view.holders) <= HOLDERS_DIGESTS_MAX
    assert len(follower.seen) <= SEEN_MAX
    assert len(follower.asked) <= BAD_MAX
    assert follower.acks.keys() <= peer.core.view.lineage.nodes.keys()


def test_a_digest_of_another_length_is_not_remembered(peer: Peer) -> None:
    assert peer.tell(ev.HeadIn(A, fm.HeadRow(0, 9, b"long" * 1000))) == []
    assert b"long" * 1000 not in peer.core.view.holders


def test_refused_commits_are_forgotten_in_the_end(peer: Peer) -> None:
    for number in range(BAD_MAX + 5):
        bad = following(peer, boot=number, members_root=fm.NO_DIGEST)
        peer.tell(ev.CommitIn(A, bad))
    assert len(peer.core.follower.bad) == BAD_MAX


def test_old_anchors_are_dropped_but_the_parents(peer: Peer) -> None:
    digests = [peer.core.head.digest]
    for _ in range(3):
        digests.append(named(peer.advance([A, B, C], A)))
    assert peer.core.view.held == set(digests[-2:])
