"""Whose machine a peer is: a bond between an owner's key and a peer's, signed by both.

The owner signs the peer's key, so nobody claims to be the machine of somebody who does not want it;
the peer signs the owner's key, so nobody takes another's machine or its credit. Either side alone
releases it again. A bond belongs to no run: it holds wherever the peer works. The newest bond of a
peer counts, by its number; equal sets of bonds give equal rows, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from dugnad.averaging.board import Owner
from dugnad.dht.ids import KEY_BYTES, PeerId
from dugnad.dht.plaintext import text_fault
from dugnad.dht.records import (
    NO_RUN,
    SIGNATURE_BYTES,
    Signer,
    Verifier,
    decode,
    encode,
    framed,
    verify_ed25519,
)

OWNER_NAME_CHARS_MAX: Final = 32
"""As long as the name of a peer."""
BOND_BYTES_MAX: Final = 512
"""An encoded bond: two keys, three signatures, a name in four-byte characters."""
NUMBER_MAX: Final = 1 << 62
_OWNS: Final = "owner/1"
_OWNED: Final = "owned/1"
_RELEASED: Final = "owner-released/1"

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]


class Bond(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="b"):
    """`peer` is a machine of `owner`, who goes by `name` ('' for three words from the key).

    `number` is the wall clock in milliseconds when the owner signed. Without `accepted` (the peer's
    signature) it is an offer; with `released` (of either side) it holds no more.
    """

    owner: _Key
    peer: _Key
    number: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    name: Annotated[str, msgspec.Meta(max_length=OWNER_NAME_CHARS_MAX)] = ""
    signature: _Signature = b""
    accepted: _Signature = b""
    released: _Signature = b""

    @property
    def order(self) -> tuple[int, bytes, bool, bytes]:
        """Which of two bonds of one peer counts: the greater."""
        return (self.number, self.owner, bool(self.released), encode(self))


def offer(owner: Signer, peer: PeerId, name: str, now_ms: int) -> Bond:
    """What the owner signs about a peer. ValueError for a name that nobody would read, or when the
    peer's key is the owner's: that is one row already.
    """
    if peer == owner.peer:
        raise ValueError("a key cannot own itself")
    if fault := text_fault(name, OWNER_NAME_CHARS_MAX):
        raise ValueError(f"the name {fault}")
    bare = Bond(bytes(owner.peer), bytes(peer), now_ms, name)
    return msgspec.structs.replace(bare, signature=owner.sign(_terms(_OWNS, bare)))


def accept(bond: Bond, peer: Signer) -> Bond:
    """The offer with the signature of the peer that it names. ValueError for another peer."""
    if peer.peer != bond.peer:
        raise ValueError("that offer is for another peer")
    return msgspec.structs.replace(bond, accepted=peer.sign(_terms(_OWNED, bond)))


def release(bond: Bond, side: Signer) -> Bond:
    """The bond given up by its owner or by its peer. ValueError for anybody else."""
    if side.peer not in (bond.owner, bond.peer):
        raise ValueError("only the owner and the machine itself can end a bond")
    return msgspec.structs.replace(bond, released=side.sign(_ended(bond)))


def bond_fault(bond: Bond, verifier: Verifier = verify_ed25519) -> str:
    """Why a bond says nothing about anybody, or ''."""
    if fault := offer_fault(bond, verifier):
        return fault
    peer, owner = PeerId(bond.peer), PeerId(bond.owner)
    if not verifier(peer, _terms(_OWNED, bond), bond.accepted):
        return "a bond that its machine has not accepted"
    ended = _ended(bond)
    if bond.released and not any(verifier(key, ended, bond.released) for key in (peer, owner)):
        return "a bond that somebody else wants to end"
    return ""


def offer_fault(bond: Bond, verifier: Verifier = verify_ed25519) -> str:
    """Why this is no owner's offer to a peer, or ''."""
    if bond.owner == bond.peer:
        return "a key that owns itself"
    if fault := text_fault(bond.name, OWNER_NAME_CHARS_MAX):
        return f"an owner's name that {fault}"
    if not verifier(PeerId(bond.owner), _terms(_OWNS, bond), bond.signature):
        return "a bond that its owner has not signed"
    return ""


def read_bond(data: bytes) -> Bond:
    """The bond in foreign bytes, well-formed, its signatures not judged; RecordError if none."""
    return decode(data, Bond, BOND_BYTES_MAX)


def owners_of(bonds: Iterable[Bond]) -> dict[PeerId, Owner]:
    """Whose machine each peer is, from the newest bond of each.

    A key that is somebody's machine owns nothing: so two keys that claim each other, or a ring of
    them, stay apart. An owner's name is that of its newest bond.
    """
    held = [bond for bond in bonds if not bond.released]
    owned = {bond.peer for bond in held}
    kept = [bond for bond in held if bond.owner not in owned]
    names: dict[bytes, tuple[int, bytes, str]] = {}
    for bond in kept:
        told = (bond.number, bond.peer, bond.name)
        names[bond.owner] = max(names.get(bond.owner, told), told)
    return {PeerId(bond.peer): Owner(PeerId(bond.owner), names[bond.owner][2]) for bond in kept}


def _terms(domain: str, bond: Bond) -> bytes:
    return framed(domain, NO_RUN, encode((bond.owner, bond.peer, bond.number, bond.name)))


def _ended(bond: Bond) -> bytes:
    return framed(_RELEASED, NO_RUN, encode((bond.owner, bond.peer, bond.number)))
