"""Anchors on disk: the agreed parameters and momentum of each fragment, as safetensors files.

A file is written beside its place, fsynced and renamed, and the two newest of a fragment are kept,
so that a power cut at any moment leaves a good one. Nothing is trusted because it was read: the
roots of what a file holds are computed anew, and a file that does not match is named and skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, numpy

from dugnad.averaging.formats import DIGEST_BYTES, FRAGMENTS_MAX
from dugnad.averaging.tree import array_root
from dugnad.peer.savefile import PARTIAL, write_whole
from dugnad.peer.storeschema import os_error

Vector = npt.NDArray[np.float32]

KEPT: Final = 2
"""Files kept per fragment: the newest, and one in case the newest turns out to be bad."""
FILES_MAX: Final = 100_000
"""Names read from the folder: far above KEPT files for each of FRAGMENTS_MAX fragments."""
FORMAT: Final = "dugnad anchor 1"

_NAME: Final = re.compile(r"fragment-(\d{4})-save-(\d{10})\.safetensors")


@dataclass(frozen=True, slots=True)
class Anchor:
    """Version ``version`` of a fragment, made by commit ``digest``: flat float32 vectors of equal
    length and their roots, which a commit's header must name."""

    fragment: int
    version: int
    digest: bytes
    theta: Vector
    momentum: Vector
    theta_root: bytes
    momentum_root: bytes


class _Header(msgspec.Struct):
    """The part of a safetensors header that its numpy loader does not give."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that does not hold a good anchor, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class LoadedAnchor:
    """The newest good anchor of a fragment, if there is one, and the newer files passed over."""

    anchor: Anchor | None
    skipped: tuple[SkippedFile, ...] = ()


class AnchorFiles:
    """The anchors kept in one folder. Blocking: call it outside the event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, fragment: int, version: int, digest: bytes, theta: Vector, momentum: Vector
    ) -> Path:
        """Keep an anchor as the newest of its fragment; on the disk when this returns.

        StoreError (``disk_full`` and others) when it cannot be written; older files are as before.
        """
        assert 0 <= fragment < FRAGMENTS_MAX
        assert len(digest) == DIGEST_BYTES
        assert theta.shape == momentum.shape, "an anchor and its momentum belong together"
        metadata = {
            "format": FORMAT,
            "fragment": str(fragment),
            "version": str(version),
            "digest": digest.hex(),
            "theta_root": array_root(theta).hex(),
            "momentum_root": array_root(momentum).hex(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            older = self._files(fragment)
            number = older[-1][0] + 1 if older else 1
            path = self.folder / f"fragment-{fragment:04d}-save-{number:010d}.safetensors"
            data = numpy.save({"theta": theta, "momentum": momentum}, metadata)
            write_whole(path, iter([data]))
            for _, old in older[: len(older) + 1 - KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, self.folder) from error
        return path

    def load(self, fragment: int) -> LoadedAnchor:
        """The newest good anchor of ``fragment``; StoreError when the folder cannot be read."""
        skipped: list[SkippedFile] = []
        try:
            for _, path in reversed(self._files(fragment)):
                found = _read(path, fragment)
                if isinstance(found, Anchor):
                    return LoadedAnchor(found, tuple(skipped))
                skipped.append(SkippedFile(path, found))
        except OSError as error:
            raise os_error(error, self.folder) from error
        return LoadedAnchor(None, tuple(skipped))

    def sweep(self) -> int:
        """Remove what an interrupted save left behind; how many files. Not during a save."""
        try:
            left = sorted(self.folder.glob(f"fragment-*{PARTIAL}"))[:FILES_MAX]
            for path in left:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, self.folder) from error
        return len(left)

    def _files(self, fragment: int) -> list[tuple[int, Path]]:
        """(save number, path) of the files of a fragment, oldest first."""
        if not self.folder.is_dir():
            return []
        found = []
        for count, path in enumerate(self.folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) == fragment:
                found.append((int(match[2]), path))
            if count >= FILES_MAX:
                break
        return sorted(found)


def _read(path: Path, fragment: int) -> Anchor | str:
    """The anchor in a file, or why it is none. An error of the disk concerns this file only."""
    try:
        data = path.read_bytes()
        tensors = numpy.load(data)
        metadata = _metadata(data)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (SafetensorError, ValueError, KeyError, msgspec.MsgspecError) as error:
        return f"it is torn or not a safetensors file: {error}"
    if metadata.get("format") != FORMAT or metadata.get("fragment") != str(fragment):
        return "it is not an anchor of this fragment"
    theta, momentum = tensors.get("theta"), tensors.get("momentum")
    if theta is None or momentum is None or theta.shape != momentum.shape:
        return "it does not hold an anchor and its momentum"
    if theta.ndim != 1 or theta.dtype != np.float32 or momentum.dtype != np.float32:
        return "its vectors are not flat float32"
    roots = array_root(theta), array_root(momentum)
    if [root.hex() for root in roots] != [
        metadata.get("theta_root"),
        metadata.get("momentum_root"),
    ]:
        return "its contents do not match its roots"
    try:
        version, digest = int(metadata["version"]), bytes.fromhex(metadata["digest"])
    except (KeyError, ValueError):
        return "it does not say which commit made it"
    return Anchor(fragment, version, digest, theta, momentum, *roots)


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file whose header is known to be sound."""
    length = int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8 : 8 + length], type=_Header)
    return header.metadata
