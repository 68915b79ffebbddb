"""A swarm on paper that trains, lies and examines: the cores of the challenge in virtual time."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from dugnad.averaging.board import Board, board_json
from dugnad.averaging.credit import CreditFold, CreditRules
from dugnad.averaging.examinee import Examinee
from dugnad.averaging.examiner import (
    Action,
    AnswerIn,
    Ask,
    Event,
    Examiner,
    Look,
    Recompute,
    Recomputed,
    Say,
    Subject,
)
from dugnad.averaging.formats import (
    NO_DIGEST,
    CommitRecord,
    Contribution,
    Header,
    Input,
    UnitPiece,
)
from dugnad.averaging.statements import StatementSet
from dugnad.averaging.trial import SLOT_MS, Answer, Challenge, Mark, TrialRules, tokens_of
from dugnad.averaging.verdicts import Verdict
from dugnad.dht.ids import PeerId, RunId, peer_text
from dugnad.dht.records import encode

RUN = RunId(hashlib.sha256(b"a run").digest())
CONTEXT, UNIT, FRAGMENTS = 128, 8, 2
RULES = CreditRules(RUN, FRAGMENTS, CONTEXT, UNIT, 1 << 20, 4)
TRIAL = TrialRules(RUN, 8, CONTEXT, 10_000)
START_MS = 1_800_000_000_000 // SLOT_MS * SLOT_MS
INTERVAL_S, LATENCY_S, LOOK_S = 10.0, 0.05, 5.0
NOISE = 0.03
"""Relative spread of a machine's speed from one stretch to the next."""


@dataclass
class Person:
    """One peer: how fast it is, how much faster it claims to be, and how it meets challenges."""

    number: int
    speed: float
    claims: float = 1.0
    manner: str = "honest"
    trained: float = 0.0
    carry: float = 0.0
    pending: list[list[UnitPiece]] = field(default_factory=lambda: [[] for _ in range(FRAGMENTS)])

    @property
    def peer(self) -> PeerId:
        return PeerId(hashlib.sha256(f"peer {self.number}".encode()).digest())


class World:
    """All peers, one lineage, and each peer's cores and statements."""

    def __init__(self, people: list[Person], seed: int) -> None:
        self.people = people
        self.rng = Random(seed)
        self.now = 0.0
        self.fold = CreditFold(RULES)
        self.tips = [b"" for _ in range(FRAGMENTS)]
        self.units = 0
        self.resting = False
        self.trials: list[float] = []
        self.said: list[Say] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.examiners = {
            one.peer: Examiner(one.peer, TRIAL, Random(seed * 100 + one.number)) for one in people
        }
        self.examinees = {one.peer: Examinee(one.peer, TRIAL) for one in people}
        self.sets = {
            one.peer: StatementSet(RUN, self.fold.lists, lambda *signed: True) for one in people
        }
        self.by_peer = {one.peer: one for one in people}
        self._every(INTERVAL_S, self._merge)
        for one in people:
            self._every(LOOK_S, lambda one=one: self._look(one))  # type: ignore[misc]

    # -- time --------------------------------------------------------------------------------------

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, what))

    def _every(self, seconds: float, what: Callable[[], None]) -> None:
        def again() -> None:
            what()
            self.later(seconds, again)

        self.later(seconds, again)

    def run(self, seconds: float) -> World:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until
        return self

    @property
    def wall_ms(self) -> int:
        return START_MS + int(self.now * 1000)

    # -- training ----------------------------------------------------------------------------------

    def _merge(self) -> None:
        """Everybody trained for an interval and hands in, to both fragments, what it says."""
        for one in self.people:
            speed = one.speed * self.rng.uniform(1 - NOISE, 1 + NOISE)
            one.trained += speed * INTERVAL_S
            one.carry += speed * INTERVAL_S * one.claims / (CONTEXT * UNIT)
            while one.carry >= 1.0:
                one.carry -= 1.0
                self.units += 1
                for pieces in one.pending:
                    pieces.append(UnitPiece(0, self.units, 0, UNIT))
        for p in range(FRAGMENTS):
            self._commit(p)

    def _commit(self, p: int) -> None:
        version = self.fold.tip(p)[0] + 1
        inputs = []
        for one in sorted(self.people, key=lambda person: person.peer):
            pieces, one.pending[p] = tuple(one.pending[p]), []
            made = Contribution(
                peer=one.peer,
                fragment=p,
                seq=version,
                base=version - 1,
                base_digest=NO_DIGEST,
                tokens=len(pieces) * UNIT * CONTEXT,
                steps=1,
                speed_class=10,
                eligible=True,
                codec="int8",
                payload_root=NO_DIGEST,
                payload_bytes=0,
                pieces_root=NO_DIGEST,
            )
            if pieces:
                inputs.append(Input(made, pieces, 1.0, (1.0,)))
        home = self.people[version % len(self.people)].peer
        header = _header(p, version, self.tips[p], home, self.wall_ms, len(inputs))
        self.tips[p] = hashlib.sha256(encode((p, version))).digest()
        self.fold.apply(CommitRecord(header, tuple(inputs)), self.tips[p])

    # -- examining ---------------------------------------------------------------------------------

    def mark(self) -> Mark:
        slot = self.wall_ms // SLOT_MS
        return Mark(hashlib.sha256(encode(slot)).digest(), slot, frozenset(self.by_peer))

    def settled(self) -> World:
        """The world once nobody is examined any more and all statements have arrived."""
        self.resting = True
        return self.run(200.0)

    def _look(self, one: Person) -> None:
        if self.resting:
            return
        subjects = [
            Subject(
                other.peer,
                other.speed * other.claims,
                len(self.sets[one.peer].verdicts(other.peer)),
                self.wall_ms,
            )
            for other in self.people
            if other is not one and self.fold.lists(other.peer)
        ]
        needed = max(1, min(3, len(self.people) - 1))
        self._do(one, Look(self.wall_ms, self.mark(), subjects, needed))

    def _do(self, one: Person, event: Event) -> None:
        for action in self.examiners[one.peer].handle(event, self.now):
            self._act(one, action)

    def _act(self, one: Person, action: Action) -> None:
        match action:
            case Ask(peer, challenge):
                asked = self.by_peer[peer]
                self.later(LATENCY_S, lambda: self._challenged(one, asked, challenge))
            case Recompute(challenge, _, chains):
                values = tuple(truth(challenge, chain) for chain in chains)
                self.later(1.0, lambda: self._do(one, Recomputed(values)))
            case Say():
                self.said.append(action)
                self._say(one, action)

    def _challenged(self, examiner: Person, one: Person, challenge: Challenge) -> None:
        core = self.examinees[one.peer]
        excuse = core.judge(examiner.peer, challenge, self.mark(), one.speed)
        if one.manner == "silent":
            if not excuse:
                core.done()
            return
        if excuse:
            answer = Answer(challenge.seed, excuse=excuse)
            self.later(LATENCY_S, lambda: self._do(examiner, AnswerIn(one.peer, answer)))
            return
        speed = one.speed * self.rng.uniform(1 - NOISE, 1 + NOISE)
        part = 0.5 if one.manner == "skips" else 1.0
        seconds = part * tokens_of(challenge, TRIAL) / speed
        self.trials.append(seconds)
        values = tuple(
            truth(challenge, chain) if chain < part * challenge.chains else (2.5, 1.0)
            for chain in range(challenge.chains)
        )

        def answered() -> None:
            core.done()
            self._do(examiner, AnswerIn(one.peer, Answer(challenge.seed, (), values)))

        self.later(seconds + LATENCY_S, answered)

    def _say(self, one: Person, say: Say) -> None:
        about = self.by_peer[say.peer]
        outcome, speed = say.outcome, say.speed
        if one.manner == "colludes":
            friend = about.manner == "colludes"
            outcome = "proven" if friend else "wrong"
            speed = 10 * round(1000 * about.speed * about.claims) if friend else 0
        verdict = Verdict(one.peer, about.peer, self.wall_ms, outcome, speed, b"s" * 64)
        for held in self.sets.values():
            delay = self.rng.uniform(0.0, 60.0)
            self.later(delay, lambda held=held: held.take(encode(verdict), self.wall_ms))  # type: ignore[misc]

    # -- looking at it -----------------------------------------------------------------------------

    def board(self) -> Board:
        """The board, which has to be the same bytes by everybody's statements."""
        boards = {board_json(self.fold.board(held.said())) for held in self.sets.values()}
        assert len(boards) == 1, "two peers print different boards"
        return self.fold.board(self.sets[self.people[0].peer].said())

    def error(self, board: Board) -> float:
        """Summed distance of all rows from what was trained, as a share of it."""
        rows = {row.peer: row.tokens + row.provisional for row in board.rows}
        wrong = sum(abs(rows.get(peer_text(one.peer), 0) - one.trained) for one in self.people)
        return wrong / sum(one.trained for one in self.people)


def truth(challenge: Challenge, chain: int) -> tuple[float, float]:
    """What a chain comes to: numbers that only its work gives."""
    seed = int.from_bytes(challenge.seed[:7], "big")
    rng = Random(seed * 100 + chain)
    return 2.0 + rng.random(), 0.5 + rng.random()


def _header(p: int, version: int, parent: bytes, home: PeerId, ms: int, inputs: int) -> Header:
    return Header(
        format=1,
        run=RUN,
        kind="merge",
        fragment=p,
        version=version,
        parent=parent,
        home=home,
        boot=1,
        time_ms=ms,
        members_root=NO_DIGEST,
        inputs_root=NO_DIGEST,
        inputs_count=inputs,
        tokens_total=0,
        eta_bits=0,
        mu_bits=0,
        codec="int8",
        payload_root=NO_DIGEST,
        payload_bytes=0,
        theta_root=NO_DIGEST,
        momentum_root=NO_DIGEST,
        seqs_root=NO_DIGEST,
    )
