"""The text of a run while only parts of it are here: a file of its full size, with holes.

A learner maps it and may read what is here: sequences that came in blocks of prepared units, and
shards. When all shards are in it is the text, and takes the text's name; a learner that maps it
needs no restart.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

from dugnad.peer.corpus import SHARD_BYTES, CorpusError, DataIndex, ShardStore


class PartText:
    """The text with holes of one run. Everything reads or writes the disk: call it off the event
    loop, but for `publish`. OSError when the disk fails or is full."""

    def __init__(self, shards: ShardStore) -> None:
        self._shards = shards
        self._file: int | None = None
        self._sealed = False
        self._lock = Lock()
        """A block that comes late must not be written over the text, nor into a closed file."""

    @property
    def index(self) -> DataIndex:
        """Of the whole text."""
        return self._shards.index

    @property
    def path(self) -> Path:
        """The file, from `open` to `publish`."""
        return self._shards.tokens_path.with_suffix(".part")

    def open(self) -> Path:
        """Make it, with all shards that are stored already; what an earlier daemon left is dropped:
        nobody knows any more what of it is here."""
        self._shards.folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(self._file, self.index.size)
        missing = set(self._shards.missing())
        for number in range(len(self.index.hashes)):
            if number not in missing:
                with contextlib.suppress(CorpusError):  # damaged: it comes again
                    self.put_shard(number, self._shards.get(number))
        return self.path

    def put_shard(self, number: int, data: bytes) -> None:
        """Write a verified shard in its place, unless nobody reads from here."""
        self._put([(number * SHARD_BYTES, data)])

    def put_block(self, numbers: Sequence[int], context: int, block: bytes) -> None:
        """Write the sequences of a prepared unit in their places. ValueError when the block has
        another size than they."""
        size = context + 1
        if len(block) != len(numbers) * size:
            raise ValueError(f"a block of {len(block)} bytes for {len(numbers)} sequences")
        rows = (block[at * size : (at + 1) * size] for at in range(len(numbers)))
        self._put((number * context, row) for number, row in zip(numbers, rows, strict=True))

    def fill(self) -> None:
        """All shards are stored: write them over everything that came in blocks, and take nothing
        more. CorpusError when one is missing or damaged."""
        with self._lock:
            self._sealed = True
            if self._file is None:
                self.path.unlink(missing_ok=True)  # of an earlier daemon
                return
            for number in range(len(self.index.hashes)):
                _write(self._file, self._shards.get(number), number * SHARD_BYTES)
            os.fsync(self._file)

    def publish(self) -> None:
        """After `fill`, let the file be the text. Takes no time: whoever opens the text by the name
        that it has is to find it, so name and reader change in one step of the event loop."""
        if self._file is not None:
            self.path.replace(self._shards.tokens_path)
            os.close(self._file)
            self._file = None

    def _put(self, rows: Iterable[tuple[int, bytes]]) -> None:
        with self._lock:
            if self._file is not None and not self._sealed:
                for at, data in rows:
                    _write(self._file, data, at)


def _write(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
