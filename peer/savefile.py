"""Generations of one thing on disk: safetensors files, checked in full when they are read.

A file is written beside its place, fsynced and renamed, and the two newest are kept: a torn write,
a full disk or a power cut at any moment leaves a good one. The last tensor, `check`, is the CRC-32
of everything before it, which a torn or rotten file does not match; against somebody who writes to
this folder on purpose it protects nothing, and the folder is private. Any safetensors reader can
open the files. Blocking: call it outside the event loop.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dugnad.peer.paths import fsync_folder
from dugnad.peer.storeschema import os_error

KEPT: Final = 2
"""Files kept: the newest, and one in case the newest turns out to be bad."""
FILES_MAX: Final = 100_000
"""Names read from the folder: far above what is kept of all fragments."""
HEADER_BYTES_MAX: Final = 1 << 20
"""A header names some dozens of tensors; what is long is a tensor itself."""
CHECK: Final = "check"
PARTIAL: Final = ".partial"
FILE_MODE: Final = 0o600
_CHUNK: Final = 1 << 24
_ALIGN: Final = 8
_DTYPES: Final[Mapping[str, Any]] = {  # Any: numpy's scalar types have no common one that fits
    "F64": np.float64,
    "I64": np.int64,
    "F32": np.float32,
    "U8": np.uint8,
}
_NAMES: Final = {np.dtype(kind): name for name, kind in _DTYPES.items()}

Arrays = Mapping[str, npt.NDArray[Any]]


class SaveFault(ValueError):
    """A file does not hold what it should, and why."""


class _Place(msgspec.Struct):
    """Where a tensor lies in a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SaveFolder:
    """The generations of `stem` in one folder."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self._name = re.compile(re.escape(stem) + r"-save-(\d{10})\.safetensors")

    def save(self, metadata: Mapping[str, str], arrays: Arrays) -> Path:
        """Keep these flat arrays as the newest; on the disk when this returns.

        StoreError (`disk_full` and others) when it cannot be written; older files are as before.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            older = self.files()
            number = older[-1][0] + 1 if older else 1
            path = self.folder / f"{self.stem}-save-{number:010d}.safetensors"
            write_whole(path, tensors_file(metadata, arrays))
            for _, old in older[: len(older) + 1 - KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, self.folder) from error
        return path

    def files(self) -> list[tuple[int, Path]]:
        """(number, path) of the generations, oldest first. OSError when the folder is closed."""
        if not self.folder.is_dir():
            return []
        found = []
        for count, path in enumerate(self.folder.iterdir()):
            if match := self._name.fullmatch(path.name):
                found.append((int(match[1]), path))
            if count >= FILES_MAX:
                break
        return sorted(found)

    def sweep(self) -> None:
        """Remove what an interrupted save left behind. OSError; not during a save."""
        for path in sorted(self.folder.glob(f"{self.stem}-*{PARTIAL}"))[:FILES_MAX]:
            path.unlink(missing_ok=True)


def write_whole(path: Path, chunks: Iterator[bytes | memoryview]) -> None:
    """Put a file at `path` in one step: either all of it is there after a power cut or none."""
    temporary = path.with_name(path.name + PARTIAL)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with open(fd, "wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def tensors_file(metadata: Mapping[str, str], arrays: Arrays) -> Iterator[bytes | memoryview]:
    """A safetensors file of flat arrays and their check, piece by piece, without a copy."""
    assert CHECK not in arrays
    order = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # so that each is aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        array = arrays[name]
        assert array.ndim == 1, name
        header[name] = _Place(_NAMES[array.dtype], [array.size], (at, at + array.nbytes))
        at += array.nbytes
    header[CHECK] = _Place("U8", [4], (at, at + 4))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > HEADER_BYTES_MAX:
        raise SaveFault(f"a header of {len(text)} bytes")
    head = len(text).to_bytes(8, "little") + text
    check = zlib.crc32(head)
    yield head
    for name in order:
        data = np.ascontiguousarray(arrays[name]).view(np.uint8).data
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            check = zlib.crc32(part, check)
            yield part
    yield check.to_bytes(4, "little")


def read_tensors(path: Path, bytes_max: int) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """Metadata and arrays of a file that `save` wrote, checked; raises :class:`SaveFault`.

    The arrays are views of one buffer of at most `bytes_max` bytes.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > bytes_max:
                raise SaveFault(f"it has {size} bytes, at most {bytes_max} are expected")
            data = np.empty(size, np.uint8)
            view, check, at = data.data, 0, 0
            while at < size:
                count = file.readinto(view[at : at + _CHUNK])
                if not count:
                    raise SaveFault("it became shorter while it was read")
                check = zlib.crc32(view[at : min(at + count, size - 4)], check)
                at += count
    except OSError as error:
        raise SaveFault(f"it cannot be read: {error.strerror}") from error
    if size < 12 or int.from_bytes(view[-4:], "little") != check:
        raise SaveFault("it is torn: its checksum does not match")
    return _unpacked(data)


def _unpacked(data: npt.NDArray[np.uint8]) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """The parts of a file whose checksum is right; it may still be of another kind."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(HEADER_BYTES_MAX, data.size - 8):
        raise SaveFault("its header is too long")
    try:
        header = msgspec.json.decode(data[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
        places = {name: msgspec.json.decode(raw, type=_Place) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SaveFault(f"its header cannot be read: {error}") from error
    body = data[8 + length :]
    arrays = {name: _array(body, name, place) for name, place in places.items() if name != CHECK}
    return metadata, arrays


def _array(body: npt.NDArray[np.uint8], name: str, place: _Place) -> npt.NDArray[Any]:
    start, stop = place.data_offsets
    kind = _DTYPES.get(place.dtype)
    if kind is None or not 0 <= start <= stop <= body.size or len(place.shape) != 1:
        raise SaveFault(f"its tensor {name!r} lies outside")
    if place.shape[0] * np.dtype(kind).itemsize != stop - start:
        raise SaveFault(f"its tensor {name!r} has another size than it says")
    return body[start:stop].view(kind)


def require(arrays: Arrays, names: Sequence[str], size: int) -> None:
    """Raise :class:`SaveFault` unless these are float32 arrays of `size` finite numbers."""
    for name in names:
        array = arrays.get(name)
        if array is None or array.dtype != np.float32 or array.shape != (size,):
            raise SaveFault(f"its {name} is not {size} float32")
        if not np.isfinite(array).all():
            raise SaveFault(f"its {name} is not finite")
