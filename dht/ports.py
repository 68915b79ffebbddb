"""The ports through which everything above reaches other peers: streams and the address book.

Two implementations: `dugnad.dht.substrate` (libp2p through hivemind) and `dugnad.dht.memory` (its
in-memory twin). One contract suite runs over both.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from dugnad.dht.ids import PeerId, peer_text

# A data stream may hold at most this many unsent bytes: all streams of a pair of peers share one
# connection, and a heartbeat waits behind whatever is already queued (64 KiB = 50 ms at 10 Mbit/s).
UNSENT_BYTES_MAX = 64 * 1024

# A pair of peers keeps a control stream and a few transfers; each costs a descriptor on both sides.
STREAMS_PER_PEER_MAX = 32


class TransportError(Exception):
    """Something between two peers failed: expected trouble, never a reason to stop."""


class DialError(TransportError):
    """A peer could not be reached or refused the protocol; says why for each address tried."""

    def __init__(self, peer: PeerId, reasons: Sequence[tuple[str, str]]) -> None:
        self.peer = peer
        self.reasons = tuple(reasons)
        story = "; ".join(
            f"{address}: {reason}" if address else reason for address, reason in reasons
        )
        super().__init__(f"cannot reach {peer_text(peer)}: {story or 'no address is known'}")


class StreamEnded(TransportError):
    """The stream ended, by the other side or the connection, before the work was done."""


class Stream(Protocol):
    """A reliable two-way flow of bytes to one authenticated peer.

    One task reads and one task writes at a time. `close` or `abort` must be called in any case,
    after StreamEnded too; both may be called again, and after each other. Closing ends both
    directions: there is no half-closed stream, so whoever expects an answer reads it before
    closing.
    """

    @property
    def peer(self) -> PeerId:
        """The peer at the other end, proved by the connection's handshake."""
        ...

    async def read(self, n: int) -> bytes:
        """Exactly `n` bytes, or StreamEnded."""
        ...

    async def read_into(self, target: memoryview) -> None:
        """Fills `target` (contiguous) completely, without a copy in between, or StreamEnded."""
        ...

    async def write(self, data: bytes | memoryview) -> None:
        """Sends `data`; waits while over `UNSENT_BYTES_MAX` is unsent. StreamEnded if it cannot."""
        ...

    async def close(self) -> None:
        """Sends what is unsent, then the end of the stream. Does not raise if that has come."""
        ...

    def abort(self) -> None:
        """Gives the stream up at once; whatever is unsent is lost."""
        ...


@runtime_checkable
class Acknowledged(Protocol):
    """A stream whose machine knows what the other machine has: one with a connection of its own."""

    def unsent(self) -> int:
        """Bytes written that the other machine has not acknowledged yet."""
        ...


@runtime_checkable
class Lasting(Protocol):
    """A stream with a connection of its own, which can carry one transfer after the other."""

    step: int
    """Bytes that moved quickly at once in an earlier transfer, for the next one; 0: there was
    none. The stream itself does not look at it."""

    @property
    def used(self) -> bool:
        """Whether the side that opened it has had a transfer on it: it may have died since."""
        ...

    def at_hand(self, n: int) -> bytes | None:
        """Exactly `n` bytes if they have been received already, without waiting for anything."""
        ...

    def rest(self) -> None:
        """Instead of `abort`, by the side that opened it, when a transfer is over at both ends and
        the other one waits for the next: `Transport.open` may give the stream out again."""
        ...


Handler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream: when it returns the stream is closed, when it raises, aborted."""


class Transport(Protocol):
    """Streams to and from other peers."""

    @property
    def peer(self) -> PeerId:
        """Who we are."""
        ...

    async def dial(self, peer: PeerId, addresses: Sequence[str], timeout_s: float) -> None:
        """Connects to `peer` at the first address that works; DialError with each one's reason."""
        ...

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        """Opens a stream to a connected or known peer; DialError with the reason."""
        ...

    async def accept(self, protocol: str, handler: Handler) -> None:
        """From now on serves incoming streams of `protocol` with `handler`, one task each."""
        ...

    async def addresses(self) -> list[str]:
        """Multiaddrs with `/p2p/<id>` at which other machines may reach us, best first."""
        ...

    async def close(self) -> None:
        """Ends all streams and stops. Idempotent."""
        ...


class AddressBook(Protocol):
    """The swarm's shared table of small values, one for each key and peer."""

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Stores our value under `key`, signed, beside other peers' values; False if nobody did."""
        ...

    async def get(self, key: str) -> dict[PeerId, bytes]:
        """What is stored under `key`, by the peer who stored it (proved); empty if unknown."""
        ...
