"""The schedules of the design review (S1 to S19) as scenarios: what broke a naive exchange.

Each bends the simulated world at one point (a header without its payload, a stream that breaks on
one side, a stopped home) and lets the checkers look after every event. Schedules that are about
snapshots, units, weights or the roster are tested where those live.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.join import JOIN
from dugnad.averaging.lineage import CLOCK_AHEAD_MS
from dugnad.averaging.worker import FragmentWorker, WorkError
from dugnad.dht.ids import PeerId
from dugnad.simulation.people import SimFragment, SimPeer, SimSigner
from dugnad.simulation.settings import RUN
from dugnad.simulation.world import Weather, World, WorldSettings, peer_of

CALM = Weather()


class Bent(World):
    """A world in which tests can swallow messages, sendings and payloads."""

    def __init__(self, settings: WorldSettings) -> None:
        self.swallow: Callable[[PeerId, PeerId, fm.Message], bool] = lambda *_: False
        self.broken: set[tuple[PeerId, PeerId]] = set()
        """(from, to): contributions sent there arrive, and the answer is lost."""
        self.withheld: set[PeerId] = set()
        """Peers that serve nothing."""
        super().__init__(settings)

    def _send(self, sim: SimPeer, to: PeerId, message: fm.Message, p: int) -> None:
        if not self.swallow(sim.peer, to, message):
            super()._send(sim, to, message, p)

    def _tell(self, sim: SimPeer, p: int, event: ev.Event) -> None:
        if isinstance(event, ev.SendDone) and (sim.peer, event.to) in self.broken:
            event = ev.SendLost(event.seq, event.to)
        super()._tell(sim, p, event)

    def _fetch(self, sim: SimPeer, p: int, action: ev.Obtain, source: PeerId) -> None:
        if source in self.withheld:
            raise WorkError("it withholds the payload")
        super()._fetch(sim, p, action, source)


def swarm(seed: int = 1, peers: int = 4, *, until: float = 20.0, weather: Weather = CALM) -> Bent:
    world = Bent(WorldSettings(seed=seed, weather=weather))
    for number in range(peers):
        world.add(number)
    world.gossip()
    world.run(until)
    return world


def core(world: World, peer: PeerId) -> SimFragment:
    return world.peers[peer].fragments[0]


def home_of(world: World) -> PeerId:
    """The home of the next version, when all have one head."""
    for _ in range(100):
        world.run(world.now + 0.1)
        homes = {sim.fragments[0].core.view.current_home() for sim in world.alive()}
        if len(world.heads()) == 1 and len(homes) == 1:
            (home,) = homes
            assert home is not None
            return home
    raise AssertionError("no home that all agree on")


def agree(world: World, within_s: float = 20.0) -> bool:
    end = world.now + within_s
    while world.now < end:
        world.run(world.now + 0.2)
        if len(world.heads()) == 1:
            return True
    return False


def goes_on(world: World, seconds: float = 20.0) -> bool:
    before = len(world.merged_at[0])
    world.run(world.now + seconds)
    return len(world.merged_at[0]) >= before + 3 and agree(world)


SEEDS = pytest.mark.parametrize("seed", range(2))


@SEEDS
def test_s1_a_sibling_that_wakes_late_never_beats_the_chain_that_moved_on(seed: int) -> None:
    world = swarm(seed)
    home = home_of(world)
    woken = next(sim.peer for sim in world.alive() if sim.peer != home)
    world.swallow = lambda _a, to, m: isinstance(m, fm.Announce) and to != woken and _a == home
    merges = len(world.merged_at[0])
    while len(world.merged_at[0]) == merges:
        world.run(world.now + 0.05)
    world.run(world.now + 0.2)  # the home's commit reaches one peer, which then sleeps
    world.kill(home)
    world.freeze(woken, 20.0)
    world.run(world.now + 15.0)
    version = max(sim.fragments[0].core.head.version for sim in world.alive())
    world.swallow = lambda *_: False
    world.run(world.now + 10.0)
    assert core(world, woken).core.head.version >= version
    assert goes_on(world)


@SEEDS
def test_s2_a_header_whose_payload_is_withheld_does_not_stop_the_swarm(seed: int) -> None:
    world = swarm(seed)
    world.withheld.add(home_of(world))
    assert goes_on(world, 40.0)
    assert world.alive()[0].fragments[0].core.head.version >= 8


@SEEDS
def test_s3_a_sender_that_lost_only_its_answer_counts_once(seed: int) -> None:
    world = swarm(seed)
    for sim in world.alive():
        for other in world.alive():
            if sim.number == 0 and other is not sim:
                world.broken.add((sim.peer, other.peer))
    assert goes_on(world, 30.0)  # conservation and "listed once" are checked after every event
    head = world.alive()[0].fragments[0].core.head
    assert head.seqs[peer_of(0)].seq >= head.version - 3


@SEEDS
def test_s4_a_version_seen_before_the_one_that_lists_me_gives_nothing_back(seed: int) -> None:
    world = swarm(seed)
    behind = peer_of(seed)
    skipped: set[bytes] = set()

    def drop(_: PeerId, to: PeerId, message: fm.Message) -> bool:
        """Every second commit is announced to the peer; it learns the others from the chain."""
        if to != behind or not isinstance(message, fm.Announce):
            return False
        if message.commit.header.version % 2:
            skipped.add(message.commit.header.payload_root)
        return message.commit.header.payload_root in skipped

    world.swallow = drop
    assert goes_on(world, 30.0)
    assert np.abs(core(world, behind).given_up).max() == 0.0


def until(world: Bent, what: Callable[[], bool], seconds: float) -> None:
    """Let the clock run, a little at a time, until something is so."""
    end = world.now + seconds
    while not what():
        assert world.now < end
        world.run(world.now + 0.01)


def joins(world: Bent) -> list[bytes]:
    """The joins that were made so far."""
    return [digest for digest, one in world.checks.commits.items() if one.header.kind == JOIN]


@SEEDS
def test_s5_a_short_partition_settles_by_residuals_alone(seed: int) -> None:
    world = swarm(seed)
    world.split({peer_of(0), peer_of(1)}, {peer_of(2), peer_of(3)})
    world.run(world.now + 10.0)
    world.heal()
    assert goes_on(world)
    assert all(np.abs(sim.fragments[0].given_up).max() == 0.0 for sim in world.alive())


@SEEDS
def test_s6_a_long_partition_ends_in_one_lineage_that_lists_the_work_of_both(seed: int) -> None:
    world = swarm(seed, weather=Weather(jitter=0.4))
    world.split({peer_of(0), peer_of(1)}, {peer_of(2), peer_of(3)})
    world.run(world.now + 40.0)
    assert len(world.heads()) >= 2
    apart = {sim.peer: sim.fragments[0].core.head.digest for sim in world.alive()}
    world.heal()
    assert goes_on(world, 30.0)
    assert all(np.abs(sim.fragments[0].given_up).max() == 0.0 for sim in world.alive())
    listed = world.checks.listed[world.heads().pop()]
    for digest in apart.values():
        assert {key for key, clip in world.checks.listed[digest].items() if clip} <= set(listed)


@pytest.mark.parametrize("seed", [3, 5])  # some others keep the first join
def test_a_join_that_loses_to_a_sibling_is_made_again(seed: int) -> None:
    # who was alone for long is no member any more, so that its work in a join outweighs nothing
    world = swarm(seed)
    alone = peer_of(3)
    world.split({alone}, {peer_of(n) for n in range(3)})
    world.run(world.now + 44.0)
    world.heal()
    until(world, lambda: joins(world) != [], 5.0)
    (first,) = joins(world)
    until(world, lambda: core(world, alone).core.head.digest == first, 5.0)
    home = PeerId(world.checks.commits[first].header.home)
    world.split({alone, home}, {peer_of(n) for n in range(3)} - {home})
    world.run(world.now + 12.0)
    assert len(world.heads()) >= 2
    world.heal()
    assert goes_on(world, 30.0)
    assert core(world, alone).given_up.max() == 0.0
    listed = world.checks.listed[world.heads().pop()]
    made = [seq for peer, _, seq in world.checks.vectors if peer == alone]
    assert sum((alone, seq) in listed for seq in made) >= len(made) - 3  # the rest is under way


@SEEDS
@pytest.mark.parametrize("left", [1, 2])
def test_peers_that_each_went_on_alone_find_one_head_again(seed: int, left: int) -> None:
    # nobody vouches for a lone head, and each needed the other's word: stood still for ever
    world = swarm(seed, peers=left + 1)
    one = {peer_of(n) for n in range(left)}
    world.split(one, {peer_of(left)})
    world.run(world.now + 20.0)
    world.heal()
    assert agree(world)
    assert goes_on(world)


@SEEDS
def test_s7_a_newcomer_that_some_do_not_know_yet_makes_no_second_home(seed: int) -> None:
    world = swarm(seed)
    world.add(9)
    merges = len(world.merged_at[0])
    known = {sim.fragments[0].core.view.current_home() for sim in world.alive()}
    assert peer_of(9) not in known - {core(world, peer_of(9)).core.view.current_home()}
    world.run(world.now + 12.0)
    heads = world.alive()[0].fragments[0].core.view.lineage.nodes.values()
    parents = [node.parent for node in heads if node.version > merges]
    assert len(parents) == len(set(parents))  # no siblings
    assert goes_on(world)


@SEEDS
def test_s8_a_home_that_lives_and_never_commits_is_passed_over(seed: int) -> None:
    world = swarm(seed, peers=5)
    idle = home_of(world)
    original = world._do

    def do(sim: SimPeer, p: int, action: ev.Action) -> None:
        if not (sim.peer == idle and isinstance(action, ev.Merge)):
            original(sim, p, action)

    world._do = do  # type: ignore[method-assign]
    version = world.alive()[0].fragments[0].core.head.version
    world.run(world.now + 60.0)
    assert min(sim.fragments[0].core.head.version for sim in world.alive()) >= version + 8


@SEEDS
def test_s9_a_peer_that_comes_back_uses_no_number_twice(seed: int) -> None:
    world = swarm(seed, until=40.0)
    peer = peer_of(seed)
    listed = world.alive()[0].fragments[0].core.head.seqs[peer].seq
    world.kill(peer)
    world.run(world.now + 5.0)
    world.restart(peer)  # a number used twice is a violation
    world.run(world.now + 20.0)
    head = world.alive()[0].fragments[0].core.head
    assert head.seqs[peer].seq > listed


@SEEDS
def test_s10_a_late_retry_and_its_returned_self_are_not_both_listed(seed: int) -> None:
    weather = Weather(send_loss=0.6, latency_high_s=1.5)
    world = swarm(seed, weather=weather)
    world.run(60.0)
    assert len(world.merged_at[0]) >= 6


@SEEDS
def test_s11_a_home_that_slept_a_minute_changes_nothing_when_it_wakes(seed: int) -> None:
    world = swarm(seed)
    home = home_of(world)
    world.run(max(f.core.view.due_at for f in (core(world, home),)))
    world.freeze(home, 30.0)
    world.run(world.now + 29.0)
    chain = [
        n.digest
        for n in core(world, other_than(world, home)).core.view.lineage.ancestors(
            core(world, other_than(world, home)).core.head
        )
    ]
    world.run(world.now + 10.0)
    view = core(world, home).core.view
    now = {n.digest for n in view.lineage.ancestors(view.head)}
    assert set(chain) <= now
    assert goes_on(world)


def other_than(world: World, peer: PeerId) -> PeerId:
    return next(sim.peer for sim in world.alive() if sim.peer != peer)


@SEEDS
def test_s13_work_that_only_the_losing_sibling_listed_comes_back_to_its_maker(seed: int) -> None:
    world = swarm(seed, peers=5)
    left = {peer_of(0), peer_of(1), peer_of(2)}
    world.split(left, {peer_of(3), peer_of(4)})
    world.run(world.now + 6.0)
    world.heal()
    assert agree(world)
    lineage = world.checks.listed[world.alive()[0].fragments[0].core.head.digest]
    for sim in world.alive():
        for seq, kept in sim.fragments[0].worker.buffers.retained.items():
            assert (sim.peer, seq) not in lineage or kept.returned < 1.0


@SEEDS
def test_s15_a_slow_link_takes_part_without_the_newest_base(seed: int) -> None:
    world = swarm(seed)
    slow = peer_of(seed)

    def late(sim: SimPeer, p: int, action: ev.Obtain) -> None:
        delay = 2.0 if sim.peer == slow else 0.0
        world.later(delay, lambda: World._obtain(world, sim, p, action) if sim.alive else None)

    world._obtain = late  # type: ignore[method-assign]
    world.run(world.now + 50.0)
    head = world.alive()[0].fragments[0].core.head
    assert head.member(slow)
    assert head.seqs[slow].seq >= head.version // 2


@SEEDS
def test_s16_at_the_start_everybody_is_equal_and_the_first_may_die(seed: int) -> None:
    world = swarm(seed, until=3.0)
    world.kill(peer_of(0))
    assert goes_on(world, 30.0)


class DiskWorld(Bent):
    """Heads, tables and anchors are on the disk and a restarted peer stands where it stood."""

    def __init__(self, settings: WorldSettings) -> None:
        self.kept: dict[PeerId, tuple[fm.Checkpoint, bytes]] = {}
        super().__init__(settings)

    def _do(self, sim: SimPeer, p: int, action: ev.Action) -> None:
        super()._do(sim, p, action)
        if isinstance(action, ev.Adopt):
            point = sim.fragments[p].core.view.lineage.checkpoint(sim.fragments[p].core.head)
            assert point is not None
            self.kept[sim.peer] = (point, action.digest)

    def _fragment(self, sim: SimPeer, p: int) -> SimFragment:
        made = super()._fragment(sim, p)
        if sim.peer in self.kept:
            point, digest = self.kept[sim.peer]
            anchor = self.peers[sim.peer].fragments[p].worker.states[digest]
            made.core.resume(point, digest)
            made.worker = FragmentWorker.start(made.worker.rules, sim.peer, digest, anchor)
            made.theta, made.head = anchor.theta.copy(), digest
        return made


@SEEDS
def test_s18_after_everybody_stopped_two_disks_at_different_versions_go_on(seed: int) -> None:
    world = DiskWorld(WorldSettings(seed=seed))
    for number in range(4):
        world.add(number)
    world.gossip()
    world.run(30.0)
    world.kill(peer_of(0))  # its disk is some versions older
    world.run(45.0)
    for sim in world.alive():
        world.kill(sim.peer)
    world.run(100.0)
    versions = {n: core(world, peer_of(n)).core.head.version for n in (0, 1)}
    assert versions[0] < versions[1]
    for number in (0, 1):
        world.restart(peer_of(number))
    world.run(125.0)
    assert agree(world)
    assert world.alive()[0].fragments[0].core.head.version > versions[1]


@SEEDS
def test_s19_a_peer_that_lost_all_streams_at_once_rejoins_what_went_on(seed: int) -> None:
    world = swarm(seed)
    alone = peer_of(seed)
    world.split({alone}, {sim.peer for sim in world.alive() if sim.peer != alone})
    world.run(world.now + 12.0)
    world.heal()
    assert agree(world)
    others = core(world, other_than(world, alone)).core
    assert sum(row.peer != alone for row in others.head.members) == 3
    assert goes_on(world)


def test_a_header_from_the_future_is_not_followed_and_not_for_ever_refused() -> None:
    world = swarm(2)
    sim = world.alive()[0]
    view = sim.fragments[0].core.view
    head = view.head
    assert head.record is not None
    record = fm.CommitRecord(
        fm.sign_record(
            fm.Header(
                **{f: getattr(head.record.header, f) for f in head.record.header.__struct_fields__}
                | {
                    "time_ms": view.wall_ms + CLOCK_AHEAD_MS + 5_000,
                    "parent": head.digest,
                    "version": head.version + 1,
                }
            ),
            RUN,
            SimSigner(sim.peer),
        ),
        head.record.inputs,
    )
    world._tell(sim, 0, ev.CommitIn(peer_of(1), record))
    assert fm.header_digest(record.header, RUN) not in view.lineage.nodes
    assert fm.header_digest(record.header, RUN) not in sim.fragments[0].core.follower.bad
    assert goes_on(world)


@pytest.mark.slow
def test_a_newcomer_joins_a_run_whose_beginning_nobody_remembers() -> None:
    # the checkpoint's own commit stopped the reading of all that followed it
    world = Bent(WorldSettings(seed=1, interval_s=1.0, step_s=0.5, merge_floor_s=0.1))
    for number in range(2):
        world.add(number)
    world.gossip()
    while world.alive()[0].fragments[0].core.head.version < 150:
        world.run(world.now + 5.0)
    world.add(9)
    world.run(world.now + 10.0)
    head = core(world, peer_of(9)).core.head
    assert head.version >= 150
    assert peer_of(9) in head.seqs
