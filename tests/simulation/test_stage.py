"""What the stage does to peers is what it says, and what it checks it notices."""

from __future__ import annotations

import pytest

from dugnad.simulation.checks import Violation
from dugnad.simulation.people import peer_of
from dugnad.simulation.runner import play
from dugnad.simulation.scenario import draw
from dugnad.simulation.settings import SEQUENCE_TOKENS, WorldSettings
from dugnad.simulation.stage import Stage, Trap


def stage(peers: int = 4, *, outbound: tuple[int, ...] = (), until: float = 14.0) -> Stage:
    made = Stage(WorldSettings(seed=3))
    made.outbound = set(outbound)
    for number in range(peers):
        made.add(number)
    made.gossip()
    made.run(until)
    return made


def test_a_peer_behind_nat_contributes_is_never_home_and_has_no_link_to_another() -> None:
    world = stage(4, outbound=(2, 3), until=40.0)
    records = world.ledger.chain(world.best(0))
    assert {record.header.home for record in records} == {peer_of(0), peer_of(1)}
    makers = {one.contribution.peer for record in records for one in record.inputs}
    assert makers == {peer_of(number) for number in range(4)}
    assert peer_of(3) not in world.peers[peer_of(2)].live


def test_a_one_way_split_lets_the_other_direction_through_and_both_notice() -> None:
    world = stage()
    cut = world.part([peer_of(0)], [peer_of(1)], one_way=True)
    world.run(world.now + 1.0)
    assert world.net.is_cut(peer_of(0), peer_of(1))
    assert not world.net.is_cut(peer_of(1), peer_of(0))
    assert peer_of(1) not in world.peers[peer_of(0)].live
    assert peer_of(0) not in world.peers[peer_of(1)].live
    world.join(cut)
    world.run(world.now + 1.0)
    assert peer_of(1) in world.peers[peer_of(0)].live


def test_a_peer_frozen_for_long_is_lost_and_met_again() -> None:
    world = stage()
    world.freeze(peer_of(0), 15.0)
    world.run(world.now + 12.0)
    assert all(peer_of(0) not in sim.live for sim in world.alive() if sim.number)
    world.run(world.now + 5.0)
    assert all(peer_of(0) in sim.live for sim in world.alive() if sim.number)


def test_a_restarted_peer_stands_where_its_disk_stood_and_a_snapshot_where_it_was_taken() -> None:
    world = stage()
    peer = peer_of(1)
    head = world.peers[peer].fragments[0].core.head
    world.snapshots[peer] = world.peers[peer].disk.copy()
    world.kill(peer)
    assert world.restart(peer).fragments[0].core.head.digest == head.digest
    world.run(world.now + 20.0)
    assert world.peers[peer].fragments[0].core.head.version > head.version
    world.restore(peer)
    assert world.peers[peer].fragments[0].core.head.digest == head.digest


def test_a_claim_is_listed_in_full_and_weighs_no_more_than_its_class_allows() -> None:
    world = stage()
    world.claims[peer_of(0)] = 1000.0
    world.run(world.now + 20.0)
    record = world.ledger.chain(world.best(0))[0]
    claimed = {one.contribution.peer: one.contribution.tokens for one in record.inputs}
    assert claimed[peer_of(0)] > 1000 * SEQUENCE_TOKENS
    weights = world.alive()[0].fragments[0].core.head.weights
    assert weights[peer_of(0)] < 3 * weights[peer_of(1)]


def test_a_trap_waits_for_its_moment() -> None:
    world = stage()
    struck: list[int] = []
    world.traps.append(Trap("merge", lambda sim: struck.append(sim.number), times=2, skip=1))
    world.run(world.now + 30.0)
    assert len(struck) == 2
    assert not world.traps


def test_a_home_that_idled_merges_again_when_it_wakes() -> None:
    world = stage(2, outbound=(1,))
    world.until[("idle", peer_of(0))] = world.now + 10.0
    before = len(world.merged_at[0])
    world.run(world.now + 10.0)
    assert len(world.merged_at[0]) <= before + 1
    world.run(world.now + 20.0)
    assert len(world.merged_at[0]) >= before + 3


def test_a_table_over_its_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dugnad.simulation.stage.INBOX_MAX", 1)
    with pytest.raises(Violation, match="the inbox of peer"):
        stage(until=30.0)


def test_a_core_that_asks_for_the_same_moment_for_ever_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dugnad.simulation.clock.AT_ONCE_MAX", 1000)
    world = stage()

    def again() -> None:
        world.later(0.0, again)

    again()
    with pytest.raises(Violation, match="time stands still"):
        world.run(world.now + 1.0)


@pytest.mark.slow
def test_credit_that_is_not_the_fold_of_the_lineage_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = 'title = "halves"\nseconds = 24\n[[event]]\nat_s = 14\ndo = "split"\nwho = "half"\n'
    whole = play(draw("halves", text, 2))
    assert whole.passed
    monkeypatch.setattr(
        "dugnad.averaging.creditchain.CreditChain.undo", lambda self: self.journal.pop() and ()
    )
    broken = [one.what for one in play(draw("halves", text, 2)).violations]
    assert any("fold of its lineage" in one for one in broken)
