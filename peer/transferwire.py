"""What daemons say when they move bulk data, how long they wait for it, and every bound on it.

Two protocols, each on streams of its own so that nothing large delays a control message:

* CONTRIBUTE: an `Offer` frame and the payload's bytes; the answer is one frame of text, empty when
  the contribution was taken. Where the offer wants it, frames of progress come before. On a stream
  with a connection of its own the next offer may follow a contribution that was taken.
* PULL: any number of requests, one frame each, answered in order by a `NotHere` frame or by a
  `Here` frame and that many bytes. A request may be sent before the last one is answered. Where the
  answer wants it, `Got` frames tell of progress meanwhile. A `Rest` frame ends a transfer on a
  stream with a connection of its own; the next one may follow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from dugnad.averaging.formats import (
    COMMITS_PER_REPLY_MAX,
    DIGEST_BYTES,
    FRAGMENTS_MAX,
    MESSAGE_BYTES_MAX,
    Contribution,
    UnitPiece,
)
from dugnad.averaging.reconcile import RANGES_MAX, Range
from dugnad.averaging.room import Room as Room
from dugnad.averaging.statements import STATEMENT_BYTES_MAX
from dugnad.averaging.tree import LEAVES_MAX, Bytes, leaf_hash
from dugnad.dht.ids import PeerId
from dugnad.peer.corpus import SHARDS_MAX
from dugnad.peer.pacedstream import PacedStream as PacedStream
from dugnad.peer.pacedstream import Stalled as Stalled
from dugnad.peer.pacedstream import Traffic as Traffic

T = TypeVar("T")

BUDDY_PROTOCOL: Final = "/dugnad/buddy/1"
"""Like CONTRIBUTE, for drafts that are kept and not merged."""
CONTRIBUTE_PROTOCOL: Final = "/dugnad/contribute/1"
PULL_PROTOCOL: Final = "/dugnad/pull/1"

# --- waiting ----------------------------------------------------------------------------------

IDLE_S: Final = 10.0
"""A step must move within this time. Longer than the worst pause of a busy home machine."""
PATIENCE_S: Final = 2.0
"""As IDLE_S, once another donor has nothing to do but wait: a frozen peer should not cost ten
seconds when its part can come from elsewhere. Guess, to be measured."""
OPEN_S: Final = 5.0
"""To open a stream to a peer: two round trips, or a dial through a relay."""
# --- sizes ------------------------------------------------------------------------------------

OFFER_BYTES_MAX: Final = 256 << 10
"""A contribution with PIECES_MAX unit pieces of at most 37 bytes."""
REQUEST_BYTES_MAX: Final = 2048
"""Sixty-four ranges of at most 20 bytes."""
SUMMARIES_BYTES_MAX: Final = 128 << 10
"""Sixty-four summaries with full lists have 75 KB."""
ANSWER_BYTES_MAX: Final = 1024
REASON_CHARS_MAX: Final = 200
HEADS_BYTES_MAX: Final = 64 * FRAGMENTS_MAX
"""A head is at most 48 bytes."""
PIECES_BYTES_MAX: Final = 1 << 20
"""Bytes of leaves in one answer: four leaves of float32, sixteen of int8."""
STATEMENTS_MAX: Final = 56
"""Names of statements in one request, of 34 bytes each."""
STATEMENTS_BYTES_MAX: Final = STATEMENTS_MAX * (STATEMENT_BYTES_MAX + 4) + 4
COMMITS_BYTES_MAX: Final = MESSAGE_BYTES_MAX
COMMITS_MAX: Final = 2 * COMMITS_PER_REPLY_MAX
INLINE_BYTES: Final = 256 << 10
"""Up to this much is hashed on the event loop (under 1 ms), more in a thread."""

# --- how much at once -------------------------------------------------------------------------
# What foreign peers can make this daemon hold: CONTRIBUTIONS_MAX payloads that are on their way,
# SENDING_BYTES_MAX, and READS_AT_ONCE answers that are being put together. What we pull ourselves
# is held once, in the arrays that were asked for.

CONTRIBUTIONS_PER_PEER_MAX: Final = 4
"""More of the same peer wait, unread, until one of these is done."""
CONTRIBUTIONS_MAX: Final = 64
"""Payloads being received: everybody of a full mesh at once. Their senders want an answer, so they
are kept as the exchange's inbox anyway."""
PULLS_PER_DONOR_MAX: Final = 4
"""Streams that we draw from one donor with; further transfers wait."""
PULLS_PER_PEER_MAX: Final = 2 * PULLS_PER_DONOR_MAX
"""Streams that one peer may draw from us with: twice what it should, since the end of one may
reach us after the beginning of the next."""
PULLS_MAX: Final = 128
SENDING_PER_PEER_BYTES_MAX: Final = 8 << 20
SENDING_BYTES_MAX: Final = 64 << 20
"""Bytes of answers being sent. Those of anchors and payloads are views, but hold the arrays."""
REQUESTS_HELD_MAX: Final = 8
"""Requests that were read while an answer is on its way, four times what our own pulls send ahead;
more wait in the socket."""
READS_AT_ONCE: Final = 2
"""Threads that read the disk for others: the pool is shared with hashing and merging."""
DONORS_AT_ONCE: Final = 4
"""Donors that one transfer draws from: enough to fill a home line from slower ones."""
REQUESTS_AHEAD: Final = 2
"""Requests under way at one donor, so that a round trip costs no time between answers."""

# --- messages ---------------------------------------------------------------------------------

Kind = Literal["payload", "theta", "momentum"]
"""What leaves are of: a commit's payload, or the anchors or momenta after it."""

_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Fragment = Annotated[int, msgspec.Meta(ge=0, lt=FRAGMENTS_MAX)]
_Leaf = Annotated[int, msgspec.Meta(ge=0, lt=LEAVES_MAX)]
_Leaves = Annotated[int, msgspec.Meta(ge=1, le=LEAVES_MAX)]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A contribution whose payload follows."""

    contribution: Contribution
    pieces: tuple[UnitPiece, ...]
    tells: bool = False
    """Its sender wants to hear how much has arrived. Older releases pass over what they do not
    know at the end of a record."""
    each: Annotated[int, msgspec.Meta(ge=0)] = 0
    """And that after so many bytes each."""


class GetManifest(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """Ask for the encoded manifest of a run."""

    run: _Digest


class GetLeaves(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Ask for all leaf hashes, one after the other."""

    kind: Kind
    fragment: _Fragment
    digest: _Digest


class GetPieces(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Ask for the bytes of `count` leaves; float32 little-endian for anchors and momenta."""

    kind: Kind
    fragment: _Fragment
    digest: _Digest
    first: _Leaf
    count: _Leaves
    tells: bool = False
    """Whoever asks says with `Got` how much has arrived, if the answer wants to hear it."""
    last: bool = False
    """The transfer is over with the answer, as after a `Rest`."""


class GetShard(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Ask for a shard of the text."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]


class GetCommits(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Ask for a commit and its ancestors, newest first: `count` or as many as fit an answer."""

    fragment: _Fragment
    digest: _Digest
    count: Annotated[int, msgspec.Meta(ge=1, le=COMMITS_MAX)]


class GetHeads(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Ask for the heads of all fragments, as `HeadRow`s ascending by fragment."""


class GetSummaries(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Ask what is held in these ranges of the digests of a fragment's commits since a time."""

    fragment: _Fragment
    since_ms: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    ranges: Annotated[tuple[Range, ...], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]


class GetStatementSummaries(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Ask what is held in these ranges of the names of statements (`averaging.statements`)."""

    ranges: Annotated[tuple[Range, ...], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]


class GetStatements(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Ask for the statements of these names; those that are held come in one list."""

    names: Annotated[tuple[_Digest, ...], msgspec.Meta(min_length=1, max_length=STATEMENTS_MAX)]


class GetBlock(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """Ask for the tokens of a prepared unit by the block's SHA-256 (`preparedunits`)."""

    name: _Digest


class GetNews(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Ask who is here and how the run stands, as `dugnad.peer.newswire.News`: for observers."""


class Got(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """No question: so many bytes of pieces have arrived on this stream. Nothing is answered."""

    total: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Rest(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """No question: a transfer is over, and another may follow on this stream. Older releases end
    the stream at this, which is as well."""


Request = (
    GetManifest
    | GetLeaves
    | GetPieces
    | GetShard
    | GetCommits
    | GetHeads
    | GetSummaries
    | GetStatementSummaries
    | GetStatements
    | GetNews
    | GetBlock
    | Got
    | Rest
)


class Here(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """`size` bytes follow."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    each: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Whoever sends them wants to hear with `Got` how much has arrived, after so many bytes each;
    0: it does not."""


class NotHere(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Nothing follows, and why."""

    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


Answer = Here | NotHere


# --- trouble ----------------------------------------------------------------------------------


class Refusal(Exception):
    """A request or a contribution is turned down; `reason` may be sent to whoever asked."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = plain(reason)


class Blame(NamedTuple):
    """A donor that was dropped and why; `lied`: what it sent contradicts the hashes."""

    peer: PeerId
    reason: str
    lied: bool


class PullError(Exception):
    """No donor served what was asked for; `blame` says what became of each that was tried."""

    def __init__(self, reason: str, blame: tuple[Blame, ...] = ()) -> None:
        super().__init__(reason)
        self.reason, self.blame = reason, blame


class OthersTurn(PullError):
    """Nobody was asked: another transfer had its turn on the line, which is over now."""


def plain(text: str) -> str:
    """Text, perhaps foreign, that is safe to log and to send: printable and short."""
    return "".join(c if c.isprintable() else "?" for c in text[:REASON_CHARS_MAX])


# --- tools ------------------------------------------------------------------------------------


class Slots:
    """A number of places for each peer; who finds none free waits."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._places: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, peer: PeerId) -> asyncio.Semaphore:
        """The peer's places, forgotten when nobody uses or awaits them."""
        places = self._places.get(peer)
        if places is None:
            self._places[peer] = places = asyncio.Semaphore(self._each)
        return places


class Gate:
    """How much is under way, for each peer and in all; says no beyond the bounds."""

    def __init__(self, what: str, *, each: int, total: int) -> None:
        self._what, self._each, self._total = what, each, total
        self._held: Counter[PeerId] = Counter()

    @contextlib.contextmanager
    def hold(self, peer: PeerId, amount: int = 1) -> Iterator[None]:
        """Counts `amount` while in use; Refusal when it is too much now."""
        if self._held[peer] + amount > self._each:
            raise Refusal(f"busy: too many {self._what} with you at once")
        if self._held.total() + amount > self._total:
            raise Refusal(f"busy: too many {self._what} with all peers at once")
        self._held[peer] += amount
        try:
            yield
        finally:
            self._held[peer] -= amount
            if not self._held[peer]:
                del self._held[peer]


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` returns, computed in a thread when it goes over more than INLINE_BYTES."""
    return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)


def byte_bounds(size: int, leaf_bytes: int) -> list[tuple[int, int]]:
    """Ranges of the leaves in `size` bytes: all but the last have `leaf_bytes`."""
    return [(at, min(at + leaf_bytes, size)) for at in range(0, size, leaf_bytes)]


def first_bad_leaf(data: Bytes, leaf_bytes: int, hashes: tuple[bytes, ...]) -> int | None:
    """Index of the first leaf of `data` that has another hash; `data` has as many as `hashes`."""
    view = memoryview(data)
    bounds = byte_bounds(len(view), leaf_bytes)
    for index, ((start, stop), expected) in enumerate(zip(bounds, hashes, strict=True)):
        if leaf_hash(view[start:stop]) != expected:
            return index
    return None
