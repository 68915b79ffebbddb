"""Where dugnad keeps things: the data folder and everything that is named inside it.

`Home` only names files, except for `create`, `RunFolder.create` and `runtime`, which make folders
with the right modes. What belongs in memory and not on disk (sockets) lies in a *runtime folder*
with a short path, because the path of a unix socket may have about 100 bytes.
"""

import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dugnad.dht.ids import RunId, parse_run, run_text
from dugnad.peer.errors import UserError

HOME_VARIABLE: Final = "DUGNAD_HOME"
RUNTIME_PATH_BYTES_MAX: Final = 60
"""sun_path holds 104 bytes on macOS and 108 on Linux; the names of our sockets need up to 40."""

RUNS_REMEMBERED_MAX: Final = 16
"""Runs whose peers are remembered: more than anybody joins from one data folder."""
PEERS_REMEMBERED_MAX: Final = 32
"""Addresses remembered for a run: one that answers is enough, and half of them may be gone."""
ADDRESS_CHARS_MAX: Final = 256
"""A multiaddr with a relay and two peer ids has about 200 characters."""
_PEERS_FILE_BYTES_MAX: Final = 1 << 20
_DAEMON_FILE_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What is kept of one run. All of it can be deleted: the swarm has it too."""

    root: Path

    @property
    def state(self) -> Path:
        """SQLite: headers, inputs, heads and counters."""
        return self.root / "state.sqlite"

    @property
    def anchors(self) -> Path:
        """Agreed parameters and momenta, a file for each fragment."""
        return self.root / "anchors"

    @property
    def context(self) -> Path:
        """The learner's whole state, and what the exchange has under way."""
        return self.root / "context"

    @property
    def shards(self) -> Path:
        """Training data, files named by their hash."""
        return self.root / "shards"

    @property
    def manifest(self) -> Path:
        """The encoded manifest, whose SHA-256 is the run id."""
        return self.root / "manifest.bin"

    @property
    def orders(self) -> Path:
        """What the organiser has ordered, signed; of no use to anybody else."""
        return self.root / "orders.bin"

    def create(self) -> None:
        """Makes the folders, private to their owner. UserError when the disk refuses."""
        for folder in (self.root.parent, self.root, self.anchors, self.context, self.shards):
            make_private_folder(folder)


@dataclass(frozen=True, slots=True)
class Home:
    """The data folder of one peer: one identity, one daemon at a time."""

    root: Path

    @classmethod
    def locate(
        cls, option: Path | None = None, environment: Mapping[str, str] = os.environ
    ) -> "Home":
        """The data folder: `option` (--home), else DUGNAD_HOME, else the usual place of this
        system.
        """
        chosen = option or environment.get(HOME_VARIABLE)
        if chosen:
            return cls(Path(chosen).expanduser().absolute())
        import platformdirs  # only here: it costs 20 ms that `status` with DUGNAD_HOME need not pay

        return cls(platformdirs.user_data_path("dugnad"))

    @property
    def identity_key(self) -> Path:
        """The private key of this peer, mode 0600."""
        return self.root / "identity.key"

    @property
    def owner_key(self) -> Path:
        """The private key of an owner, who may have many machines; mode 0600, need not exist."""
        return self.root / "owner.key"

    @property
    def owned_file(self) -> Path:
        """What that key has signed about machines."""
        return self.root / "owned.bin"

    @property
    def bond_file(self) -> Path:
        """Whose machine this peer is."""
        return self.root / "owner.bin"

    @property
    def daemon_file(self) -> Path:
        """Port and process id of the running daemon."""
        return self.root / "daemon.json"

    @property
    def control_token(self) -> Path:
        """The secret that the control API asks for, mode 0600, new with each daemon."""
        return self.root / "control.token"

    @property
    def config(self) -> Path:
        """The volunteer's settings; need not exist."""
        return self.root / "config.toml"

    @property
    def peers_file(self) -> Path:
        """Addresses of peers met, by run."""
        return self.root / "peers.json"

    @property
    def life_file(self) -> Path:
        """What the owner asked for last, where it outlives the daemon."""
        return self.root / "life.json"

    @property
    def usage_file(self) -> Path:
        """Traffic by day."""
        return self.root / "usage.json"

    @property
    def probe_cache(self) -> Path:
        """What the capability probe measured on this machine."""
        return self.root / "probe.json"

    def run(self, run: RunId) -> RunFolder:
        """The folder of `run`, whether or not it exists."""
        return RunFolder(self.root / "runs" / run_text(run))

    def known_runs(self) -> list[RunId]:
        """The runs that this data folder holds something of."""
        runs = []
        with suppress(OSError):
            for entry in sorted((self.root / "runs").iterdir()):
                with suppress(ValueError):  # a stranger's file: not a run
                    runs.append(parse_run(entry.name))
        return runs

    def create(self) -> None:
        """Makes the data folder, private to its owner. UserError when the disk refuses."""
        make_private_folder(self.root)

    def runtime(self, environment: Mapping[str, str] = os.environ) -> Path:
        """A private folder with a short path for sockets, made if needed; the same one for the
        same home.

        UserError when somebody else owns that path: sockets in it would be theirs to take.
        """
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
        base = environment.get("XDG_RUNTIME_DIR")
        candidates = [Path(base) / f"dugnad-{name}"] if base and Path(base).is_dir() else []
        candidates += [
            Path(d) / f"dugnad-{os.getuid()}-{name}" for d in (tempfile.gettempdir(), "/tmp")
        ]
        folder = next(
            (c for c in candidates if len(os.fsencode(c)) <= RUNTIME_PATH_BYTES_MAX), None
        )
        if folder is None:
            raise UserError(
                "E026",
                f"the folder for temporary files has too long a path: {candidates[0].parent}",
                "set TMPDIR to a folder with a path under 35 characters",
            )
        make_private_folder(folder)
        return folder

    def remembered(self, run: RunId) -> list[str]:
        """Addresses of peers met in `run`, the latest first; a damaged file is as good as none."""
        return self._peer_table().get(run_text(run), [])

    def remember(self, run: RunId, addresses: Sequence[str]) -> None:
        """Puts `addresses` in front of what is remembered of `run`; old ones beyond the bounds are
        dropped.
        """
        table = self._peer_table()
        fresh = [a for a in addresses if 0 < len(a) <= ADDRESS_CHARS_MAX]
        row = list(dict.fromkeys([*fresh, *table.pop(run_text(run), [])]))[:PEERS_REMEMBERED_MAX]
        newest = {run_text(run): row, **table}
        kept = dict(list(newest.items())[:RUNS_REMEMBERED_MAX])
        write_private(self.peers_file, json.dumps(kept, indent=1).encode())

    def _peer_table(self) -> dict[str, list[str]]:
        try:
            raw = read_bounded(self.peers_file, _PEERS_FILE_BYTES_MAX)
            table = json.loads(raw)
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(table, dict):
            return {}
        return {
            run: [a for a in row if isinstance(a, str) and len(a) <= ADDRESS_CHARS_MAX][
                :PEERS_REMEMBERED_MAX
            ]
            for run, row in list(table.items())[:RUNS_REMEMBERED_MAX]
            if isinstance(row, list)
        }


@dataclass(frozen=True, slots=True)
class DaemonFile:
    """What `daemon.json` says: where the control API of the running daemon is, and which process
    it is.
    """

    pid: int
    port: int
    started_ms: int

    def write(self, home: Home) -> None:
        """Replaces the daemon file of `home`."""
        write_private(home.daemon_file, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, home: Home) -> "DaemonFile | None":
        """The daemon file of `home`; None when there is none, or a damaged one."""
        try:
            fields = json.loads(read_bounded(home.daemon_file, _DAEMON_FILE_BYTES_MAX))
            values = (fields["pid"], fields["port"], fields["started_ms"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if not all(type(value) is int for value in values):
            return None
        found = cls(*values)
        return found if found.pid > 0 and 0 < found.port < 65536 else None


def make_private_folder(folder: Path) -> None:
    """Makes `folder` and its parents; `folder` itself with mode 0700 and ours. UserError if that
    cannot be.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat() if folder.is_symlink() else folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise UserError("E026", f"{folder} is not a folder", f"move {folder} away")
        if status.st_uid != os.getuid():
            raise UserError(
                "E026",
                f"{folder} belongs to another user",
                "choose another data folder with --home",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise disk_error(error, folder) from error


def write_private(path: Path, content: bytes) -> None:
    """Replaces `path` with `content`, mode 0600, at once and for good: draft, fsync, rename.

    UserError when the disk is full or refuses.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with suppress(FileNotFoundError):
            draft.unlink()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise disk_error(error, path) from error


def fsync_folder(folder: Path) -> None:
    """Forces the names in `folder` to the disk, after a rename in it. OSError as usual."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, and renaming is journalled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of `path`; ValueError when there are more than `limit`, OSError as usual."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return content


def disk_error(error: OSError, path: Path) -> UserError:
    """The error that a person sees when the disk refuses something at `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            "E017",
            f"the disk is full: cannot write {path}",
            "free some space, or choose another --home",
        )
    return UserError(
        "E026",
        f"cannot use {path}: {error.strerror or error}",
        "check that the folder exists and that you may write to it, or choose another with --home",
    )
