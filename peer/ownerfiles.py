"""Owners in a data folder: an owner's key and what it signed, and whose machine this peer is.

The owner's key is made on one machine and need not be on the others: it signs an offer to a peer,
a line of text that is carried to that machine and accepted there.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

import msgspec

from dugnad.averaging.owners import (
    BOND_BYTES_MAX,
    Bond,
    accept,
    bond_fault,
    offer,
    offer_fault,
    read_bond,
    release,
)
from dugnad.dht.identity import Identity, IdentityError
from dugnad.dht.ids import PeerId, peer_text
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home, disk_error, read_bounded, write_private
from dugnad.peer.starting import identity_error

MACHINES_MAX: Final = 1024
"""Machines of one owner: a university's computer rooms."""
OFFER_PREFIX: Final = "dugnad-owner:"
_OFFER_CHARS_MAX: Final = len(OFFER_PREFIX) + 4 * BOND_BYTES_MAX // 3 + 4
_OWNED_BYTES_MAX: Final = MACHINES_MAX * (BOND_BYTES_MAX + 4) + 64


class Owned(msgspec.Struct, frozen=True, array_like=True):
    """What an owner's key has said: its name, and the newest offer to each machine, ended or not.
    None of these is accepted here: that signature stays with the machine.
    """

    name: str = ""
    offers: tuple[Bond, ...] = ()


def create_owner(home: Home, name: str) -> Identity:
    """A new owner's key in the data folder. UserError E034 when there is one, E001 for the name."""
    if home.owner_key.exists():
        raise UserError(
            "E034", f"there is an owner's key already: {home.owner_key}", "`dugnad owner show`"
        )
    home.create()
    try:
        probe = Identity.ephemeral()
        offer(probe, PeerId(bytes(32)), name, 1)  # says what is wrong with the name
        made = Identity.create(home.owner_key)
    except ValueError as error:
        raise UserError("E001", str(error), "choose another --name") from error
    except IdentityError as error:
        raise identity_error(error) from error
    write_private(home.owned_file, encode(Owned(name)))
    return made


def load_owner(home: Home) -> Identity:
    """The owner's key of a data folder. UserError E048 when it has none."""
    if not home.owner_key.exists():
        raise UserError("E048", f"{home.root} has no owner's key", "`dugnad owner create` makes it")
    try:
        return Identity.load(home.owner_key)
    except IdentityError as error:
        raise identity_error(error) from error


def load_owned(home: Home) -> Owned:
    """What the owner's key of this folder has said. UserError E048 for a damaged file."""
    try:
        return decode(read_bounded(home.owned_file, _OWNED_BYTES_MAX), Owned, _OWNED_BYTES_MAX)
    except FileNotFoundError:
        return Owned()
    except OSError as error:
        raise disk_error(error, home.owned_file) from error
    except (RecordError, ValueError) as error:
        raise _damaged(home.owned_file, error) from error


def load_bond(home: Home) -> Bond | None:
    """Whose machine this peer is, ended or not. UserError E048 for a damaged file."""
    try:
        bond = read_bond(read_bounded(home.bond_file, BOND_BYTES_MAX))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(error, home.bond_file) from error
    except (RecordError, ValueError) as error:
        raise _damaged(home.bond_file, error) from error
    if fault := bond_fault(bond):
        raise _damaged(home.bond_file, fault)
    return bond


def sign_machine(home: Home, peer: PeerId, now_ms: int) -> Bond:
    """The owner's offer to a machine, kept as the newest. UserError E001, E048."""
    owner, owned = load_owner(home), load_owned(home)
    before = next((one for one in owned.offers if one.peer == peer), None)
    others = [one for one in owned.offers if one is not before]
    if len(others) >= MACHINES_MAX:
        raise UserError("E048", f"{MACHINES_MAX} machines are signed", "release one first")
    number = max(now_ms, before.number + 1 if before is not None else 0)
    try:
        made = offer(owner, peer, owned.name, number)
    except ValueError as error:
        raise UserError("E001", str(error), "give the id of a machine: `dugnad identity`") from None
    write_private(home.owned_file, encode(Owned(owned.name, (*others, made))))
    return made


def accept_offer(home: Home, text: str) -> Bond:
    """Take an owner's offer for this peer, and keep the bond. UserError E047, E019."""
    bond, me = read_offer(text), load_peer(home)
    held = load_bond(home)
    if held is not None and held.number >= bond.number:
        if held.owner == bond.owner and not held.released:
            return held
        raise UserError(
            "E047", "a newer offer was accepted here already", "ask its owner to sign once more"
        )
    try:
        made = accept(bond, me)
    except ValueError as error:
        raise UserError(
            "E047",
            f"{error}: {peer_text(PeerId(bond.peer))}, this is {peer_text(me.peer)}",
            f"let the owner run `dugnad owner sign {peer_text(me.peer)}`",
        ) from error
    write_private(home.bond_file, encode(made))
    return made


def leave_owner(home: Home) -> Bond:
    """End the bond of this peer. UserError E048 when it has none."""
    held = load_bond(home)
    if held is None or held.released:
        raise UserError("E048", "this machine has no owner", "`dugnad owner show` tells")
    made = release(held, load_peer(home))
    write_private(home.bond_file, encode(made))
    return made


def release_machine(home: Home, peer: PeerId) -> Bond:
    """End the owner's bond with a machine. UserError E048 when it has none."""
    owner, owned = load_owner(home), load_owned(home)
    held = next((one for one in owned.offers if one.peer == peer and not one.released), None)
    if held is None:
        raise UserError(
            "E048", f"{peer_text(peer)} is no machine of this owner", "`dugnad owner show` lists"
        )
    made = release(held, owner)
    offers = tuple(made if one is held else one for one in owned.offers)
    write_private(home.owned_file, encode(Owned(owned.name, offers)))
    return made


def offer_text(bond: Bond) -> str:
    """An offer as one line to carry to the machine."""
    return OFFER_PREFIX + base64.urlsafe_b64encode(encode(bond)).decode("ascii").rstrip("=")


def read_offer(text: str) -> Bond:
    """The offer in a line. UserError E047 when it is cut, changed, or not signed by its owner."""
    line = text.strip()
    fix = "copy the whole line that `dugnad owner sign` printed"
    if not line.startswith(OFFER_PREFIX) or len(line) > _OFFER_CHARS_MAX:
        raise UserError("E047", f"an offer begins with {OFFER_PREFIX}", fix)
    body = line.removeprefix(OFFER_PREFIX)
    try:
        bond = read_bond(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (binascii.Error, ValueError) as error:
        raise UserError("E047", "the offer is cut or mistyped", fix) from error
    if fault := offer_fault(bond):
        raise UserError("E047", f"the offer is {fault}", fix)
    return bond


def load_peer(home: Home) -> Identity:
    """This peer's own key. UserError E019."""
    try:
        return Identity.load(home.identity_key)
    except IdentityError as error:
        raise identity_error(error) from error


def _damaged(path: object, why: object) -> UserError:
    return UserError("E048", f"{path} is damaged: {why}", f"move {path} away")
