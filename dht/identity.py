"""Who we are: the Ed25519 key file, and the lock that keeps a data folder to one daemon.

The file holds libp2p's private-key protobuf, so the libp2p daemon reads the very same file. Whoever
can read it can act as this peer: it is created with mode 0600 and refused when others may read it.
"""

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dugnad.dht.ids import KEY_BYTES, PeerId, short

# libp2p PrivateKey protobuf: field 1 Type = Ed25519 (08 01), field 2 Data = 64 bytes (12 40),
# which are the seed and the public key.
KEY_PREFIX = bytes.fromhex("08011240")
KEY_FILE_BYTES = len(KEY_PREFIX) + 2 * KEY_BYTES
_TYPE_FIELD = 0x08
_ED25519 = 1
_READABLE_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PID_CHARS_MAX = 20


class IdentityError(Exception):
    """The identity key cannot be used: `reason` says why, `fix` what the owner can do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason} ({fix})")
        self.reason = reason
        self.fix = fix


class FolderLocked(Exception):
    """Another daemon (process `pid`, 0 if it could not be read) uses this data folder."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"another daemon (process {pid or 'unknown'}) uses this data folder")
        self.pid = pid


class Identity:
    """An Ed25519 key pair that signs in the name of `peer`; made by `load` or `create`."""

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self._key = key
        self.path = path
        self.peer = PeerId(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({short(self.peer)})"

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature of `message`."""
        return self._key.sign(message)

    @classmethod
    def ephemeral(cls, seed: bytes | None = None) -> "Identity":
        """An identity without a file, from a 32-byte seed or fresh: for tests and simulations."""
        key = Ed25519PrivateKey.from_private_bytes(seed) if seed else Ed25519PrivateKey.generate()
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """The identity in the file `path`; IdentityError if missing, damaged or open to others."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                raw = file.read(KEY_FILE_BYTES + 1)
        except FileNotFoundError:
            raise IdentityError(
                f"there is no identity key at {path}", "join a run to create one"
            ) from None
        except OSError as error:
            raise IdentityError(f"cannot read {path}: {error.strerror}", f"check {path}") from error
        if mode & _READABLE_BY_OTHERS:
            raise IdentityError(
                f"other users may read the identity key {path}", f"chmod 600 {path}"
            )
        return cls(_parse_key(raw, path), path)

    @classmethod
    def create(cls, path: Path) -> "Identity":
        """Makes a new key and writes it to `path`, durably; IdentityError if there is a file.

        The file appears complete or not at all, also after a power cut.
        """
        identity = cls(Ed25519PrivateKey.generate(), path)
        try:
            _write_new_file(path, KEY_PREFIX + identity._key.private_bytes_raw() + identity.peer)
        except FileExistsError:
            raise IdentityError(f"{path} exists already", f"move {path} away first") from None
        except OSError as error:
            raise IdentityError(
                f"cannot write {path}: {error.strerror}", f"check the folder {path.parent}"
            ) from error
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The identity in `path`, made first if there is no such file."""
        return cls.load(path) if path.exists() else cls.create(path)


def load_or_create(path: Path) -> Identity:
    """The identity in `path`, made first if there is no such file."""
    return Identity.load_or_create(path)


class FolderLock:
    """Keeps a data folder to one process. The kernel lets go of it whatever way the process ends.

    `acquire` raises FolderLocked with the holder's process id. The file itself stays on purpose:
    removing it would let two processes hold locks on two files of the same name.
    """

    FILE_NAME = "daemon.lock"

    def __init__(self, folder: Path) -> None:
        self.path = folder / self.FILE_NAME
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock and writes our process id into it."""
        assert self._descriptor is None, "the lock is held already"
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, _PID_CHARS_MAX, 0).strip()
            os.close(descriptor)
            raise FolderLocked(int(holder) if holder.isdigit() else 0) from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets go of the lock; nothing happens if it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FolderLock":
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _parse_key(raw: bytes, path: Path) -> Ed25519PrivateKey:
    fix = f"restore {path} from a backup, or move it away to get a new identity"
    if len(raw) >= 2 and raw[0] == _TYPE_FIELD and raw[1] != _ED25519:
        raise IdentityError(f"the key in {path} is not an Ed25519 key (type {raw[1]})", fix)
    if len(raw) < KEY_FILE_BYTES and KEY_PREFIX.startswith(raw[: len(KEY_PREFIX)]):
        raise IdentityError(f"the identity key {path} is cut short ({len(raw)} bytes)", fix)
    if len(raw) != KEY_FILE_BYTES or not raw.startswith(KEY_PREFIX):
        raise IdentityError(f"{path} does not hold a libp2p private key", fix)
    seed, public = raw[len(KEY_PREFIX) : -KEY_BYTES], raw[-KEY_BYTES:]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != public:
        raise IdentityError(f"the two halves of the identity key {path} do not fit", fix)
    return key


def _write_new_file(path: Path, content: bytes) -> None:
    """Writes `path` complete and durable, only if it does not exist: draft, fsync, hard link."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
