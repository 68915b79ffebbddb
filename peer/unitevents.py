"""What the core of work units is told, and what it says: plain data (see `units`)."""

from dataclasses import dataclass

from dugnad.averaging.formats import UnitPiece
from dugnad.dht.ids import PeerId
from dugnad.peer.unitplan import Unit


@dataclass(frozen=True, slots=True)
class Participants:
    """Who shares the work: (peer, speed class) of the members of the commit with this digest, and
    of newcomers in the live roster, who count at most as much as the fastest member."""

    commit: bytes
    members: tuple[tuple[PeerId, int], ...]
    newcomers: tuple[tuple[PeerId, int], ...] = ()

    def classes(self, limit: int) -> dict[PeerId, int]:
        """Who takes part with which class; of each kind at most `limit`."""
        found = dict(self.members[:limit])
        fastest = max(found.values(), default=None)
        for peer, speed_class in self.newcomers[:limit]:
            bounded = speed_class if fastest is None else min(speed_class, fastest)
            found.setdefault(peer, bounded)
        return found


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The roster lost a peer, or it `left` in order: then what it claimed last is handed in."""

    peer: PeerId
    left: bool = False


@dataclass(frozen=True, slots=True)
class PeerBack:
    """A peer called lost is there again."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class WasAway:
    """I came back, or am new, since `ago_s`: others may have begun what is mine among the open
    units, and leave it to me since then."""

    ago_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Covered:
    """The chosen lineage now lists these pieces, of this maker where it is known."""

    pieces: tuple[UnitPiece, ...]
    maker: PeerId | None = None


@dataclass(frozen=True, slots=True)
class Uncovered:
    """The chosen lineage no longer lists these pieces."""

    pieces: tuple[UnitPiece, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """State of the chosen lineage for a peer that does not have its history: all units of epochs
    below `epochs_done` are listed, and `pieces` besides."""

    epochs_done: int
    pieces: tuple[UnitPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Trained:
    """My learner has trained this piece."""

    piece: UnitPiece


@dataclass(frozen=True, slots=True)
class Returned:
    """A contribution of mine was not listed: its progress is back in my residual, so these pieces
    are still mine and still trained; they will be listed with a later contribution."""

    pieces: tuple[UnitPiece, ...]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """My learner died with these pieces given to it, or trained and not handed in: to be redone."""

    pieces: tuple[UnitPiece, ...]


@dataclass(frozen=True, slots=True)
class Claimed:
    """Another peer says that it took these units out of order."""

    peer: PeerId
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """The usual time between two merges, as learned."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SwarmSpeed:
    """Tokens that all participants together train in a second."""

    tokens_per_s: float


Event = (
    Participants
    | PeerLost
    | PeerBack
    | WasAway
    | Covered
    | Uncovered
    | Adopted
    | Trained
    | Returned
    | Abandoned
    | Claimed
    | Interval
    | SwarmSpeed
)


@dataclass(frozen=True, slots=True)
class Claim:
    """Tell the others that I take these units out of order."""

    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class TookOver:
    """These open units of a lost peer are mine now."""

    lost: PeerId
    units: tuple[Unit, ...]


Action = Claim | TookOver


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Sequences [start, stop) of unit (epoch, index), by their numbers in the data."""

    epoch: int
    index: int
    start: int
    stop: int
    sequences: tuple[int, ...]

    @property
    def piece(self) -> UnitPiece:
        """The same as a piece."""
        return UnitPiece(self.epoch, self.index, self.start, self.stop)


@dataclass(frozen=True, slots=True)
class OpenUnit:
    """One open unit as this peer sees it; counts are sequences.

    `holder` is to do it (None: nobody takes part), because it `claimed` it or by the draw.
    `in_hand` and `trained` are my learner's; `overdue_s` is below 0 before it is due.
    """

    epoch: int
    index: int
    sequences: int
    listed: int
    in_hand: int
    trained: int
    holder: PeerId | None
    claimed: bool
    tries: int
    overdue_s: float


@dataclass(frozen=True, slots=True)
class UnitsStatus:
    """Where the work stands. Units unless the name says sequences.

    `epoch` is that of the oldest open unit, and `epoch_progress` the share of its `epoch_sequences`
    that are listed. `open` are in the window and not listed in full, `mine` of them are for me;
    `claimed` of them are in my learner's hand or taken out of order by anybody. `trained` my
    learner has trained in whole or part and they are not listed. `claimed_sequences` are with my
    learner, `trained_sequences` trained by me and not listed; `twice_sequences` were trained by me
    though somebody else was listed for them. `given_up` this peer tried as often as the contract
    allows. `held` is what memory is kept for.
    """

    epoch: int
    epoch_progress: float
    epoch_sequences: int
    epoch_listed: int
    open: int
    mine: int
    claimed: int
    trained: int
    claimed_sequences: int
    trained_sequences: int
    covered_sequences: int
    twice_sequences: int
    given_up: int
    held: int
