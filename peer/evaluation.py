"""Who scores which held-out unit, what the scores say, and who earned what: a core.

Every ROUND_VERSIONS versions the agreed parameters are scored. Each unit goes to REPLICAS of the
evaluators, drawn by hash, so that every score has a second one beside it: tokens are *confirmed*
where another peer scored the same unit under the same parameters and found the same loss. That is a
credit of its own kind, as this peer heard it; it has no part in the board of training.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, assert_never

import msgspec

from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import framed
from dugnad.peer.scores import ROUND_VERSIONS, HeldOut, Score, basis_of

REPLICAS: Final = 2
"""Evaluators of each unit: the second one confirms the first."""
AGREE: Final = 0.005
"""Losses that differ by no more than this part are the same: float32 sums in another order differ
by a millionth, a made-up number by much more."""
ROUNDS_KEPT: Final = 32
"""Rounds whose scores are kept one by one: an hour at a round in two minutes."""
PEERS_MAX: Final = 1024
"""Peers whose evaluated tokens are told apart; of more, those who come later are not counted."""
POINTS_MAX: Final = 1024
"""Points of the curve that are kept, the newest."""
AHEAD_MAX: Final = 4 * ROUND_VERSIONS
"""Versions beyond what this peer has reached that others may have scored."""

_DRAW: Final = "score-draw/1"


@dataclass(frozen=True, slots=True)
class Reached:
    """A fragment's head is this version now; `total` tokens are merged below it."""

    fragment: int
    version: int
    digest: bytes
    total: int


@dataclass(frozen=True, slots=True)
class Evaluators:
    """Who evaluates, among those that are there; I am among them if I do."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """My learner's answer to a task."""

    task: "Task"
    loss: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A score whose signature holds."""

    score: Score


Event = Reached | Evaluators | Scored | Heard


@dataclass(frozen=True, slots=True)
class Task:
    """Score this unit under the parameters of a round."""

    version: int
    basis: bytes
    unit: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Hold on to the agreed parameters of a fragment after this commit, for a round."""

    version: int
    fragment: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of what was kept for rounds below this version."""

    below: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Sign this score and tell it to everybody."""

    score: Score


Action = Keep | Drop | Publish


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A round of the validation curve: mean loss in nats a token, when the run had merged `total`
    tokens, over so many units and evaluators."""

    version: int
    total: int
    loss: float
    units: int
    peers: int


class Evaluated(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a peer scored: confirmed by another, not (yet) confirmed, and contradicted."""

    peer: bytes
    confirmed: int = 0
    pending: int = 0
    disputed: int = 0


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What is kept on the disk: the curve, what was earned, and up to which version."""

    floor: int
    points: tuple[Point, ...]
    earned: tuple[Evaluated, ...]


class Evaluation:
    """The scores of one run as one peer knows them. Bounded by the constants above."""

    def __init__(self, me: PeerId, run: RunId, fragments: int, held: HeldOut) -> None:
        self._me, self._run = me, run
        self._fragments = fragments
        self.held = held
        self._evaluators: tuple[PeerId, ...] = ()
        self._reached: dict[int, dict[int, bytes]] = {}
        self._totals: dict[int, int] = {}
        self._newest = 0
        self._ready = 0
        self._given: set[int] = set()
        self._rounds: dict[int, dict[tuple[int, PeerId], Score]] = {}
        self._floor = 0
        self._points: tuple[Point, ...] = ()
        self._earned: dict[PeerId, Evaluated] = {}

    def handle(self, event: Event) -> list[Action]:
        """Take note of an event; returns what the shell is to do."""
        match event:
            case Reached():
                return self._reach(event)
            case Evaluators(peers):
                self._evaluators = peers
            case Scored(task, loss):
                return self._scored(task, loss)
            case Heard(score):
                self.hear(score)
            case _:
                assert_never(event)
        return []

    def next_task(self) -> Task | None:
        """What my learner is to score now, once; None when nothing of the newest round is mine."""
        if not self._ready or self._me not in self._evaluators:
            return None
        scored = Counter(unit for unit, _ in self._rounds.get(self._ready, {}))
        mine = [(self._rank(unit), unit) for unit in range(self.held.units)]
        for rank, unit in sorted(mine):
            if rank < REPLICAS and unit not in self._given and scored[unit] < REPLICAS:
                self._given.add(unit)
                return Task(self._ready, self._basis(self._ready), unit)
        return None

    def hear(self, score: Score) -> str:
        """Note a score of anybody; why not, or ''."""
        version, peer = score.version, PeerId(score.peer)
        if version % ROUND_VERSIONS or not self._floor < version <= self._newest + AHEAD_MAX:
            return f"there is no round {version} now"
        if score.unit >= self.held.units or score.tokens != self.held.tokens:
            return f"there is no held-out unit {score.unit} of {score.tokens} tokens"
        rows = self._rounds.setdefault(version, {})
        if len({one for _, one in rows} | {peer}) > PEERS_MAX:
            return "too many evaluators"
        rows.setdefault((score.unit, peer), score)
        while len(self._rounds) > ROUNDS_KEPT:
            self._fold(min(self._rounds))
        return ""

    def curve(self) -> tuple[Point, ...]:
        """The validation curve, oldest round first."""
        open_points = (point_of(v, rows.values()) for v, rows in sorted(self._rounds.items()))
        return (*self._points, *open_points)[-POINTS_MAX:]

    def earned(self) -> list[Evaluated]:
        """Evaluated tokens by peer, most confirmed first."""
        found = dict(self._earned)
        for rows in self._rounds.values():
            _add(found, rows.values())
        return sorted(found.values(), key=lambda one: (-one.confirmed, -one.pending, one.peer))

    def own(self, limit: int) -> list[Score]:
        """My newest scores, at most so many: for a peer that has just come."""
        mine = [s for rows in self._rounds.values() for s in rows.values() if s.peer == self._me]
        return sorted(mine, key=lambda score: (-score.version, score.unit))[:limit]

    def memory(self) -> Memory:
        """For the disk: all rounds as if they were done."""
        floor = max(self._rounds, default=self._floor)
        return Memory(floor, self.curve(), tuple(self.earned()))

    def restore(self, memory: Memory) -> None:
        """Go on from what was kept."""
        self._floor = memory.floor
        self._points = memory.points[-POINTS_MAX:]
        self._earned = {PeerId(one.peer): one for one in memory.earned[:PEERS_MAX]}

    def _reach(self, event: Reached) -> list[Action]:
        version = event.version
        if event.fragment == 0:
            self._newest = max(self._newest, version)
        if not version or version % ROUND_VERSIONS or version <= self._ready:
            return []
        row = self._reached.setdefault(version, {})
        row[event.fragment] = event.digest
        self._totals[version] = max(self._totals.get(version, 0), event.total)
        actions: list[Action] = []
        if self._me in self._evaluators:
            actions.append(Keep(version, event.fragment, event.digest))
        if len(row) == self._fragments and self._me in self._evaluators:
            self._ready = version
            self._given.clear()
            for old in [one for one in self._reached if one < version]:
                del self._reached[old], self._totals[old]
            actions.append(Drop(version))
        while len(self._reached) > ROUNDS_KEPT:
            oldest = min(self._reached)
            del self._reached[oldest], self._totals[oldest]
        return actions

    def _scored(self, task: Task, loss: float) -> list[Action]:
        if task.version != self._ready:
            return []
        tokens, total = self.held.tokens, self._totals[task.version]
        score = Score(self._me, task.version, task.basis, task.unit, loss * tokens, tokens, total)
        return [] if self.hear(score) else [Publish(score)]

    def _basis(self, version: int) -> bytes:
        row = self._reached[version]
        return basis_of([row[fragment] for fragment in range(self._fragments)], self._run)

    def _rank(self, unit: int) -> int:
        """My place in the draw of evaluators for a unit of the newest round."""
        order = sorted(self._evaluators, key=lambda peer: self._draw(unit, peer))
        return order.index(self._me)

    def _draw(self, unit: int, peer: PeerId) -> bytes:
        body = self._ready.to_bytes(8, "big") + unit.to_bytes(8, "big") + peer
        return hashlib.sha256(framed(_DRAW, self._run, body)).digest()

    def _fold(self, version: int) -> None:
        """Put a round among what is done."""
        rows = self._rounds.pop(version)
        self._points = (*self._points, point_of(version, rows.values()))[-POINTS_MAX:]
        _add(self._earned, rows.values())
        self._floor = max(self._floor, version)


def point_of(version: int, scores: Iterable[Score]) -> Point:
    """What a round says. Of several sets of parameters under one version (a fork) that one counts
    which most scores are of; of several scores of a unit, their median."""
    rows = list(scores)
    bases = Counter(score.basis for score in rows)
    basis = min(bases, key=lambda one: (-bases[one], one))
    units: dict[int, list[float]] = defaultdict(list)
    for score in rows:
        if score.basis == basis:
            units[score.unit].append(score.per_token)
    chosen = [score for score in rows if score.basis == basis]
    return Point(
        version=version,
        total=round(median(score.total for score in chosen)),
        loss=sum(median(losses) for losses in units.values()) / len(units),
        units=len(units),
        peers=len({score.peer for score in chosen}),
    )


def _add(earned: dict[PeerId, Evaluated], scores: Iterable[Score]) -> None:
    """Judge the scores of one round, each beside those of the same unit and parameters."""
    same: dict[tuple[bytes, int], list[Score]] = defaultdict(list)
    for score in scores:
        same[score.basis, score.unit].append(score)
    for rows in same.values():
        for score in rows:
            peer = PeerId(score.peer)
            known = earned.get(peer)
            if known is None and len(earned) >= PEERS_MAX:
                continue
            earned[peer] = _with(known or Evaluated(score.peer), score, rows)


def _with(known: Evaluated, score: Score, rows: Sequence[Score]) -> Evaluated:
    others = [one for one in rows if one.peer != score.peer]
    agreeing = [one for one in others if _agree(one.per_token, score.per_token)]
    kind = "confirmed" if agreeing else "disputed" if others else "pending"
    return msgspec.structs.replace(known, **{kind: getattr(known, kind) + score.tokens})


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= AGREE * max(one, other)
