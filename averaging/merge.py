"""Merging rules: from contributions to one pseudo-gradient, by coefficients anyone can check.

Every rule ends in the same form (DESIGN.md 8.4): a clip factor for each input, which tells its
maker what share of it counted, and a coefficient for each input and tensor group, from which G
follows by :func:`apply_coefficients` and nothing else. How the coefficients came about (norms and
angles in float64) need not agree to the last bit between machines, since they are published as
float32. They follow from :class:`Moments` alone, which can be summed leaf by leaf: :func:`merge`
does all of it on whole vectors and is the reference of :mod:`~dugnad.averaging.leafmerge`.

An input counts in proportion to its tokens. A plain mean weighs by tokens / steps, because progress
already grows with steps; a mean of directions weighs by tokens.

Clipping: an input's size is at most CLIP_TO_MEDIAN times the median of all (the plain median: the
mean of the middle two, so of two inputs none is ever clipped: one cannot say which is wrong). Its
size is its norm in the direction rules; in the mean, which multiplies by tokens / steps, it is its
norm per step. So a fast machine's many steps are not cut off, and claiming few steps to gain weight
gains nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dugnad.averaging.codecs import SMALLEST
from dugnad.averaging.fragments import EMBEDDING, Group
from dugnad.averaging.leaf import PRODUCT_CHUNK, squared
from dugnad.averaging.tree import LEAF_PARAMS, Vector

CLIP_TO_MEDIAN: Final = 3.0
"""An input may be this many times as large as the median one (DESIGN.md 8.4)."""

INPUTS_MAX: Final = 1024
"""Inputs of one merge; bounds the matrix of angles to 8 MiB a group."""

CANCELLED: Final = 0.1
"""Directions cancel when their mean is shorter than this share of what unrelated ones would leave.

Unrelated directions of weights w leave |w| / sum(w), 1/sqrt(M) for M equal ones. Guess, to be
measured.
"""

CENTRE_ROUNDS: Final = 20
"""Iterations of centred clipping at most (algorithms.md 5.1)."""

CENTRE_CLOSE: Final = 1e-6
"""Centred clipping stops when the centre moves less than this share of the clipping radius."""

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)

Matrix = npt.NDArray[np.float64]


class MergeError(ValueError):
    """Inputs that cannot be merged; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class MergeInput:
    """One contribution, decoded: as long as the fragment; tokens and steps are positive."""

    peer: bytes
    seq: int
    tokens: int
    steps: int
    vector: Vector


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The merged pseudo-gradient and how it came about; all numbers but G's are exactly float32.

    ``clips[i]`` in [0, 1] is the share of input i that counted; ``coefficients[i][g]`` is what its
    group g was multiplied by.
    """

    vector: Vector
    clips: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]


class Entry(Protocol):
    """What the weights follow from, beside the numbers: a contribution is one, too."""

    @property
    def peer(self) -> bytes:
        """Its maker."""
        ...

    @property
    def seq(self) -> int:
        """Its maker's count."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens behind it."""
        ...

    @property
    def steps(self) -> int:
        """Inner steps behind it."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """Clip factors by input and coefficients by input and group, as in :class:`MergeResult`."""

    clips: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The elements ``start`` to ``stop`` of a fragment: in one leaf and in one group."""

    group: int
    start: int
    stop: int


class Moments:
    """Inner products of the inputs over each group, in float64, summed span by span.

    Squares for the mean and whatever else only needs norms, all pairs for rules that need angles.
    The sums are the same bits for the same spans in the same order.
    """

    def __init__(self, count: int, groups: Sequence[Group], rule: str) -> None:
        self.pairs = [_needs_pairs(rule, group.kind) for group in groups]
        self.products: list[Matrix] = [
            np.zeros((count, count) if pairs else count, np.float64) for pairs in self.pairs
        ]
        self._wide = np.empty((count if any(self.pairs) else 0, PRODUCT_CHUNK), np.float64)

    def add(self, group: int, pieces: Sequence[Vector]) -> None:
        """Add one span of all inputs."""
        if not self.pairs[group]:
            for i, piece in enumerate(pieces):
                self.add_squares(group, i, piece)
            return
        size, total = pieces[0].size, self.products[group]
        for start in range(0, size, PRODUCT_CHUNK):
            stop = min(start + PRODUCT_CHUNK, size)
            for i, piece in enumerate(pieces):
                row = self._wide[i, : stop - start]
                np.copyto(row, piece[start:stop])
                total[i, : i + 1] += [
                    np.dot(row, other) for other in self._wide[: i + 1, : stop - start]
                ]

    def add_squares(self, group: int, index: int, piece: Vector) -> None:
        """Add one span of one input in a group without pairs."""
        self.products[group][index] += squared(piece)

    def put_squares(self, index: int, squares: Sequence[float]) -> None:
        """Set the squared norms of one input where no group has pairs."""
        for product, one in zip(self.products, squares, strict=True):
            product[index] = one

    def squares(self) -> Matrix:
        """Return the squared norms: row i is input i, column g is group g."""
        return np.stack([p.diagonal() if p.ndim == 2 else p for p in self.products], axis=1)

    def gram(self, group: int) -> Matrix:
        """Return the products of all pairs over a group that has them."""
        lower = self.products[group]
        return lower + np.tril(lower, -1).T


@dataclass(frozen=True, slots=True)
class _Problem:
    """What a rule works on: row i is input i, column g is group g."""

    moments: Moments
    groups: tuple[Group, ...]
    norms: Matrix
    clips: Matrix
    tokens: Matrix
    per_step: Matrix  # tokens / steps

    def mean(self) -> Matrix:
        """Return the coefficients of the weighted mean of the clipped inputs."""
        shares: Matrix = self.per_step * self.clips / self.per_step.sum()
        return shares


Rule = Callable[[_Problem, int], Matrix]
"""From a problem and a group number to that group's coefficients."""


def merge(inputs: Sequence[MergeInput], groups: Sequence[Group], *, rule: str) -> MergeResult:
    """Return the merge of ``inputs`` (ascending by peer and seq) by a rule of :data:`RULES`.

    ``groups`` must cover the vectors end to end. Raises :class:`MergeError` for no or too many
    inputs, wrong order or sizes, tokens or steps below 1, steps above tokens, or numbers that are
    not finite.
    """
    check_entries(inputs, groups, rule=rule)
    size = groups[-1].stop if groups else 0
    for one in inputs:
        if one.vector.shape != (size,) or one.vector.dtype != np.float32:
            raise MergeError(
                f"a {one.vector.dtype} vector of shape {one.vector.shape}, not {size} float32"
            )
    vectors = [one.vector for one in inputs]
    moments = Moments(len(inputs), groups, rule)
    for span in spans(groups):
        moments.add(span.group, [vector[span.start : span.stop] for vector in vectors])
    found = weigh(inputs, groups, moments, rule=rule)
    vector = apply_coefficients(vectors, found.coefficients, groups)
    if not np.isfinite(vector).all():
        raise MergeError("a merged vector that is not finite")
    return MergeResult(vector, found.clips, found.coefficients)


def weigh(
    inputs: Sequence[Entry], groups: Sequence[Group], moments: Moments, *, rule: str
) -> Weights:
    """Return the clip factors and coefficients of checked inputs with these moments.

    Raises :class:`MergeError` if they are not finite or a coefficient is beyond float32.
    """
    problem = _problem(inputs, tuple(groups), moments, by_step=rule == "mean")
    columns = [RULES[rule](problem, g) for g in range(len(groups))]
    return Weights(
        tuple(_float32(k) for k in problem.clips),
        tuple(tuple(_float32(column[i]) for column in columns) for i in range(len(inputs))),
    )


def apply_coefficients(
    vectors: Sequence[Vector],
    coefficients: Sequence[Sequence[float]],
    groups: Sequence[Group],
) -> Vector:
    """Return the sum over i of ``coefficients[i][g] * vectors[i]`` in every group g.

    Each product and each sum is one float32 operation, in the order given, so all machines get the
    same bits; elements do not depend on each other, so it may be done for any part of a fragment
    alone.
    """
    result = np.empty(vectors[0].size, np.float32)
    scratch = np.empty(min(result.size, LEAF_PARAMS), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for g, group in enumerate(groups):
            factors = [np.float32(row[g]) for row in coefficients]
            for start, stop in _cuts(group):
                part = slice(start, stop)
                total, product = result[part], scratch[: stop - start]
                np.multiply(vectors[0][part], factors[0], out=total)
                for vector, factor in zip(vectors[1:], factors[1:], strict=True):
                    np.multiply(vector[part], factor, out=product)
                    np.add(total, product, out=total)
    return result


def _mean(problem: _Problem, g: int) -> Matrix:
    """Weighted mean: the effect of an input is tokens times its progress per step."""
    return problem.mean()


def _radial(problem: _Problem, g: int) -> Matrix:
    """Radial-directional averaging: mean of norms times normalised mean of directions.

    Embeddings are averaged plainly, and so is a group whose directions cancel (algorithms.md 1.4).
    """
    if problem.groups[g].kind == EMBEDDING:
        return problem.mean()
    norms = problem.norms[:, g] * problem.clips
    radius = float((problem.tokens * norms).sum() / problem.tokens.sum())
    shares = problem.tokens / problem.tokens.sum()
    return _along(problem, g, shares, radius)


def _centred(problem: _Problem, g: int) -> Matrix:
    """Centred clipping: the mean of what lies near, and only a step towards what lies far.

    Embeddings: of the clipped vectors themselves. Other groups: of directions, at the median norm,
    which a minority cannot move far. The radius is the median distance to the centre at each round,
    so it follows the spread of honest inputs (algorithms.md 5.1, which leaves it to be tuned).
    """
    gram = problem.moments.gram(g)
    if problem.groups[g].kind == EMBEDDING:
        return _centre(gram, problem.clips, problem.per_step) * problem.clips
    unit = _inverse(problem.norms[:, g])
    shares = _centre(gram, unit, problem.tokens)
    radius = _weighted_median(problem.norms[:, g] * problem.clips, problem.tokens)
    return _along(problem, g, shares, radius)


RULES: Final[dict[str, Rule]] = {"mean": _mean, "radial": _radial, "centred": _centred}
"""The merging rules by their names in the manifest."""


def _along(problem: _Problem, g: int, shares: Matrix, radius: float) -> Matrix:
    """Return the coefficients of a vector of this length along the sum of shares * directions."""
    towards = shares * _inverse(problem.norms[:, g])
    length = math.sqrt(max(0.0, float(towards @ problem.moments.gram(g) @ towards)))
    unrelated = math.sqrt(float((shares**2).sum()))
    if length <= CANCELLED * unrelated:
        return problem.mean()
    return towards * (radius / length)


def _centre(gram: Matrix, scales: Matrix, weights: Matrix) -> Matrix:
    """Return the centred-clipping centre of x_i = scales[i] * vector_i, as shares of the x_i.

    Works in the span of the inputs: distances follow from the matrix of their products.
    """
    products = gram * np.outer(scales, scales)
    shares: Matrix = weights / weights.sum()
    for _ in range(CENTRE_ROUNDS):
        to_centre = products @ shares
        squared = np.diag(products) - 2.0 * to_centre + float(shares @ to_centre)
        distances = np.sqrt(np.maximum(squared, 0.0))
        radius = _weighted_median(distances, weights)
        if radius <= 0.0:
            break
        pull = weights * np.minimum(1.0, radius * _inverse(distances)) / weights.sum()
        move = pull - shares * pull.sum()
        shares = shares + move
        if math.sqrt(max(0.0, float(move @ products @ move))) <= CENTRE_CLOSE * radius:
            break
    return shares


def check_entries(inputs: Sequence[Entry], groups: Sequence[Group], *, rule: str) -> None:
    """Raise :class:`MergeError` for what :func:`merge` refuses before it looks at vectors."""
    if rule not in RULES:
        raise MergeError(f"no merging rule {rule!r}; there are {', '.join(RULES)}")
    if not 1 <= len(inputs) <= INPUTS_MAX:
        raise MergeError(f"{len(inputs)} inputs; 1 to {INPUTS_MAX} can be merged")
    keys = [(one.peer, one.seq) for one in inputs]
    if any(a >= b for a, b in itertools.pairwise(keys)):
        raise MergeError("inputs that do not ascend by peer and seq")
    at = 0
    for group in groups:
        if group.start != at or group.stop <= group.start:
            raise MergeError(f"tensor groups that leave a gap or overlap at element {at}")
        at = group.stop
    for one in inputs:
        if not 1 <= one.steps <= one.tokens:
            raise MergeError(f"{one.tokens} tokens in {one.steps} steps")


def spans(groups: Sequence[Group]) -> Iterator[Span]:
    """Yield the groups in order, cut where a leaf ends."""
    for g, group in enumerate(groups):
        for start, stop in _cuts(group):
            yield Span(g, start, stop)


def _needs_pairs(rule: str, kind: str) -> bool:
    """Return whether a rule asks for angles in groups of this kind."""
    return rule == "centred" or (rule == "radial" and kind != EMBEDDING)


def _problem(
    inputs: Sequence[Entry], groups: tuple[Group, ...], moments: Moments, *, by_step: bool
) -> _Problem:
    """Return the norms, weights and clip factors of checked inputs."""
    norms = np.sqrt(moments.squares())
    whole = np.sqrt((norms**2).sum(axis=1))
    if not np.isfinite(whole).all():
        raise MergeError("an input that is not finite")
    tokens = np.array([one.tokens for one in inputs], np.float64)
    steps = np.array([one.steps for one in inputs], np.float64)
    sizes = whole / steps if by_step else whole
    return _Problem(
        moments=moments,
        groups=groups,
        norms=norms,
        clips=_clips(sizes),
        tokens=tokens,
        per_step=tokens / steps,
    )


def _clips(sizes: Matrix) -> Matrix:
    """Return the factors in [0, 1] that bring each size to CLIP_TO_MEDIAN times the median of all.

    If more than half of the inputs are zero there is no scale to compare with, and nothing is
    clipped.
    """
    limit = CLIP_TO_MEDIAN * float(np.median(sizes))
    if limit <= 0.0:
        return np.ones_like(sizes)
    factors = np.minimum(1.0, limit * _inverse(sizes))
    factors[sizes == 0.0] = 1.0
    return np.asarray(factors.astype(np.float32), np.float64)


def _cuts(group: Group) -> Iterator[tuple[int, int]]:
    """Yield a group's range in pieces that end where leaves end."""
    start = group.start
    while start < group.stop:
        stop = min(group.stop, (start // LEAF_PARAMS + 1) * LEAF_PARAMS)
        yield start, stop
        start = stop


def _inverse(values: Matrix) -> Matrix:
    """Return 1 / values, and 0 where a value is 0: the direction of nothing is nothing."""
    result = np.zeros_like(values)
    np.divide(1.0, values, out=result, where=values > 0.0)
    return result


def _weighted_median(values: Matrix, weights: Matrix) -> float:
    """Return the smallest value with at least half of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(reached, reached[-1] / 2.0))])


def _float32(value: float) -> float:
    """Return the nearest float32, and 0 for what is below SMALLEST."""
    if abs(value) > _FLOAT32_MAX:
        raise MergeError("a coefficient beyond float32")
    nearest = float(np.float32(value))
    return nearest if abs(nearest) >= SMALLEST else 0.0
