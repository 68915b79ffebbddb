"""What the exchange core is told and what it asks for: plain data, both ways.

The shell performs actions in order. Work outside the core (handing in, merging, fetching, signing)
comes back as an event that names what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from dugnad.averaging.formats import (
    NO_DIGEST,
    Ack,
    Checkpoint,
    CommitRecord,
    Contribution,
    Header,
    HeadRow,
    Heads,
    Input,
    Message,
    UnitPiece,
)
from dugnad.dht.ids import PeerId

Key = tuple[bytes, int]
"""(peer, seq): with the fragment, the identity of a contribution."""


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer is live. ``can_home``: it may merge (a full peer that others can reach)."""

    peer: PeerId
    can_home: bool = True


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A peer is lost or has left."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Timer:
    """The core's deadline has come (spurious ones do no harm)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The merge interval in seconds, and how far the wall clock is ahead of ``now``."""

    interval_s: float
    wall_offset_s: float


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Whether there is a learner whose progress can be handed in."""

    ready: bool


@dataclass(frozen=True, slots=True)
class HandedIn:
    """Answers :class:`HandIn`: the signed contribution, or None when there was no progress."""

    seq: int
    contribution: Contribution | None
    pieces: tuple[UnitPiece, ...]


@dataclass(frozen=True, slots=True)
class SendDone:
    """Answers :class:`SendContribution`: '' when accepted, else why not."""

    seq: int
    to: PeerId
    refusal: str


@dataclass(frozen=True, slots=True)
class SendLost:
    """Answers :class:`SendContribution`: the stream failed; nobody knows whether it arrived."""

    seq: int
    to: PeerId


@dataclass(frozen=True, slots=True)
class SendMoves:
    """Of a :class:`SendContribution` under way more has arrived at its receiver just now."""

    seq: int
    to: PeerId


@dataclass(frozen=True, slots=True)
class ContributionIn:
    """Somebody's contribution has arrived in full, checked against its root and signature."""

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """Answers :class:`Merge` or :class:`Join`: what the commit will say; without inputs it failed.

    ``bad`` are inputs that cannot be used. A join names the ``other`` head and its share of it.
    """

    parent: bytes
    inputs: tuple[Input, ...]
    codec: str
    payload_root: bytes
    payload_bytes: int
    theta_root: bytes
    momentum_root: bytes
    bad: tuple[tuple[Key, str], ...] = ()
    other: bytes = NO_DIGEST
    alpha_bits: int = 0


@dataclass(frozen=True, slots=True)
class Signed:
    """Answers :class:`Sign`: the header with its signature, promised on disk before."""

    record: CommitRecord
    digest: bytes


@dataclass(frozen=True, slots=True)
class SignRefused:
    """Answers :class:`Sign`: another header on top of this parent was promised before."""

    parent: bytes


@dataclass(frozen=True, slots=True)
class SignFailed:
    """Answers :class:`Sign`: it could not be promised now (no room on the disk). Try later."""

    parent: bytes


@dataclass(frozen=True, slots=True)
class CommitIn:
    """A commit with valid signatures, from ``sender``."""

    sender: PeerId
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class CommitsIn:
    """An answer to :class:`WantCommits`, signatures valid; oldest first."""

    sender: PeerId
    records: tuple[CommitRecord, ...]
    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class AckIn:
    """A witness ack with a valid signature (one's own included)."""

    ack: Ack


@dataclass(frozen=True, slots=True)
class HeadIn:
    """A peer named a commit that it holds; with ``stands`` it is its head."""

    sender: PeerId
    row: HeadRow
    stands: bool = True


@dataclass(frozen=True, slots=True)
class CommitsWanted:
    """A peer asks for the chain that ends in ``digest``."""

    sender: PeerId
    digest: bytes
    known: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Obtained:
    """Answers :class:`Obtain`: the anchors after this commit are held and match its roots."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class ObtainFailed:
    """Answers :class:`Obtain`. ``lied``: complete and verified bytes give other roots. ``waited``:
    nobody was asked, since something else had its turn; now there may be a better one to ask for.
    """

    digest: bytes
    reason: str
    lied: bool = False
    waited: bool = False


@dataclass(frozen=True, slots=True)
class Ordered:
    """What the organiser says now (:mod:`dugnad.averaging.orders`), all of it."""

    stopped: bool
    banned: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class LeaveNow:
    """Hand in what there is to somebody else, take on no duty any more."""


Event = (
    PeerUp
    | PeerDown
    | Timer
    | Pace
    | LearnerState
    | HandedIn
    | SendDone
    | SendLost
    | SendMoves
    | ContributionIn
    | Merged
    | Signed
    | SignRefused
    | SignFailed
    | CommitIn
    | CommitsIn
    | AckIn
    | HeadIn
    | CommitsWanted
    | Obtained
    | ObtainFailed
    | Ordered
    | LeaveNow
)


# --- actions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandIn:
    """Copy the learner's fragment out and make contribution ``seq`` on this base."""

    seq: int
    base: int
    base_digest: bytes


@dataclass(frozen=True, slots=True)
class CancelSend:
    """End a :class:`SendContribution` that is under way: nobody needs it any more. Not answered."""

    seq: int
    to: PeerId


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Send own contribution ``seq`` with its payload."""

    seq: int
    to: PeerId


@dataclass(frozen=True, slots=True)
class Forward:
    """Send somebody else's contribution on: I am leaving, its maker may be gone already."""

    key: Key
    to: PeerId


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge these contributions, in this order, on top of ``parent``."""

    parent: bytes
    version: int
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Move the anchors after ``parent`` by a share of the way to those after ``other`` (rule 11).

    ``inputs`` are what the commit will list: nothing is merged of them anew.
    """

    parent: bytes
    other: bytes
    alpha_bits: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Sign:
    """Promise and sign this header (its signature is empty)."""

    header: Header
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Sign a witness ack for this commit, send it to everybody and hand it back as an event."""

    version: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message to one peer."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a control message to every live peer."""

    message: Message


@dataclass(frozen=True, slots=True)
class Obtain:
    """Get the anchors after ``header``: by its payload on top of the parent, or as whole state."""

    digest: bytes
    header: Header
    sources: tuple[PeerId, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """``share`` of contribution ``seq`` is back in the residual from now on (0 to 1)."""

    seq: int
    share: float


@dataclass(frozen=True, slots=True)
class Forget:
    """Contribution ``seq`` is settled for good; its payload is not needed any more."""

    seq: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """``digest`` is the head now: its anchors become the learner's base.

    ``undone`` (newest first) are the commits that the old head's lineage lists and the new one's
    does not; ``applied`` (oldest first) are those on the new head's chain since it left the old
    one's. With ``gap`` the chain between them is not known.
    """

    digest: bytes
    version: int
    undone: tuple[bytes, ...]
    applied: tuple[CommitRecord, ...]
    gap: bool


@dataclass(frozen=True, slots=True)
class DropPayload:
    """A foreign contribution is not needed any more."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class DropState:
    """The anchors after this commit are not needed any more."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person may want to know, in plain words."""

    kind: str
    text: str


Action = (
    HandIn
    | CancelSend
    | SendContribution
    | Forward
    | Merge
    | Join
    | Sign
    | Acknowledge
    | Send
    | Broadcast
    | Obtain
    | Settle
    | Forget
    | Adopt
    | DropPayload
    | DropState
    | Note
)


def heads_in(sender: PeerId, heads: Heads) -> list[HeadIn]:
    """The events of one message about heads: of each fragment the first row is where it stands."""
    seen: set[int] = set()
    found: list[HeadIn] = []
    for row in heads.rows:
        found.append(HeadIn(sender, row, row.fragment not in seen))
        seen.add(row.fragment)
    return found
