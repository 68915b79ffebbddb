"""An in-memory swarm under a virtual clock: the daemon's exchange cores on a seeded, bad network.

Everything that happens is an entry in one heap of (time, number, what). Every peer, link and fault
draws from a generator of its own, derived from the seed, so that adding a peer does not shift the
others. After every event the checkers look at the peer concerned; a violation raises with the
seed and the story of that peer. Learning is played by integer-made steps, exact in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.exchange import Exchange
from dugnad.averaging.fragments import Group
from dugnad.averaging.outer import bits_of
from dugnad.averaging.speed import speed_class
from dugnad.averaging.tree import array_root
from dugnad.averaging.view import ExchangeSettings
from dugnad.averaging.worker import FragmentRules, FragmentWorker, WorkError
from dugnad.dht.ids import PeerId
from dugnad.peer.progress import ProgressLog
from dugnad.simulation.carrier import Carrier
from dugnad.simulation.checks import Checks, Violation
from dugnad.simulation.linkchoice import AUTO, RICHEST
from dugnad.simulation.network import message_events
from dugnad.simulation.people import Disk, SimFragment, SimPeer, SimSigner, peer_of, play_step, seal
from dugnad.simulation.settings import RUN, SEQUENCE_TOKENS, WALL_START_S, Weather, WorldSettings
from dugnad.simulation.story import told

__all__ = [
    "RUN",
    "SEQUENCE_TOKENS",
    "WALL_START_S",
    "Disk",
    "SimFragment",
    "SimPeer",
    "SimSigner",
    "Violation",
    "Weather",
    "World",
    "WorldSettings",
    "message_events",
    "peer_of",
    "seal",
]


class World(Carrier):
    """The swarm, its network and its clock."""

    def __init__(self, settings: WorldSettings) -> None:
        super().__init__(settings)
        self.trace = hashlib.sha256()
        self.checks = Checks(settings.size, settings.horizon)
        self.genesis = [self._genesis(p) for p in range(settings.fragments)]
        self.events = 0
        self.outbound: set[int] = set()  # numbers of peers that cannot be home
        self.merged_at: list[list[float]] = [[] for _ in range(settings.fragments)]

    # -- making peers --------------------------------------------------------------------------

    def _genesis(self, fragment: int) -> AnchorState:
        rng = self.rng("genesis", fragment)
        values = [rng.randint(-128, 128) / 128.0 for _ in range(self.settings.size)]
        return AnchorState.fresh(np.array(values, np.float32))

    def add(self, number: int, *, step_s: float | None = None, disk: Disk | None = None) -> SimPeer:
        """Start peer ``number`` at version 0; peers find each other after a moment."""
        peer = peer_of(number)
        disk = disk or Disk()
        born = self.peers[peer].born + 1 if peer in self.peers else 0
        sim = SimPeer(
            number,
            peer,
            self.rng("peer", number, born),
            disk,
            [],
            ProgressLog(self.settings.fragments, SEQUENCE_TOKENS),
            step_s=step_s or self.settings.step_s,
        )
        sim.born = born
        sim.fragments = [self._fragment(sim, p) for p in range(self.settings.fragments)]
        self.peers[peer] = sim
        for p in range(self.settings.fragments):
            self._tell(sim, p, ev.Pace(self.settings.interval_s, WALL_START_S))
            self._tell(sim, p, ev.LearnerState(True))
        for other in list(self.peers.values()):
            if other is not sim and other.alive:
                self._meet(sim, other)
        self._schedule_step(sim)
        return sim

    def _fragment(self, sim: SimPeer, p: int) -> SimFragment:
        s = self.settings
        anchor = self.genesis[p]
        eta, mu = bits_of(s.eta), bits_of(s.mu)
        core = Exchange(
            ExchangeSettings(
                me=sim.peer,
                lineage=s.lineage(p, array_root(anchor.theta)),
                eta_bits=eta,
                mu_bits=mu,
                can_home=sim.number not in self.outbound,
                boot=sim.born,
                first_seq=sim.disk.seqs.get(p, 0) + 1,
                phase=p / s.fragments,
            )
        )
        core.view.promised.update(
            {parent: d for (frag, parent), d in sim.disk.headers.items() if frag == p}
        )
        half = s.size // 2
        rules = FragmentRules(
            run=RUN,
            fragment=p,
            groups=(Group(0, half, "matrix"), Group(half, s.size, "embedding")),
            rule=s.rule,
            hand_in_codec=s.codec if s.codec != AUTO else RICHEST,
            commit_codec=s.commit_codec or ("int8" if s.codec != "float32" else "float32"),
            eta_bits=eta,
            mu_bits=mu,
            leanest_commit="int4",
        )
        worker = FragmentWorker.start(rules, sim.peer, core.head.digest, anchor)
        zeros = [np.zeros(s.size, np.float64) for _ in range(3)]
        return SimFragment(
            core=core,
            worker=worker,
            theta=anchor.theta.copy(),
            progress=zeros[0],
            rounding=zeros[1],
            given_up=zeros[2],
            head=core.head.digest,
        )

    def _meet(self, a: SimPeer, b: SimPeer) -> None:
        for one, two in ((a, b), (b, a)):
            if self.net.is_cut(one.peer, two.peer):
                continue
            delay = self.net.link(one.peer, two.peer).uniform(0.0, 0.5)
            self.later(delay, self._up(one, two))

    def _up(self, sim: SimPeer, other: SimPeer) -> Callable[[], None]:
        born = (sim.born, other.born)

        def up() -> None:
            if (sim.born, other.born) == born and sim.alive and other.alive:
                sim.live.add(other.peer)
                for p in range(self.settings.fragments):
                    self._tell(sim, p, ev.PeerUp(other.peer, other.number not in self.outbound))

        return up

    def kill(self, peer: PeerId) -> None:
        """Kill -9: the others learn of it by end-of-stream, each a moment later."""
        sim = self.peers[peer]
        sim.alive = False
        sim.story.append((self.now, "killed", None))
        self._died(sim)

    def _died(self, sim: SimPeer) -> None:
        """The others notice."""
        peer = sim.peer
        for other in self.peers.values():
            if other.alive and peer in other.live:
                self._lose(other, peer)

    def _lose(self, sim: SimPeer, peer: PeerId) -> None:
        born = sim.born
        delay = self.net.noticed(peer, sim.peer)

        def down() -> None:
            gone = self.net.is_cut(sim.peer, peer) or not self.peers[peer].alive
            if sim.born == born and sim.alive and gone:
                sim.live.discard(peer)
                for p in range(self.settings.fragments):
                    self._tell(sim, p, ev.PeerDown(peer))

        self.later(delay, down)

    def restart(self, peer: PeerId) -> SimPeer:
        """Start a killed peer again with its disk (promises); its learner begins anew."""
        old = self.peers[peer]
        return self.add(old.number, step_s=old.step_s, disk=old.disk)

    def split(self, left: set[PeerId], right: set[PeerId]) -> None:
        """Cut every link between two sets of peers."""
        for a, b in self.net.cut(left, right):
            for one, two in ((a, b), (b, a)):
                if self.peers[one].alive and two in self.peers[one].live:
                    self._lose(self.peers[one], two)

    def heal(self) -> None:
        """Mend every cut link; the peers meet again."""
        for a, b in self.net.mend():
            if self.peers[a].alive and self.peers[b].alive:
                self._meet(self.peers[a], self.peers[b])

    def freeze(self, peer: PeerId, seconds: float) -> None:
        """A stopped machine (SIGSTOP, a closed lid): it does nothing and hears later."""
        sim = self.peers[peer]
        sim.frozen_until = max(sim.frozen_until, self.now + seconds)

    # -- time ----------------------------------------------------------------------------------

    def _tell(self, sim: SimPeer, p: int, event: ev.Event) -> None:
        """Feed a core and carry out what it asks for; later when the peer is frozen."""
        if not sim.alive:
            return
        born = sim.born
        if self.now < sim.frozen_until:
            late = 1e-6
            if sim.asleep_since is not None and isinstance(event, ev.Timer):
                late += self.now - sim.asleep_since  # what it had still to wait
            self.later(
                sim.frozen_until - self.now + late,
                lambda: self._tell(sim, p, event) if sim.born == born else None,
            )
            return
        sim.asleep_since = None
        fragment = sim.fragments[p]
        self.events += 1
        fragment.events += 1
        if not isinstance(event, ev.Timer):
            sim.story.append((self.now, f"[{p}] <-", event))
        self.trace.update(f"{self.now:.6f} {sim.number} {p} {type(event).__name__}\n".encode())
        for action in fragment.core.handle(event, self.now):
            self._do(sim, p, action)
        try:
            self.checks.after(sim, p)
        except Violation as violation:
            raise Violation(
                f"{violation}\nseed {self.settings.seed}, story:\n{told(sim.number, sim.story)}"
            ) from None
        self._arm(sim, p)

    def _arm(self, sim: SimPeer, p: int) -> None:
        fragment, born = sim.fragments[p], sim.born
        deadline = fragment.core.deadline
        fragment.timer += 1
        number = fragment.timer
        if deadline is None:
            return

        def fire() -> None:
            if sim.born == born and sim.alive and fragment.timer == number:
                self._tell(sim, p, ev.Timer())

        self.later(max(0.0, deadline - self.now), fire)

    # -- the learner ---------------------------------------------------------------------------

    def _schedule_step(self, sim: SimPeer) -> None:
        born = sim.born

        def step() -> None:
            if sim.born != born or not sim.alive:
                return
            if self.now >= sim.frozen_until:
                self._step(sim)
            self.later(sim.step_s * sim.rng.uniform(0.9, 1.1), step)

        self.later(sim.step_s * sim.rng.uniform(0.5, 1.5), step)

    def _step(self, sim: SimPeer) -> None:
        piece = self._piece(sim)
        if piece is not None:
            sim.step += 1
            self._learn(sim)
            sim.log.trained(sim.step, (piece,))

    def _piece(self, sim: SimPeer) -> fm.UnitPiece | None:
        """What the next step trains on: here a sequence that nobody else has."""
        return fm.UnitPiece(sim.born, sim.number * 1_000_000 + sim.step + 1, 0, 1)

    def _learn(self, sim: SimPeer) -> None:
        """One played step: the numeric mode trains here."""
        play_step(sim, self.settings.size)

    # -- actions -------------------------------------------------------------------------------

    def _do(self, sim: SimPeer, p: int, action: ev.Action) -> None:
        if not isinstance(action, ev.Send | ev.Broadcast):
            sim.story.append((self.now, f"[{p}] ->", action))
        fragment = sim.fragments[p]
        match action:
            case ev.HandIn():
                self._hand_in(sim, p, action)
            case ev.SendContribution(seq, to):
                self._send_contribution(sim, p, seq, to)
            case ev.CancelSend(seq, to):
                self._cancel_send(sim, p, seq, to)
            case ev.Merge():
                self._answer(sim, p, fragment.worker.merge(action, self.commit_codec(sim, p)))
            case ev.Join():
                self._answer(sim, p, fragment.worker.join(action))
            case ev.Sign(header, inputs):
                self._sign(sim, p, header, inputs)
            case ev.Acknowledge(version, digest):
                ack = fm.sign_record(fm.Ack(sim.peer, p, version, digest), RUN, SimSigner(sim.peer))
                self._answer(sim, p, ev.AckIn(ack))
                self._broadcast(sim, fm.Witness(ack), p)
            case ev.Send(to, message):
                self._send(sim, to, message, p)
            case ev.Broadcast(message):
                self._broadcast(sim, message, p)
            case ev.Obtain():
                self._obtain(sim, p, action)
            case ev.Settle(seq, share):
                fragment.worker.settle(seq, share)
                self.give_back(sim, p, seq, share)
            case ev.Forget(seq):
                self.checks.forgotten(sim, p, seq)
                sim.log.forget(p, seq)
                fragment.worker.forget(seq)
            case ev.Adopt(digest, version, undone, applied, _):
                names = [fm.header_digest(one.header, RUN) for one in applied]
                before = fragment.worker.buffers.residual.astype(np.float64)
                delta = fragment.worker.adopt(digest, undone, names)
                fragment.rounding += fragment.worker.buffers.residual - before
                fragment.theta = fragment.theta + delta
                self.checks.adopted(sim, p, fragment.head, action)
                fragment.head = digest
            case ev.DropPayload(key, _):
                fragment.worker.drop_payload(key)
            case ev.DropState(digest):
                fragment.worker.drop_state(digest)
            case ev.Forward(key, to):
                self._forward(sim, p, key, to)

    def commit_codec(self, sim: SimPeer, p: int) -> str:
        """The codec of a merge that a home is about to make; '' is the run's usual one."""
        return ""

    def _answer(self, sim: SimPeer, p: int, event: ev.Event) -> None:
        born = sim.born
        delay = sim.rng.uniform(0.0, self.settings.weather.job_high_s)
        self.later(delay, lambda: self._tell(sim, p, event) if sim.born == born else None)

    def give_back(self, sim: SimPeer, p: int, seq: int, share: float) -> tuple[fm.UnitPiece, ...]:
        """What became of a contribution's work: the pieces that came back now."""
        return sim.log.settled(p, seq, share)

    def _hand_in(self, sim: SimPeer, p: int, action: ev.HandIn) -> None:
        fragment = sim.fragments[p]
        own_class = speed_class(SEQUENCE_TOKENS / sim.step_s, None)
        eligible = sim.number not in self.outbound
        progress = sim.log.take(p, action.seq, sim.step, speed_class=own_class, eligible=eligible)
        if progress is None:
            self._answer(sim, p, ev.HandedIn(action.seq, None, ()))
            return
        sim.disk.seqs[p] = action.seq
        made = fragment.worker.hand_in(action, fragment.theta, progress)
        signed = fm.sign_record(made, RUN, SimSigner(sim.peer))
        fragment.worker.signed_own(signed)
        self.checks.handed_in(sim, p, signed, fragment.worker)
        self._answer(sim, p, ev.HandedIn(action.seq, signed, progress.pieces))

    def _sign(self, sim: SimPeer, p: int, header: fm.Header, inputs: tuple[fm.Input, ...]) -> None:
        digest = fm.header_digest(header, RUN)
        promised = sim.disk.headers.setdefault((p, header.parent), digest)
        if promised != digest:
            self._answer(sim, p, ev.SignRefused(header.parent))
            return
        signed = fm.sign_record(header, RUN, SimSigner(sim.peer))
        record = fm.CommitRecord(signed, inputs)
        try:
            sim.fragments[p].worker.sealed(digest, signed)
        except WorkError:
            self._answer(sim, p, ev.SignRefused(header.parent))
            return
        self.checks.committed(record, digest)
        self.merged_at[p].append(self.now)
        self._answer(sim, p, ev.Signed(record, digest))

    # -- looking at it -------------------------------------------------------------------------

    def alive(self) -> list[SimPeer]:
        """Live peers, by number."""
        return sorted((s for s in self.peers.values() if s.alive), key=lambda s: s.number)

    def gossip(self) -> None:
        """Anti-entropy: every live peer tells one other its heads (the shell's slow timer)."""
        for sim in self.alive():
            if near := self.near(sim):
                to = near[sim.rng.randrange(len(near))]
                for p, fragment in enumerate(sim.fragments):
                    self._send(sim, to, fragment.core.follower.heads(reply=True), p)
        self.later(3.0, self.gossip)

    def heads(self, p: int = 0) -> set[bytes]:
        """Digests of the live peers' heads of a fragment."""
        return {sim.fragments[p].core.head.digest for sim in self.alive()}

    def digest(self) -> str:
        """The trace's digest so far: equal seeds give equal digests."""
        return self.trace.hexdigest()
