"""The exchange's shell: several averagers in one process, joined by a network of plain calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.credit import CreditFold, CreditRules
from dugnad.averaging.exchange import Exchange
from dugnad.averaging.fragments import Group
from dugnad.averaging.lineage import LineageRules
from dugnad.averaging.outer import bits_of
from dugnad.averaging.tree import Vector
from dugnad.averaging.view import ExchangeSettings
from dugnad.averaging.worker import Commit, FragmentRules, FragmentWorker, Kept, Progress
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.ports import TransportError
from dugnad.peer.averager import Averager
from dugnad.peer.exchangeports import LearnerAway, Ports
from dugnad.peer.pull import PullError
from dugnad.peer.store import Promise, StoreError

pytestmark = pytest.mark.slow

RUN = RunId(b"r" * 32)
SIZE = 40
others_fault: list[BaseException] = []
START = np.linspace(-1.0, 1.0, SIZE, dtype=np.float32)


@dataclass
class Learner:
    """A learner that makes progress whenever it is looked at."""

    theta: Vector = field(default_factory=START.copy)
    step: int = 0
    away: bool = False
    known: int = 0
    number: int = 0

    async def copy_out(self, fragment: int) -> tuple[Vector, int]:
        if self.away:
            raise LearnerAway
        self.step += 1
        self.theta = self.theta - np.float32(0.001)
        return self.theta.copy(), self.step

    async def add_in(self, fragment: int, delta: Vector) -> None:
        if self.away:
            raise LearnerAway
        self.theta = self.theta + delta

    def progress(self, fragment: int, seq: int, step: int) -> Progress | None:
        pieces = (fm.UnitPiece(self.number, self.step, 0, 1),)
        return Progress(8, 1, pieces, 20, True)

    def taken_back(self, fragment: int, seq: int) -> None:
        pass

    def settled(self, fragment: int, seq: int, share: float) -> None:
        self.known += 1

    def forgotten(self, fragment: int, seq: int) -> None:
        pass


class Records:
    """Promises in memory; ``full`` stands for a disk without room."""

    def __init__(self) -> None:
        self.promised: dict[bytes, bytes] = {}
        self.full = False

    def _room(self) -> None:
        if self.full:
            raise StoreError("disk_full", "no room on the disk", "free some")

    async def raise_seq(self, fragment: int, listed: int) -> None:
        self._room()

    async def promise_header(self, promise: Promise) -> bool:
        self._room()
        return self.promised.setdefault(promise.parent, promise.digest) == promise.digest


class Network:
    """Plain calls between the averagers of one test."""

    def __init__(self, me: PeerId, others: dict[PeerId, Averager]) -> None:
        self.me, self.others = me, others
        self.cut: set[PeerId] = set()
        """Peers that cannot be reached."""

    def send(self, peer: PeerId, message: fm.Message) -> None:
        if peer in self.others and peer not in self.cut:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.others[peer].message_in, self.me, message)

    async def push(
        self,
        peer: PeerId,
        contribution: fm.Contribution,
        pieces: tuple[fm.UnitPiece, ...],
        payload: bytes,
    ) -> str:
        if peer not in self.others or peer in self.cut:
            raise TransportError("nobody is there")
        return await self.others[peer].contribution_in(contribution, pieces, payload)

    async def payload(self, peers: Sequence[PeerId], header: fm.Header, size: int) -> Commit:
        digest = fm.header_digest(header, RUN)
        for peer in set(peers) - self.cut:
            commit = self.others[peer].commit(header.fragment, digest)
            if commit is not None:
                return commit
        raise PullError("nobody has it")

    async def anchors(
        self, peers: Sequence[PeerId], header: fm.Header, size: int
    ) -> tuple[Vector, Vector]:
        digest = fm.header_digest(header, RUN)
        for peer in set(peers) - self.cut:
            state = self.others[peer].anchor(header.fragment, digest)
            if state is not None:
                return state.theta.copy(), state.momentum.copy()
        raise PullError("nobody has it")


def make(identity: Identity, others: dict[PeerId, Averager], learner: Learner) -> Averager:
    """One averager with one fragment that is due every 0.2 s."""
    anchor = AnchorState.fresh(START)
    lineage = LineageRules(
        run=RUN,
        fragment=0,
        staleness=2,
        horizon=4,
        member_versions=8,
        merge_floor_ms=50,
        genesis_theta_root=anchor.theta_root,
        genesis_time_ms=0,
        sequence_tokens=8,
    )
    eta, mu = bits_of(1.0), bits_of(0.0)
    settings = ExchangeSettings(
        me=identity.peer, lineage=lineage, eta_bits=eta, mu_bits=mu, can_home=True, boot=1
    )
    core = Exchange(settings)
    rules = FragmentRules(
        run=RUN,
        fragment=0,
        groups=(Group(0, SIZE, "matrix"),),
        rule="mean",
        hand_in_codec="float32",
        commit_codec="float32",
        eta_bits=eta,
        mu_bits=mu,
    )
    worker = FragmentWorker.start(rules, identity.peer, core.head.digest, anchor)
    ports = Ports(
        run=RUN,
        signer=identity,
        learner=learner,
        network=Network(identity.peer, others),
        records=Records(),
        clock=time.monotonic,
        on_adopt=lambda p, action, header: None,
        on_note=lambda p, note: None,
        on_fault=others_fault.append,
    )
    averager = Averager(ports, [(core, worker)])
    others[identity.peer] = averager
    return averager


async def until(what: object, timeout_s: float = 8.0) -> None:
    """Wait until ``what()`` is true."""
    assert callable(what)
    async with asyncio.timeout(timeout_s):
        while not what():  # noqa: ASYNC110  # a state of several objects has no event
            await asyncio.sleep(0.02)


def begin(averagers: list[Averager]) -> None:
    """Everybody meets and is ready."""
    for one in averagers:
        one.start()
        offset = time.time() - time.monotonic()
        one.feed_all(ev.Pace(0.2, offset))
        one.feed_all(ev.LearnerState(True))
        for other in averagers:
            if other is not one:
                one.peer_up(other.ports.signer.peer, can_home=True)


def swarm(count: int) -> tuple[list[Averager], list[Learner]]:
    """Averagers that know each other, with their learners."""
    others: dict[PeerId, Averager] = {}
    learners = [Learner(number=n) for n in range(count)]
    made = [
        make(Identity.ephemeral(bytes([65 + n]) * 32), others, learners[n]) for n in range(count)
    ]
    return made, learners


def version(averager: Averager) -> int:
    return averager.fragments[0].core.head.version


async def test_three_averagers_merge_and_hold_the_same_bits() -> None:
    averagers, learners = swarm(3)
    begin(averagers)
    await until(lambda: all(version(a) >= 4 for a in averagers))
    await until(lambda: len({a.fragments[0].core.head.digest for a in averagers}) == 1)
    await until(lambda: len({a.anchors()[0].theta_root for a in averagers}) == 1)
    assert float(averagers[0].anchors()[0].theta.mean()) < float(START.mean()), "it learned"
    assert all(learner.known == 0 for learner in learners), "all was listed, nothing came back"
    for one in averagers:
        await one.close()


async def test_a_learner_that_is_away_stops_nobody() -> None:
    averagers, learners = swarm(3)
    learners[0].away = True
    begin(averagers)
    await until(lambda: all(version(a) >= 3 for a in averagers))
    for one in averagers:
        await one.close()


async def test_after_leaving_everything_is_in_other_hands() -> None:
    averagers, _ = swarm(2)
    begin(averagers)
    await until(lambda: all(version(a) >= 2 for a in averagers))
    averagers[0].feed_all(ev.LeaveNow())
    async with asyncio.timeout(5.0):
        await averagers[0].handed_over.wait()
    for one in averagers:
        await one.close()


async def test_the_last_one_to_leave_merges_its_own_work() -> None:
    averagers, _ = swarm(1)
    begin(averagers)
    await until(lambda: version(averagers[0]) >= 2)
    before = version(averagers[0])
    averagers[0].feed_all(ev.LeaveNow())
    async with asyncio.timeout(5.0):
        await averagers[0].handed_over.wait()
    assert version(averagers[0]) > before
    await averagers[0].close()


async def test_a_payload_with_other_numbers_than_its_root_is_refused() -> None:
    averagers, _ = swarm(2)
    begin(averagers)
    await until(lambda: all(version(a) >= 1 for a in averagers))
    inbox = averagers[0].fragments[0].worker.inbox
    kept = next(iter(inbox.values()))
    spoiled = bytes(len(kept.payload))
    reason = await averagers[1].contribution_in(kept.contribution, kept.pieces, spoiled)
    assert "root" in reason
    for one in averagers:
        await one.close()


async def test_a_full_disk_is_survived_and_merging_goes_on_when_there_is_room() -> None:
    averagers, learners = swarm(1)
    begin(averagers)
    records = averagers[0].ports.records
    assert isinstance(records, Records)
    await until(lambda: version(averagers[0]) >= 1)
    records.full = True
    await until(lambda: learners[0].known > 0)  # its work came back
    before = version(averagers[0])
    records.full = False
    await until(lambda: version(averagers[0]) > before + 1)
    assert not others_fault
    await averagers[0].close()


def split(left: list[Averager], right: list[Averager]) -> None:
    """Neither side reaches the other, and both notice."""
    for here, there in ((left, right), (right, left)):
        for one in here:
            assert isinstance(one.ports.network, Network)
            one.ports.network.cut |= {other.ports.signer.peer for other in there}
            for other in there:
                one.peer_down(other.ports.signer.peer)


def heal(averagers: list[Averager]) -> None:
    """Everybody meets again."""
    for one in averagers:
        assert isinstance(one.ports.network, Network)
        cut, one.ports.network.cut = one.ports.network.cut, set()
        for peer in sorted(cut):
            one.peer_up(peer, can_home=True)


def lineage_of(averager: Averager) -> list[tuple[bytes, fm.CommitRecord]]:
    core = averager.fragments[0].core
    chain = [*core.view.lineage.ancestors(core.head)][::-1]
    return [(node.digest, node.record) for node in chain if node.record is not None]


async def test_two_sides_that_were_apart_for_long_are_joined_and_both_are_credited_once() -> None:
    averagers, _ = swarm(3)
    begin(averagers)
    await until(lambda: all(version(a) >= 2 for a in averagers))
    split(averagers[:2], averagers[2:])
    fork = version(averagers[2])
    await until(lambda: all(version(a) >= fork + 9 for a in averagers))
    assert len({a.fragments[0].core.head.digest for a in averagers}) > 1
    alone = averagers[2].ports.signer.peer
    receipts = {
        key
        for _, record in lineage_of(averagers[2])
        if record.header.version > fork
        for one in record.inputs
        if (key := (one.contribution.peer, one.contribution.seq))[0] == alone
    }
    heal(averagers)
    await until(lambda: any(r.header.kind == "join" for _, r in lineage_of(averagers[2])))
    joined = max(version(a) for a in averagers)
    await until(lambda: all(version(a) >= joined + 2 for a in averagers))
    await until(lambda: len({a.fragments[0].core.head.digest for a in averagers}) == 1)
    boards = []
    for averager in averagers:
        lineage = lineage_of(averager)
        listed = [
            (one.contribution.peer, one.contribution.seq)
            for _, record in lineage
            for one in record.inputs
            if not one.refusal
        ]
        assert len(listed) == len(set(listed))
        assert receipts <= set(listed)
        fold = CreditFold(CreditRules(RUN, 1, 8, 64, 6400))
        fold.follow(0, lineage)
        boards.append(fold.board())
        assert boards[-1].tokens + boards[-1].provisional == 8 * len(listed)
    assert boards[0] == boards[1] == boards[2]
    assert not others_fault
    for one in averagers:
        await one.close()


async def test_a_lost_peers_draft_is_merged_in_its_makers_name() -> None:
    averagers, learners = swarm(3)
    begin(averagers)
    await until(lambda: all(version(a) >= 2 for a in averagers))
    victim, buddy, _ = averagers
    learners[0].step += 1000  # no other work names these units
    kept = await _drafted(victim)
    await victim.close()
    maker = victim.ports.signer.peer
    for one in (averagers[1], averagers[2]):
        one.peer_down(maker)

    def listed() -> bool:
        head, lineage = buddy.fragments[0].core.head, buddy.fragments[0].core.view.lineage
        return lineage.listing(head, (maker, kept.contribution.seq)) is not None

    assert not listed()
    home = buddy.fragments[0].core.view.current_home()
    to = next(a for a in averagers if a.ports.signer.peer == home)
    assert await to.contribution_in(kept.contribution, kept.pieces, kept.payload) == ""
    await until(listed)
    assert not others_fault
    for one in averagers[1:]:
        await one.close()


async def test_what_was_drafted_goes_with_the_contribution_and_only_one_of_both_counts() -> None:
    averagers, _ = swarm(2)
    begin(averagers)
    await until(lambda: all(version(a) >= 2 for a in averagers))
    maker, other = averagers
    kept = await _drafted(maker)
    assert await _drafted(maker) != kept, "a later draft holds more"
    key = (maker.ports.signer.peer, kept.contribution.seq)
    await until(lambda: key[1] in maker.fragments[0].core.contributor.own)
    final = maker.fragments[0].worker.inbox[key]
    assert final.contribution.payload_root != kept.contribution.payload_root
    inboxes = [one.fragments[0].worker.inbox for one in averagers]
    await until(lambda: key in inboxes[1] or _listing(other, key) is not None)
    await other.contribution_in(kept.contribution, kept.pieces, kept.payload)
    await until(lambda: _listing(maker, key) is not None)
    assert _listing(maker, key) == final.contribution.payload_root
    for one in averagers:
        await one.close()


async def test_without_a_learner_the_draft_is_handed_in() -> None:
    averagers, learners = swarm(1)
    (one,) = averagers
    begin(averagers)
    await until(lambda: version(one) >= 2)
    kept = await _drafted(one)
    learners[0].away = True
    key = (one.ports.signer.peer, kept.contribution.seq)
    await until(lambda: _listing(one, key) is not None)
    assert _listing(one, key) == kept.contribution.payload_root
    assert one.fragments[0].draft is None
    await one.close()


async def _drafted(one: Averager) -> Kept:
    """The next draft that can be made: not while a contribution is being made."""
    async with asyncio.timeout(8.0):
        while (kept := await one.draft(0, "float32")) is None:  # noqa: ASYNC110  # as in `until`
            await asyncio.sleep(0.01)
    return kept


def _listing(one: Averager, key: ev.Key) -> bytes | None:
    """The root of the payload that the head's chain lists for a contribution."""
    core = one.fragments[0].core
    found = core.view.lineage.listing(core.head, key)
    return found.contribution.payload_root if found is not None else None


async def test_while_it_is_still_no_fragment_moves_progress_and_then_all_goes_on() -> None:
    averagers, learners = swarm(2)
    begin(averagers)
    await until(lambda: all(version(a) >= 1 for a in averagers))
    one, shell = averagers[0], averagers[0].fragments[0]
    async with one.still():
        before = (shell.worker.buffers.ref, shell.worker.buffers.made, learners[0].step)
        await asyncio.sleep(0.6)  # three intervals
        assert shell.worker.buffers.ref is before[0]
        assert (shell.worker.buffers.made, learners[0].step) == before[1:]
    reached = version(averagers[1])
    await until(lambda: all(version(a) > reached for a in averagers))
    while not shell.learner_lane.queue.full():
        shell.learner_lane.queue.put_nowait(_nothing)
    with pytest.raises(asyncio.QueueFull):
        async with one.still():
            raise AssertionError("nothing is still")
    await until(shell.learner_lane.queue.empty)
    assert not others_fault
    for each in averagers:
        await each.close()


async def _nothing() -> None:
    """A job."""
