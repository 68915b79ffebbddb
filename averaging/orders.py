"""The organiser's word about a run: that it is stopped, and who is banned, with reasons.

One record replaces another by its number, which only rises; all of it is signed by the key that
signed the manifest. Peers pass it on and obey it. It never judges what was made: peers hear of it
at different times, and whoever heard later must not hold another lineage. Homes make no more
commits after a stop; commits that were made are followed, those of banned homes too.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from dugnad.dht.ids import KEY_BYTES, PeerId, RunId
from dugnad.dht.plaintext import text_fault
from dugnad.dht.records import (
    SIGNATURE_BYTES,
    RecordError,
    Signer,
    Verifier,
    decode,
    encode,
    framed,
    verify_ed25519,
)

BANS_MAX: Final = 64
"""Peers banned at once: everybody of a full mesh. Older bans have to be lifted first."""
REASON_CHARS_MAX: Final = 120
"""Of a stop or a ban: one line."""
ORDERS_BYTES_MAX: Final = 256 + (BANS_MAX + 1) * (KEY_BYTES + 8 + 4 * REASON_CHARS_MAX)
"""An encoded record with every reason in four-byte characters."""
NUMBER_MAX: Final = 1 << 62
NEWER_HELD: Final = "newer orders of the organiser are held"
SAME_HELD: Final = "these orders are held already"
"""Two of the answers of `judge`, which are no faults of whoever told."""
_DOMAIN: Final = "orders/1"

_Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Ban(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer that takes no part any more, and why."""

    peer: _Key
    reason: _Reason


class Orders(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that the organiser has said so far. `stop` is the reason, '' while the run goes on;
    `bans` ascend by peer; `number` 0 stands for "nothing was ever said" and is never signed.
    """

    number: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)] = 0
    stop: _Reason = ""
    bans: Annotated[tuple[Ban, ...], msgspec.Meta(max_length=BANS_MAX)] = ()
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    def ban_of(self, peer: bytes) -> str | None:
        """Why a peer is banned; None when it is not."""
        return next((ban.reason for ban in self.bans if ban.peer == peer), None)


NOTHING: Final = Orders()
"""What a run begins with."""


class OrderError(ValueError):
    """Something that cannot be ordered; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def stopped(before: Orders, reason: str, now_ms: int) -> Orders:
    """The unsigned record that stops the run as well. OrderError for a reason that is none."""
    return _after(before, now_ms, stop=_checked(reason))


def banned(before: Orders, peer: PeerId, reason: str, now_ms: int) -> Orders:
    """The unsigned record that bans a peer as well, or gives another reason for its ban."""
    others = [ban for ban in before.bans if ban.peer != peer]
    if len(others) >= BANS_MAX:
        raise OrderError(f"{BANS_MAX} peers are banned already; lift a ban first")
    bans = sorted([*others, Ban(bytes(peer), _checked(reason))], key=lambda ban: ban.peer)
    return _after(before, now_ms, bans=tuple(bans))


def unbanned(before: Orders, peer: PeerId, now_ms: int) -> Orders:
    """The unsigned record without the ban of a peer. OrderError when it is not banned."""
    if before.ban_of(peer) is None:
        raise OrderError("that peer is not banned")
    return _after(before, now_ms, bans=tuple(ban for ban in before.bans if ban.peer != peer))


def _after(before: Orders, now_ms: int, **changes: object) -> Orders:
    """The wall clock as number, so that a key restored from a backup does not fall behind."""
    number = max(before.number + 1, now_ms)
    return msgspec.structs.replace(before, number=number, signature=b"", **changes)


def _checked(reason: str) -> str:
    text = " ".join(reason.split())
    if not text:
        raise OrderError("a reason is needed: everybody reads it")
    if fault := text_fault(text, REASON_CHARS_MAX):
        raise OrderError(f"the reason {fault}")
    return text


def sign_orders(orders: Orders, run: RunId, signer: Signer) -> Orders:
    """The record with the organiser's signature."""
    return msgspec.structs.replace(orders, signature=signer.sign(_signed_bytes(orders, run)))


def _signed_bytes(orders: Orders, run: RunId) -> bytes:
    return framed(_DOMAIN, run, encode(msgspec.structs.replace(orders, signature=b"")))


def read_orders(
    data: bytes, run: RunId, organiser: PeerId, verifier: Verifier = verify_ed25519
) -> Orders:
    """The record in foreign bytes, well-formed and signed; RecordError with the reason if not."""
    orders = decode(data, Orders, ORDERS_BYTES_MAX)
    peers = [ban.peer for ban in orders.bans]
    if not orders.number:
        raise RecordError("orders without a number")
    if peers != sorted(set(peers)):
        raise RecordError("orders whose bans are not in order")
    for text in (orders.stop, *(ban.reason for ban in orders.bans)):
        if fault := text_fault(text, REASON_CHARS_MAX):
            raise RecordError(f"a reason of the organiser {fault}")
    if any(not ban.reason for ban in orders.bans):
        raise RecordError("a ban without a reason")
    if not verifier(organiser, _signed_bytes(orders, run), orders.signature):
        raise RecordError("the orders are not signed by the organiser of this run")
    return orders


def judge(held: Orders, new: Orders) -> str:
    """Why orders that were read do not replace those that are held, or ''."""
    if new.number < held.number:
        return NEWER_HELD
    if new.number == held.number:
        return SAME_HELD if new == held else "two orders with one number"
    return ""
