"""Who prepares which units, which blocks are agreed on, and who earned what: a core.

Preparers go ahead of the training, batch by batch. Each batch goes to REPLICAS of them, drawn by
hash: the blocks of a unit are used, and the tokens of a batch *confirmed*, where two preparers said
the same of it. Prepared tokens are a credit of their own kind, as this peer heard it; they have no
part in the board of training.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import framed
from dugnad.peer.preparedunits import BATCH_UNITS, Prepared, tokens_in, units_of
from dugnad.peer.unitplan import UnitPlan

REPLICAS: Final = 2
"""Preparers of each batch: the second one confirms the first."""
AHEAD_BATCHES: Final = 8
"""How far beyond what the swarm has begun is prepared: 256 units, minutes of training for it."""
OPEN_MAX: Final = 4 * AHEAD_BATCHES
"""Batches with open units of which is spoken, as many units as the largest window of work: the
oldest may wait for somebody long after the swarm has gone on (so it is not the oldest one from
which is counted), and others may be ahead of me."""
BEHIND_BATCHES: Final = 2 * AHEAD_BATCHES
"""Batches without open units, the newest ones, that are still spoken of: others may be behind me,
and units that were given up open again."""
BATCHES_MAX: Final = OPEN_MAX + BEHIND_BATCHES
"""Batches of which statements are kept."""
DONE_MAX: Final = 2048
"""Batches that are done with beside older ones that are not: what the table of units holds."""
UNPLACED_MAX: Final = 4 * BATCHES_MAX
"""And before I know where the swarm stands: while I join, others go on."""
PREPARERS_MAX: Final = 64
"""Statements of one batch that are kept: with all batches that can be open, 3 MB."""
PEERS_MAX: Final = 1024
"""Peers whose prepared tokens are told apart."""

_DRAW: Final = "prepared-draw/1"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the swarm stands: the first OPEN_MAX batches with open units, ascending, and whether
    anything of one is listed."""

    batches: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class Preparers:
    """Who prepares, among those that are there; I am among them if I do."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """I made the blocks of a batch; their hashes, in order."""

    batch: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Denied:
    """What a peer said of a batch is not so: my own text says otherwise."""

    peer: PeerId
    batch: int


Event = Standing | Preparers | Made | Denied


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a peer prepared: confirmed by another, not (yet) confirmed, and contradicted."""

    peer: bytes
    confirmed: int = 0
    pending: int = 0
    disputed: int = 0


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """What is kept on the disk: what was earned below a batch, and with others that are `done`.
    What was said of the rest is told again."""

    floor: int
    earned: tuple[Credit, ...]
    done: tuple[int, ...] = ()


class Preparation:
    """The prepared units of one run as one peer knows them. Bounded by the constants above."""

    def __init__(self, me: PeerId, run: RunId, plan: UnitPlan, context: int) -> None:
        self._me, self._run = me, run
        self._plan, self._context = plan, context
        self._open: dict[int, bool] = {}
        """Batches with open units, ascending, and whether one is begun; empty until it is known."""
        self._edge = 0
        """Of the batches without, those from here on are still spoken of."""
        self._preparers: tuple[PeerId, ...] = ()
        self._said: dict[int, dict[PeerId, tuple[bytes, ...]]] = {}
        self._false: set[tuple[int, PeerId]] = set()
        self._floor = 0
        self._done: set[int] = set()
        self._earned: dict[PeerId, Credit] = {}

    def handle(self, event: Event) -> list[Prepared]:
        """Take note of an event; returns what is to be signed and told to everybody."""
        match event:
            case Standing(batches):
                self._stand(dict(batches[:OPEN_MAX]))
            case Preparers(peers):
                self._preparers = peers
            case Made(batch, digests):
                said = Prepared(self._me, batch, digests)
                return [] if self.hear(said) else [said]
            case Denied(peer, batch):
                if peer in self._said.get(batch, {}):
                    self._false.add((batch, peer))
            case _:
                assert_never(event)
        return []

    def next_batch(self) -> int | None:
        """The oldest batch that is mine to prepare; None when there is none now."""
        if self._me not in self._preparers:
            return None
        ahead = 0
        for batch, begun in self._open.items():
            ahead += not begun
            if ahead > AHEAD_BATCHES:
                break
            if self._me in self._said.get(batch, {}) or self._rank(batch) >= REPLICAS:
                continue
            if len(self._agreeing(batch)) < REPLICAS:
                return batch
        return None

    def hear(self, said: Prepared) -> str:
        """Note a statement of anybody; why not, or ''."""
        batch = said.batch
        if self._over(batch):
            return f"batch {batch} is done with"
        if self._beyond(batch):
            return f"batch {batch} is not to be prepared yet"
        if not self._plan.has(*self._plan.unit(units_of(batch)[-1]), 1):
            return f"there is no batch {batch}"
        most = BATCHES_MAX if self._open else UNPLACED_MAX
        if batch not in self._said and len(self._said) >= most:
            return "too many batches"
        rows = self._said.setdefault(batch, {})
        if PeerId(said.peer) not in rows and len(rows) >= PREPARERS_MAX:
            return "too many preparers"
        rows.setdefault(PeerId(said.peer), said.digests)
        return ""

    def agreed(self, position: int) -> bytes | None:
        """The name of a unit's block, when two preparers say the same of its batch."""
        batch, at = divmod(position, BATCH_UNITS)
        peers = self._agreeing(batch)
        return self._said[batch][peers[0]][at] if len(peers) >= REPLICAS else None

    def makers(self, position: int) -> list[PeerId]:
        """Those who agree on a unit's block and can serve it."""
        return self._agreeing(position // BATCH_UNITS)

    def any_agreed(self) -> bool:
        """Whether there is any batch that two preparers agree on."""
        return any(len(self._agreeing(batch)) >= REPLICAS for batch in self._said)

    def position_of(self, name: bytes) -> int | None:
        """The unit that somebody says has a block of this name. May be asked in a thread."""
        for batch, rows in list(self._said.items()):
            for digests in list(rows.values()):
                if name in digests:
                    return batch * BATCH_UNITS + digests.index(name)
        return None

    def others(self) -> list[Prepared]:
        """What others said of batches that are not done with."""
        rows = [(batch, *one) for batch, said in self._said.items() for one in said.items()]
        return [Prepared(p, batch, digests) for batch, p, digests in rows if p != self._me]

    def own(self) -> list[Prepared]:
        """What I said of batches that are not done with: for a peer that has just come."""
        mine = [(one, rows[self._me]) for one, rows in self._said.items() if self._me in rows]
        return [Prepared(self._me, batch, digests) for batch, digests in sorted(mine)]

    def earned(self) -> list[Credit]:
        """Prepared tokens by peer, most confirmed first."""
        found = dict(self._earned)
        for batch in self._said:
            self._add(found, batch)
        return sorted(found.values(), key=lambda one: (-one.confirmed, -one.pending, one.peer))

    def memory(self) -> Memory:
        """For the disk."""
        return Memory(self._floor, tuple(self._earned.values()), tuple(sorted(self._done)))

    def restore(self, memory: Memory) -> None:
        """Go on from what was kept."""
        self._floor, self._done = memory.floor, set(memory.done[:DONE_MAX])
        self._earned = {PeerId(one.peer): one for one in memory.earned[:PEERS_MAX]}

    def _stand(self, open_now: dict[int, bool]) -> None:
        """What is far behind is done with; what is said of batches far ahead (before I knew where
        the swarm stands) is nothing."""
        if not open_now:
            return
        self._open, self._edge = open_now, _edge(open_now)
        self._floor = max(self._floor, min(self._edge, next(iter(open_now))))
        for batch in sorted(self._said):
            if over := self._over(batch):
                self._add(self._earned, batch)
                self._done.add(batch)
            if over or self._beyond(batch):
                self._false -= {(batch, peer) for peer in self._said.pop(batch)}
        self._done = set(sorted(one for one in self._done if one >= self._floor)[-DONE_MAX:])

    def _over(self, batch: int) -> bool:
        """Whether a batch is judged, or none of its units was open for long."""
        if batch < self._floor or batch in self._done:
            return True
        return batch < self._edge and batch not in self._open

    def _beyond(self, batch: int) -> bool:
        """Whether a batch is further ahead than anybody has to be."""
        return bool(self._open) and batch > next(reversed(self._open))

    def _agreeing(self, batch: int) -> list[PeerId]:
        """The largest group of peers that say the same of a batch, of equal ones the first; those
        that were denied are in none."""
        groups: dict[tuple[bytes, ...], list[PeerId]] = {}
        for peer, digests in sorted(self._said.get(batch, {}).items()):
            if self._stands(batch, peer):
                groups.setdefault(digests, []).append(peer)
        return max(groups.values(), key=len, default=[])

    def _rank(self, batch: int) -> int:
        """My place in the draw of preparers for a batch."""
        order = sorted(self._preparers, key=lambda peer: self._draw(batch, peer))
        return order.index(self._me)

    def _draw(self, batch: int, peer: PeerId) -> bytes:
        return hashlib.sha256(framed(_DRAW, self._run, batch.to_bytes(8, "big") + peer)).digest()

    def _add(self, earned: dict[PeerId, Credit], batch: int) -> None:
        """Judge what was said of a batch, each statement beside the others."""
        rows = self._said[batch]
        tokens = tokens_in(self._plan, units_of(batch), self._context)
        for peer, digests in rows.items():
            known = earned.get(peer)
            if known is None and len(earned) >= PEERS_MAX:
                continue
            others = [d for one, d in rows.items() if one != peer and self._stands(batch, one)]
            if not self._stands(batch, peer) or (others and digests not in others):
                kind = "disputed"
            else:
                kind = "confirmed" if others else "pending"
            known = known or Credit(peer)
            earned[peer] = msgspec.structs.replace(known, **{kind: getattr(known, kind) + tokens})

    def _stands(self, batch: int, peer: PeerId) -> bool:
        return (batch, peer) not in self._false


def _edge(open_now: Collection[int]) -> int:
    """From which batch on those that are not open are spoken of: BEHIND_BATCHES of them before the
    last open one."""
    batch, left = max(open_now), BEHIND_BATCHES
    while batch and left:
        batch -= 1
        left -= batch not in open_now
    return batch
