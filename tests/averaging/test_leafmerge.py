"""Merging leaf by leaf has the bits of merging whole vectors, and needs little memory for it."""

import itertools
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.buffers import AnchorState, FragmentBuffers
from dugnad.averaging.codecs import CODECS, COMMIT_CODECS
from dugnad.averaging.fragments import EMBEDDING, MATRIX, VECTOR, Group
from dugnad.averaging.leaf import Encoded
from dugnad.averaging.leafmerge import (
    InputError,
    LeafMerge,
    combine,
    squares_of,
    weigh_encoded,
)
from dugnad.averaging.merge import RULES, MergeError, MergeInput, Weights, merge
from dugnad.averaging.outer import OuterError, Rates, bits_of
from dugnad.averaging.tree import LEAF_PARAMS, leaf_hashes

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled

ETA, MU = bits_of(0.7), bits_of(0.5)
RATES = Rates.of_bits(eta_bits=ETA, mu_bits=MU)
FACTOR = np.float32(3.1)
SIZES = [1, 700, LEAF_PARAMS, LEAF_PARAMS + 1, 2 * LEAF_PARAMS + 4321]
KINDS = [EMBEDDING, MATRIX, VECTOR]


@dataclass(frozen=True)
class Case:
    """What is merged: payloads, and the same as whole vectors."""

    groups: tuple[Group, ...]
    encoded: list[Encoded]
    inputs: list[MergeInput]
    state: AnchorState


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.sampled_from(SIZES))
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=4))})
    groups = tuple(Group(a, b, draw(st.sampled_from(KINDS))) for a, b in itertools.pairwise(cuts))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    encoded, inputs = [], []
    for i in range(draw(st.integers(1, 5))):
        scale = draw(st.sampled_from([0.0, 2.0**-99, 1e-3, 1.0, 1e4, 1e30]))
        vector = (rng.standard_normal(n) * scale).astype(np.float32)
        codec = CODECS[draw(st.sampled_from(sorted(CODECS)))]
        encoded.append(Encoded.of(codec, codec.encode(vector), n))
        steps = draw(st.integers(1, 50))
        tokens = steps * draw(st.integers(1, 1000))
        decoded = codec.decode(encoded[-1].payload, n)
        inputs.append(MergeInput(bytes([i]) * 32, 3, tokens, steps, decoded))
    theta, momentum = rng.standard_normal((2, n)).astype(np.float32)
    return Case(groups, encoded, inputs, AnchorState.of(theta, momentum))


def whole(case: Case, rule: str, codec: str) -> tuple[Weights, LeafMerge]:
    """The reference: simple functions over whole vectors."""
    result = merge(case.inputs, case.groups, rule=rule)
    payload = CODECS[codec].encode(result.vector)
    state = FragmentBuffers.advance(case.state, payload, CODECS[codec], eta_bits=ETA, mu_bits=MU)
    decoded = CODECS[codec].decode(payload, result.vector.size)
    rounding = (result.vector - decoded) * FACTOR
    bounds = Encoded.of(CODECS[codec], payload, decoded.size).bounds
    made = LeafMerge(payload, leaf_hashes(payload, bounds), state, rounding)
    return Weights(result.clips, result.coefficients), made


def by_leaf(case: Case, rule: str, codec: str) -> tuple[Weights, LeafMerge]:
    weights = weigh_encoded(case.inputs, case.encoded, case.groups, rule=rule)
    made = combine(
        case.encoded,
        weights.coefficients,
        case.groups,
        codec=COMMIT_CODECS[codec],
        state=case.state,
        rates=RATES,
        rounding_factor=FACTOR,
    )
    return weights, made


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from(list(RULES)), st.sampled_from(list(COMMIT_CODECS)))
def test_leaf_by_leaf_has_the_bits_of_the_reference(case: Case, rule: str, codec: str) -> None:
    refused = ""
    try:
        weights, due = whole(case, rule, codec)
    except (MergeError, OuterError) as fault:
        refused = fault.reason
    if refused:
        with pytest.raises((MergeError, OuterError), match=refused):
            by_leaf(case, rule, codec)
        return
    found, made = by_leaf(case, rule, codec)
    assert found == weights
    assert made.payload == due.payload
    assert made.leaves == due.leaves
    np.testing.assert_array_equal(made.rounding, due.rounding)  # but for the sign of a zero
    assert made.state.theta.tobytes() == due.state.theta.tobytes()
    assert made.state.momentum.tobytes() == due.state.momentum.tobytes()
    assert made.state.theta_root == due.state.theta_root
    assert made.state.momentum_leaves == due.state.momentum_leaves


@settings(max_examples=15, deadline=None)
@given(cases(), st.sampled_from(list(RULES)))
def test_norms_known_beforehand_change_nothing(case: Case, rule: str) -> None:
    known: list[tuple[float, ...] | None] = [squares_of(one, case.groups) for one in case.encoded]
    known[0] = None  # not yet
    try:
        due = weigh_encoded(case.inputs, case.encoded, case.groups, rule=rule)
    except MergeError:
        return  # the test above compares refusals
    assert due == weigh_encoded(case.inputs, case.encoded, case.groups, rule=rule, squares=known)


def plain_case(n: int, count: int) -> Case:
    vectors = [np.random.default_rng(i).standard_normal(n).astype(np.float32) for i in range(count)]
    groups = (Group(0, n // 3, MATRIX), Group(n // 3, n, EMBEDDING))
    codec = CODECS["int8"]
    encoded = [Encoded.of(codec, codec.encode(one), n) for one in vectors]
    inputs = [MergeInput(bytes([i]) * 32, 1, 100, 10, one) for i, one in enumerate(vectors)]
    return Case(groups, encoded, inputs, AnchorState.fresh(vectors[0]))


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_input_is_named(rule: str) -> None:
    case = plain_case(3000, 3)
    broken = b"\xff" * len(case.encoded[1].payload)
    case.encoded[1] = Encoded.of(CODECS["int8"], broken, 3000)
    with pytest.raises(InputError, match="scale") as caught:
        by_leaf(case, rule, "int8")
    assert caught.value.index == 1


def test_inputs_of_another_size_are_refused() -> None:
    case = plain_case(3000, 2)
    case.encoded[1] = Encoded.of(CODECS["int8"], CODECS["int8"].encode(np.zeros(9, np.float32)), 9)
    with pytest.raises(MergeError, match="9 parameters, not 3000"):
        by_leaf(case, "mean", "int8")


@pytest.mark.parametrize(("rule", "leaves"), [("mean", 8), ("centred", 8 + 12)])
def test_a_merge_of_many_holds_its_results_and_a_few_leaves(rule: str, leaves: int) -> None:
    n, count = 10 * LEAF_PARAMS, 12
    case = plain_case(n, count)
    results = 3 * 4 * n + 2 * len(case.encoded[0].payload)  # anchors, rounding; payload as made
    tracemalloc.start()
    try:
        by_leaf(case, rule, "int8")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < results + leaves * 4 * LEAF_PARAMS
    assert peak < count * 4 * n  # less than the decoded inputs alone
