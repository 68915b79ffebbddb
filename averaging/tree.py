"""SHA-256 Merkle trees: one root names megabytes, and each leaf can be checked alone.

A leaf of parameters is :data:`LEAF_PARAMS` of them. The same tree names anchors, momenta and
payloads, so that a piece from any donor is accepted or refused by itself, and a bad piece tells
which donor sent it. Leaves, nodes and roots are hashed under different tags, so none can pass for
another; the root also binds the number of leaves. A node without a sibling is promoted unchanged.

Leaves, which are all of the data, are hashed by BLAKE3: 5.7 GB/s in one thread where SHA-256 with
the processor's own instructions reaches 1.7, and far more where it has none. What is above them is
a few kilobytes of SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Vector: TypeAlias = npt.NDArray[np.float32]
"""A flat float32 array."""

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Foreign or own bytes, as the hashes and decoders here take them."""

Bounds: TypeAlias = Sequence[tuple[int, int]]
"""Byte ranges ``(start, stop)`` of the leaves of some data, in order."""

LEAF_PARAMS: Final = 65_536
"""Parameters in a leaf (DESIGN.md 8.5): 256 KiB as float32, 64 KiB as int8."""

LEAVES_MAX: Final = 1 << 20
"""Leaves in one tree: 2**36 parameters. Bounds what a foreign count can ask for."""

HASH_BYTES: Final = 32
"""Length of a leaf hash, a node and a root."""

_PROOF_MAX: Final = 20
"""Levels of the tallest tree: log2(LEAVES_MAX)."""

_LEAF_CONTEXT: Final = "dugnad leaf"
_NODE_TAG: Final = b"dugnad node\x00"
_ROOT_TAG: Final = b"dugnad root\x00"


def leaf_hash(data: Bytes) -> bytes:
    """Return the hash of one leaf's bytes."""
    return blake3(data, derive_key_context=_LEAF_CONTEXT).digest()


def leaf_hashes(data: Bytes, bounds: Bounds) -> tuple[bytes, ...]:
    """Return the hash of each leaf of ``data``; ``bounds`` must cover it end to end."""
    view = memoryview(data).cast("B")
    at = 0
    for start, stop in bounds:
        if start != at or stop <= start:
            raise ValueError(f"leaf bounds leave a gap or overlap at byte {at}")
        at = stop
    if at != len(view):
        raise ValueError(f"leaf bounds end at byte {at} of {len(view)}")
    return tuple(leaf_hash(view[start:stop]) for start, stop in bounds)


def root_of(hashes: Sequence[bytes]) -> bytes:
    """Return the root over leaf hashes; no leaves at all have a root too."""
    level = list(hashes)
    if len(level) > LEAVES_MAX:
        raise ValueError(f"{len(level)} leaves; at most {LEAVES_MAX}")
    while len(level) > 1:
        level = _parents(level)
    return _seal(len(hashes), level[0] if level else b"")


def root(data: Bytes, bounds: Bounds) -> bytes:
    """Return the root of ``data`` cut at ``bounds``."""
    return root_of(leaf_hashes(data, bounds))


def param_bounds(n: int) -> list[tuple[int, int]]:
    """Return the ranges, in parameters, of the leaves of ``n`` parameters."""
    return [(start, min(start + LEAF_PARAMS, n)) for start in range(0, n, LEAF_PARAMS)]


def array_leaf_hashes(array: Vector) -> tuple[bytes, ...]:
    """Return the leaf hashes of a flat float32 array, hashed as little-endian bytes."""
    return leaf_hashes(array_bytes(array), [(4 * a, 4 * b) for a, b in param_bounds(array.size)])


def array_root(array: Vector) -> bytes:
    """Return the root of a flat float32 array: what a commit names an anchor or a momentum by."""
    return root_of(array_leaf_hashes(array))


def array_bytes(array: Vector) -> memoryview:
    """Return a flat float32 array as little-endian bytes: a view where the array allows one."""
    if array.ndim != 1 or array.dtype != np.float32:
        raise ValueError(
            f"a flat float32 array is needed, not {array.dtype} of shape {array.shape}"
        )
    plain = np.ascontiguousarray(array, dtype="<f4")
    return plain.view(np.uint8).data


def verify_leaf(data: Bytes, expected: bytes) -> bool:
    """Return whether ``data`` is the leaf whose hash is ``expected``."""
    return leaf_hash(data) == expected


def proof(hashes: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Return the siblings that lead from leaf ``index`` to the root, lowest first."""
    if not 0 <= index < len(hashes) <= LEAVES_MAX:
        raise ValueError(f"leaf {index} of {len(hashes)}")
    siblings = []
    level = list(hashes)
    for at, width in _path(index, len(hashes)):
        if (at ^ 1) < width:
            siblings.append(level[at ^ 1])
        level = _parents(level)
    return tuple(siblings)


def check_proof(
    expected_root: bytes, leaf: bytes, siblings: Sequence[bytes], *, index: int, count: int
) -> bool:
    """Return whether ``leaf`` is the hash of leaf ``index`` of ``count`` under ``expected_root``.

    Total: foreign siblings, index and count of any size give False, never an error.
    """
    if not 0 <= index < count <= LEAVES_MAX or len(siblings) > _PROOF_MAX:
        return False
    if any(len(one) != HASH_BYTES for one in (leaf, *siblings)):
        return False
    node = leaf
    left_over = list(reversed(siblings))
    for at, width in _path(index, count):
        if (at ^ 1) >= width:
            continue  # promoted: no sibling on this level
        if not left_over:
            return False
        other = left_over.pop()
        node = _node(other, node) if at & 1 else _node(node, other)
    return not left_over and _seal(count, node) == expected_root


def _path(index: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (index, width) for each level below the top."""
    while count > 1:
        yield index, count
        index, count = index // 2, (count + 1) // 2


def _parents(level: list[bytes]) -> list[bytes]:
    pairs = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return pairs + level[-1:] if len(level) % 2 else pairs


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE_TAG + left + right).digest()


def _seal(count: int, top: bytes) -> bytes:
    return hashlib.sha256(_ROOT_TAG + count.to_bytes(8, "little") + top).digest()
