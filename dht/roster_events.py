"""What goes into the roster and what comes out of it.

The shell feeds events and performs actions in order. `stream` is a number that the shell gives to
each control stream and never uses again: for a moment two streams with one peer may exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dugnad.dht.advert import Advert
from dugnad.dht.ids import PeerId
from dugnad.dht.messages import Message

# --- events


@dataclass(frozen=True, slots=True)
class StreamUp:
    """A control stream with `peer` is open; `outgoing` if we asked for it with `Dial`."""

    peer: PeerId
    stream: int
    outgoing: bool


@dataclass(frozen=True, slots=True)
class StreamDown:
    """A control stream ended. Not needed after our own `CloseStream`, but harmless."""

    peer: PeerId
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class MessageIn:
    """A message arrived, decoded by `messages.decode_message`."""

    peer: PeerId
    stream: int
    message: Message


@dataclass(frozen=True, slots=True)
class GarbageIn:
    """A frame could not be read: too long, or refused by `messages.decode_message`."""

    peer: PeerId
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class DialFailed:
    """The answer to a `Dial` that led to no stream; success is `StreamUp(outgoing=True)`."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Known:
    """Somewhere (a link, memory, the local network, the address book) a peer was named."""

    peer: PeerId
    addresses: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class MyAdvert:
    """What we say about ourselves changed; the roster stamps and signs it."""

    advert: Advert


@dataclass(frozen=True, slots=True)
class Bans:
    """These peers, and only these, are not served any more: peer -> the reason they are told."""

    reasons: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True)
class LeaveNow:
    """Say good-bye to everybody."""


@dataclass(frozen=True, slots=True)
class Timer:
    """The roster's deadline passed (or earlier: harmless). Carries the wall clock, which may be set
    by hand.
    """

    wall_ms: int


Event = (
    Bans
    | StreamUp
    | StreamDown
    | MessageIn
    | GarbageIn
    | DialFailed
    | Known
    | MyAdvert
    | LeaveNow
    | Timer
)

# --- actions


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a control stream; answer with `StreamUp` or `DialFailed` within `deadline_s`."""

    peer: PeerId
    addresses: tuple[str, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a stream; report `StreamDown` if it is gone or full beyond hope."""

    peer: PeerId
    stream: int
    message: Message


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Send what was queued (briefly), then close. The roster has forgotten the stream already."""

    peer: PeerId
    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The peer counts as live from now on (also after a restart of it: a PeerLost comes before)."""

    peer: PeerId
    advert: Advert


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer no longer counts as live."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """The peer said good-bye and no longer counts as live."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """A live peer's advert was replaced by a newer one."""

    peer: PeerId
    advert: Advert


@dataclass(frozen=True, slots=True)
class SelfSuspect:
    """All streams ended at once: the fault is probably ours. Restart the substrate, same key, same
    port.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class DuplicateIdentity:
    """Two daemons use one key at the same time. `peer` may be ourselves; `told_by` who says so, if
    not we.
    """

    peer: PeerId
    reason: str
    told_by: PeerId | None = None


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Add this to our wall clock to get the swarm's median; sent when it changed noticeably."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """We did not run for this long (stopped, asleep): drop duties, ask for heads first."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log; `kind` is a stable word, `peer` the one it is about."""

    kind: str
    text: str
    peer: PeerId | None = None


Action = (
    Dial
    | Send
    | CloseStream
    | PeerUp
    | PeerLost
    | PeerLeft
    | PeerChanged
    | SelfSuspect
    | DuplicateIdentity
    | ClockOffset
    | ClockJumped
    | Note
)
