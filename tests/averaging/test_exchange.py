"""The whole core of one fragment: events in, actions out, deadlines (DESIGN.md section 8)."""

from random import Random

import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.contributor import IN_FLIGHT_MAX
from dugnad.averaging.exchange import CLOCK_JUMP_S, QUIET_S, Exchange
from dugnad.averaging.lineage import Lineage
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_S,
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
    merged,
    named,
    only,
    root,
    settings,
    work,
)


def test_two_peers_found_each_other_and_tell_their_heads() -> None:
    peer = Peer(A)
    (sent,) = only(peer.tell(ev.PeerUp(B)), ev.Send)
    assert sent == ev.Send(B, fm.Heads((fm.HeadRow(0, 0, peer.core.head.digest),), True))
    assert not only(peer.tell(ev.PeerUp(B)), ev.Send)


def test_a_whole_round_of_one_peer_from_hand_in_to_head() -> None:
    peer = Peer(A)
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    (merge,) = only(peer.actions, ev.Merge)
    assert merge.keys == ((A, made.seq),)
    (sign,) = only(peer.tell(merged(peer.core.head, [listing(made)])), ev.Sign)
    record = fm.CommitRecord(sign.header, sign.inputs)
    actions = peer.tell(ev.Signed(record, named(record)))
    assert [type(one) for one in actions if not isinstance(one, ev.Settle)] == [
        ev.Broadcast,
        ev.Adopt,
    ]
    assert peer.core.head.version == 1
    assert peer.core.deadline == pytest.approx(peer.now + INTERVAL_S)


def test_the_interval_may_change() -> None:
    peer = Peer(A)
    peer.tell(ev.Pace(2 * INTERVAL_S, 0.0))
    assert not only(peer.wait(INTERVAL_S + 1.0), ev.HandIn)
    assert only(peer.wait(INTERVAL_S), ev.HandIn)


def test_spurious_timers_and_repeated_events_do_no_harm() -> None:
    peer = Peer(D, [A, B, C], learner=False)
    record = peer.advance([A, B, C], A)
    for event in (
        ev.Timer(),
        ev.CommitIn(A, record),
        ev.Obtained(named(record)),
        ev.PeerDown(A),
        ev.PeerDown(A),
        ev.SignRefused(b"x" * 32),
        ev.Obtained(b"y" * 32),
    ):
        peer.tell(event)
    assert peer.core.head.digest == named(record)


def asleep(peer: Peer) -> list[ev.Action]:
    """The machine sleeps and its timer is the first thing it hears."""
    assert peer.core.deadline is not None
    return peer.tell(ev.Timer(), after=peer.core.deadline - peer.now + CLOCK_JUMP_S + 20.0)


def test_after_a_jump_of_the_clock_it_asks_for_heads_and_does_nothing_else() -> None:
    peer = Peer(A, [B])
    actions = asleep(peer)
    (asked,) = only(actions, ev.Broadcast)
    assert isinstance(asked.message, fm.Heads)
    assert asked.message.reply
    assert not only(actions, ev.HandIn)
    assert not only(peer.wait(QUIET_S - 0.1), ev.HandIn)
    assert only(peer.wait(0.2), ev.HandIn)


def test_a_merge_that_was_slept_over_is_not_signed() -> None:
    # S11: stopped with inputs for v+1, wakes when the swarm is at v+4
    peer = Peer(A)
    peer.wait(INTERVAL_S)
    made = peer.hand_in()
    assert only(peer.actions, ev.Merge)
    asleep(peer)
    assert not only(peer.tell(merged(peer.core.head, [listing(made)])), ev.Sign)
    assert only(peer.wait(QUIET_S + 0.1), ev.Merge)  # nobody knew better: it begins anew


def test_a_late_timer_of_a_busy_machine_is_no_jump() -> None:
    peer = Peer(A)
    assert peer.core.deadline is not None
    actions = peer.tell(ev.Timer(), after=peer.core.deadline - peer.now + CLOCK_JUMP_S - 1.0)
    assert only(actions, ev.HandIn)


def test_it_resumes_at_the_head_of_its_disk() -> None:
    lineage = Lineage(RULES)
    head = chain(lineage, [A, B], 5)[-1]
    point = lineage.checkpoint(head)
    assert point is not None
    core = Exchange(settings(A, first_seq=2))
    core.resume(point, head.digest)
    assert core.head.digest == head.digest
    for event in (ev.Pace(INTERVAL_S, 0.0), ev.LearnerState(True)):
        core.handle(event, 0.0)
    (asked,) = only(core.handle(ev.Timer(), INTERVAL_S + 0.1), ev.HandIn)
    # above what its lineage lists of it (5), and what may have been under way besides
    assert (asked.base, asked.seq) == (5, 6 + IN_FLIGHT_MAX)
    (sent,) = only(core.handle(ev.PeerUp(B), INTERVAL_S + 0.2), ev.Send)
    assert sent.message == fm.Heads((fm.HeadRow(0, 5, head.digest),), True)


def test_a_lost_peer_is_no_source_any_more() -> None:
    peer = Peer(D, [A, B, C], learner=False)
    peer.advance([A, B, C], A)
    head = peer.core.head
    record = commit(peer.core.view.lineage, head, [listing(contribution(B, 2, 1))], B)
    peer.tell(ev.PeerDown(B))
    assert not only(peer.tell(ev.CommitIn(B, record)), ev.Obtain)
    assert only(peer.tell(ev.AckIn(ack(C, record))), ev.Obtain)


def random_event(rng: Random, peer: Peer) -> ev.Event:
    """Something that may arrive, sensible or not."""
    view = peer.core.view
    other = rng.choice([A, B, C, D])
    node = rng.choice(list(view.lineage.nodes.values()))
    seq = rng.randrange(1, 12)
    inputs = [listing(contribution(other, seq, max(0, node.version - rng.randrange(2))))]
    record = commit(view.lineage, node, inputs, rng.choice([A, B, C, D]), boot=rng.randrange(99))
    digest = rng.choice([named(record), node.digest, root(str(rng.random()))])
    events: list[ev.Event] = [
        ev.PeerUp(other),
        ev.PeerDown(other),
        ev.Timer(),
        ev.LearnerState(rng.random() < 0.8),
        ev.HandedIn(peer.core.contributor.making or seq, None, ()),
        ev.SendDone(seq, other, rng.choice(["", "no"])),
        ev.SendLost(seq, other),
        ev.ContributionIn(contribution(other, seq, node.version), work(rng.choice([8, 9]))),
        merged(node, inputs),
        ev.Signed(record, named(record)),
        ev.SignRefused(node.digest),
        ev.CommitIn(other, record),
        ev.CommitsIn(other, (record,), view.lineage.checkpoint(node)),
        ev.AckIn(ack(other, record)),
        ev.HeadIn(other, fm.HeadRow(0, node.version, digest)),
        ev.CommitsWanted(other, digest, (view.lineage.genesis.digest,)),
        ev.Obtained(digest),
        ev.ObtainFailed(digest, "no answer", rng.random() < 0.1),
    ]
    return rng.choice(events)


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_events_breaks_the_core(seed: int) -> None:
    rng = Random(seed)
    me = PeerId(rng.choice([A, B, C, D]))
    peer = Peer(me, [p for p in (A, B, C, D) if p != me])
    for _ in range(250):
        before = peer.core.head
        actions = peer.tell(random_event(rng, peer), after=rng.expovariate(2.0))
        assert peer.core.deadline is None or peer.core.deadline > peer.now
        adopts = only(actions, ev.Adopt)
        assert (peer.core.head is before) == (not adopts)
        if adopts:
            assert adopts[-1].digest == peer.core.head.digest
            assert adopts[-1].digest in peer.core.view.held
