"""The identity as one file to carry to another machine: a PEM key, with or without a passphrase.

The format is PKCS #8, which openssl reads, too; encrypted with what the cryptography library calls
its best. Whoever has the file (and its passphrase) is this peer.
"""

from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from dugnad.dht.identity import KEY_PREFIX, FolderLock, FolderLocked, Identity, IdentityError
from dugnad.dht.ids import KEY_BYTES, PeerId
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home, disk_error, read_bounded, write_private
from dugnad.peer.starting import folder_locked, identity_error

FILE_BYTES_MAX: Final = 1 << 14
"""An encrypted key has about 400 bytes."""
PASSPHRASE_BYTES_MAX: Final = 1000
"""The library refuses longer ones."""


def export_identity(home: Home, target: Path, passphrase: str, *, force: bool = False) -> PeerId:
    """Write this peer's key to `target`, mode 0600. UserError E019, E034 (there is a file),
    E001."""
    try:
        identity = Identity.load(home.identity_key)
        seed = home.identity_key.read_bytes()[len(KEY_PREFIX) : len(KEY_PREFIX) + KEY_BYTES]
    except IdentityError as error:
        raise identity_error(error) from error
    except OSError as error:
        raise disk_error(error, home.identity_key) from error
    if target.exists() and not force:
        raise UserError("E034", f"{target} exists already", "choose another name, or add --force")
    secret = passphrase.encode()
    if len(secret) > PASSPHRASE_BYTES_MAX:
        raise UserError("E001", "the passphrase is too long", "use at most 1000 bytes")
    lock = BestAvailableEncryption(secret) if secret else NoEncryption()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    write_private(target, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))
    return identity.peer


def peer_in(source: Path, passphrase: str) -> tuple[PeerId, bytes]:
    """Whose key the file holds, and the key file's bytes. UserError E035."""
    try:
        content = read_bounded(source, FILE_BYTES_MAX)
        key = load_pem_private_key(content, passphrase.encode() or None)
    except OSError as error:
        raise UserError("E035", f"cannot read {source}: {error.strerror}", "check it") from error
    except TypeError as error:  # with a passphrase where none is wanted, or the reverse
        wanted = "is not encrypted" if passphrase else "is encrypted"
        fix = (
            "leave the passphrase away" if passphrase else "add --passphrase-file FILE, or type it"
        )
        raise UserError("E035", f"{source} {wanted}", fix) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(
            "E035", f"{source} is no identity file, or the passphrase is wrong", "try again"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError("E035", f"{source} holds another kind of key", "choose an exported file")
    peer = PeerId(key.public_key().public_bytes_raw())
    return peer, KEY_PREFIX + key.private_bytes_raw() + peer


def import_identity(home: Home, source: Path, passphrase: str, *, force: bool = False) -> PeerId:
    """Make this data folder the peer of the file. UserError E035; E034 when there is another
    identity and not `force`; E022 while a daemon runs."""
    peer, content = peer_in(source, passphrase)
    home.create()
    try:
        with FolderLock(home.root):
            if home.identity_key.exists() and not force:
                if home.identity_key.read_bytes() == content:
                    return peer
                raise UserError(
                    "E034",
                    f"there is another identity in {home.root}, and its credit would be lost",
                    "export it first, then add --force; or choose another --home",
                )
            write_private(home.identity_key, content)
    except FolderLocked as error:
        raise folder_locked(error, home) from error
    except OSError as error:
        raise disk_error(error, home.identity_key) from error
    return peer
