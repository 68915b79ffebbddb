"""Fragments: how a model's parameters are cut into P parts that are merged one at a time.

The table is made once, by whoever starts a run, and travels in the manifest; every other peer
judges it with :meth:`FragmentTable.validate`. The flat parameter vector of a model is its fragments
one after the other, each the flattened ranges of its slices in order.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dugnad.averaging.tree import Vector

EMBEDDING: Final = "embedding"
MATRIX: Final = "matrix"
VECTOR: Final = "vector"
KINDS: Final = (EMBEDDING, MATRIX, VECTOR)
"""Kinds of tensor: merging rules average embeddings plainly, the others may go by direction."""

TENSORS_MAX: Final = 16_384
"""Tensors of a model: a thousand layers of a dozen each."""
FRAGMENTS_MAX: Final = 1024
"""Fragments of a model; 24 is the published number (algorithms.md 1.5)."""
SLICES_MAX: Final = TENSORS_MAX + FRAGMENTS_MAX
"""Slices of a table: each tensor whole, and a further one for each cut."""
PARAMS_MAX: Final = 1 << 36
"""Parameters of a model: what a tree of hashes can hold (tree.LEAVES_MAX)."""
NAME_CHARS_MAX: Final = 200
"""Characters of a tensor's name."""
DIMENSIONS_MAX: Final = 8
"""Dimensions of a tensor."""

Named: TypeAlias = Mapping[str, npt.NDArray[np.float32]]
"""Tensors by name, float32, in their own shapes."""


class FragmentError(ValueError):
    """A table, or arrays beside a table, that do not fit; ``reason`` says where."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Group(NamedTuple):
    """Elements [start, stop) of a fragment that are one tensor's (or rows of it), and its kind."""

    start: int
    stop: int
    kind: str


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's name, shape (``()`` is a number alone) and kind, one of KINDS."""

    name: str
    shape: tuple[int, ...]
    group: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one row: tensors are cut between rows only."""
        return math.prod(self.shape[1:])


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Elements [start, stop), in row-major order, of tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Fragment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The slices of one fragment, in the order in which its vector holds them."""

    slices: tuple[Slice, ...]


class FragmentTable(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True
):
    """All tensors of a model and which fragment has which part of them.

    A table that was decoded from foreign bytes must pass :meth:`validate` before anything else is
    asked of it.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each fragment."""
        return tuple(sum(part.size for part in one.slices) for one in self.fragments)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each fragment starts in the flat vector of the whole model."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    @property
    def total(self) -> int:
        """Number of parameters of the model."""
        return sum(self.sizes)

    def groups(self, p: int) -> list[tuple[int, int]]:
        """Return the element range, within fragment ``p``, of each of its slices."""
        return [(group.start, group.stop) for group in self.merge_groups(p)]

    def merge_groups(self, p: int) -> list[Group]:
        """Return the same ranges with their kinds, as merging rules take them."""
        parts = self.fragments[p].slices
        ends = list(itertools.accumulate((part.size for part in parts), initial=0))
        kinds = [self.tensors[part.tensor].group for part in parts]
        return [Group(*one) for one in zip(ends[:-1], ends[1:], kinds, strict=True)]

    def digest(self) -> bytes:
        """Return the SHA-256 that names this table."""
        return hashlib.sha256(b"dugnad fragments\x00" + msgspec.msgpack.encode(self)).digest()

    def validate(self) -> None:
        """Raise :class:`FragmentError` unless each element of each tensor is in exactly one slice.

        Also bounds every count and size, so that nothing that follows can be made to grow.
        """
        _check_tensors(self.tensors)
        if not 1 <= len(self.fragments) <= FRAGMENTS_MAX:
            raise FragmentError(
                f"{len(self.fragments)} fragments; 1 to {FRAGMENTS_MAX} are allowed"
            )
        parts = [part for one in self.fragments for part in one.slices]
        if len(parts) > SLICES_MAX:
            raise FragmentError(f"{len(parts)} slices; at most {SLICES_MAX} are allowed")
        if not all(one.slices for one in self.fragments):
            raise FragmentError("a fragment without slices")
        _check_cover(self.tensors, parts)

    def gather(self, p: int, named: Named, out: Vector | None = None) -> Vector:
        """Return fragment ``p`` of the named tensors as one flat vector, in ``out`` if given."""
        if out is None:
            out = np.empty(self.sizes[p], np.float32)
        if out.shape != (self.sizes[p],):
            raise FragmentError(f"room of shape {out.shape} for {self.sizes[p]} parameters")
        for part, group in zip(self.fragments[p].slices, self.merge_groups(p), strict=True):
            flat = self._flat(named, part.tensor)
            out[group.start : group.stop] = flat[part.start : part.stop]
        return out

    def scatter(self, p: int, vector: Vector, named: Named) -> None:
        """Write fragment ``p`` into the named tensors, which must be contiguous, in place."""
        if vector.shape != (self.sizes[p],):
            raise FragmentError(f"a vector of shape {vector.shape} for {self.sizes[p]} parameters")
        for part, group in zip(self.fragments[p].slices, self.merge_groups(p), strict=True):
            name = self.tensors[part.tensor].name
            if name in named and not named[name].flags.c_contiguous:
                raise FragmentError(f"tensor {name!r} is not contiguous")
            flat = self._flat(named, part.tensor)
            flat[part.start : part.stop] = vector[group.start : group.stop]

    def pack(self, named: Named) -> Vector:
        """Return the flat vector of the whole model: all fragments, one after the other."""
        flat = np.empty(self.total, np.float32)
        for p, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            self.gather(p, named, flat[offset : offset + size])
        return flat

    def unpack(self, flat: Vector) -> dict[str, npt.NDArray[np.float32]]:
        """Return the tensors in a flat vector by name: views of it, or copies of tensors cut up."""
        if flat.shape != (self.total,):
            raise FragmentError(f"a vector of shape {flat.shape} for {self.total} parameters")
        found: dict[int, list[tuple[int, Vector]]] = {}
        for p, offset in enumerate(self.offsets):
            for part, (start, stop) in zip(self.fragments[p].slices, self.groups(p), strict=True):
                view = flat[offset + start : offset + stop]
                found.setdefault(part.tensor, []).append((part.start, view))
        named = {}
        for index, spec in enumerate(self.tensors):
            views = [view for _, view in sorted(found[index], key=lambda one: one[0])]
            whole = views[0] if len(views) == 1 else np.concatenate(views)
            named[spec.name] = whole.reshape(spec.shape)
        return named

    def _flat(self, named: Named, tensor: int) -> Vector:
        spec = self.tensors[tensor]
        if spec.name not in named:
            raise FragmentError(f"tensor {spec.name!r} is missing")
        array = named[spec.name]
        if array.shape != spec.shape or array.dtype != np.float32:
            raise FragmentError(
                f"tensor {spec.name!r} is {array.dtype} of shape {array.shape}, "
                f"not float32 of shape {spec.shape}"
            )
        return array.reshape(-1)


def build_table(tensors: Sequence[TensorSpec], count: int) -> FragmentTable:
    """Return the table of ``count`` fragments for these tensors, the same on every machine.

    Embeddings go apart if they make up at least half of a fair share, d/(2P); fewer, and they lie
    with the rest (a merging rule still treats them as what they are: the kind stays with the
    slice). Apart, they get as many fragments as makes the largest fragment of all smallest. On
    either side a tensor larger than its side's fair share is cut by rows into equal pieces; then,
    largest first, each goes into the emptiest fragment, so tensors smaller than a share stay whole.

    Raises :class:`FragmentError` if there are too few rows for so many fragments.
    """
    specs = tuple(tensors)
    _check_tensors(specs)
    if not 1 <= count <= FRAGMENTS_MAX:
        raise FragmentError(f"{count} fragments; 1 to {FRAGMENTS_MAX} are allowed")
    embeddings = [i for i, spec in enumerate(specs) if spec.group == EMBEDDING]
    rest = [i for i, spec in enumerate(specs) if spec.group != EMBEDDING]
    apart = _fragments_apart(_total(specs, embeddings), _total(specs, rest), count)
    if apart:
        bins = _pack(specs, embeddings, apart) + _pack(specs, rest, count - apart)
    else:
        bins = _pack(specs, embeddings + rest, count)
    table = FragmentTable(specs, tuple(Fragment(tuple(_joined(one))) for one in bins))
    table.validate()
    return table


def _fragments_apart(embeddings: int, rest: int, count: int) -> int:
    """Return how many fragments hold embeddings only: 0 if they are few or alone."""
    if count == 1 or rest == 0 or 2 * count * embeddings < embeddings + rest:
        return 0
    return min(range(1, count), key=lambda n: max(-(-embeddings // n), -(-rest // (count - n))))


def _pack(specs: Sequence[TensorSpec], chosen: Sequence[int], count: int) -> list[list[Slice]]:
    """Return the chosen tensors in ``count`` bins, largest piece first into the emptiest bin."""
    share = -(-_total(specs, chosen) // count)
    pieces = [piece for i in chosen for piece in _pieces(specs[i], i, share)]
    if len(pieces) < count:
        raise FragmentError(f"{len(pieces)} pieces of whole rows cannot fill {count} fragments")
    pieces.sort(key=lambda piece: (-piece.size, piece.tensor, piece.start))
    bins: list[list[Slice]] = [[] for _ in range(count)]
    sizes = [0] * count
    for piece in pieces:
        emptiest = sizes.index(min(sizes))
        bins[emptiest].append(piece)
        sizes[emptiest] += piece.size
    return bins


def _pieces(spec: TensorSpec, index: int, share: int) -> list[Slice]:
    """Return a tensor whole, or cut by rows into the fewest equal pieces of at most ``share``."""
    rows = spec.size // spec.row
    per_piece = max(1, share // spec.row)
    count = -(-rows // per_piece)
    edges = [spec.row * (rows * i // count) for i in range(count + 1)]
    return [Slice(index, start, stop) for start, stop in itertools.pairwise(edges)]


def _joined(parts: list[Slice]) -> list[Slice]:
    """Return slices in the order of the model, with neighbours of one tensor made one."""
    joined: list[Slice] = []
    for part in sorted(parts, key=lambda one: (one.tensor, one.start)):
        last = joined[-1] if joined else None
        if last is not None and (last.tensor, last.stop) == (part.tensor, part.start):
            joined[-1] = Slice(part.tensor, last.start, part.stop)
        else:
            joined.append(part)
    return joined


def _total(specs: Sequence[TensorSpec], chosen: Sequence[int]) -> int:
    return sum(specs[i].size for i in chosen)


def _check_tensors(tensors: Sequence[TensorSpec]) -> None:
    if not 1 <= len(tensors) <= TENSORS_MAX:
        raise FragmentError(f"{len(tensors)} tensors; 1 to {TENSORS_MAX} are allowed")
    if len({spec.name for spec in tensors}) != len(tensors):
        raise FragmentError("two tensors of one name")
    for spec in tensors:
        _check_tensor(spec)
    if sum(spec.size for spec in tensors) > PARAMS_MAX:
        raise FragmentError(f"more than {PARAMS_MAX} parameters")


def _check_tensor(spec: TensorSpec) -> None:
    if not (1 <= len(spec.name) <= NAME_CHARS_MAX and spec.name.isprintable()):
        raise FragmentError("a tensor name that is empty, too long or not printable")
    if spec.group not in KINDS:
        raise FragmentError(f"tensor {spec.name!r} of unknown kind")
    if len(spec.shape) > DIMENSIONS_MAX or not all(1 <= side <= PARAMS_MAX for side in spec.shape):
        raise FragmentError(f"tensor {spec.name!r} of impossible shape")


def _check_cover(tensors: Sequence[TensorSpec], parts: Sequence[Slice]) -> None:
    """Raise unless the slices, in order, cover each tensor exactly, between rows."""
    ordered = sorted(parts, key=lambda part: (part.tensor, part.start))
    tensor, at = 0, 0
    for part in ordered:
        if part.tensor != tensor and at == tensors[tensor].size:
            tensor, at = tensor + 1, 0
        if part.tensor != tensor or tensor >= len(tensors) or part.start != at:
            raise FragmentError(
                f"slices that leave a gap or overlap at tensor {tensor}, element {at}"
            )
        spec = tensors[tensor]
        if not part.start < part.stop <= spec.size or part.stop % spec.row:
            raise FragmentError(f"a slice of tensor {tensor} that ends outside it or within a row")
        at = part.stop
    if tensor != len(tensors) - 1 or at != tensors[tensor].size:
        raise FragmentError(f"slices that end at tensor {tensor}, element {at}")
