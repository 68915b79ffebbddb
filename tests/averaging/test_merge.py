"""Merging rules: coefficients, clip factors and what attackers and slow peers can do to them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.fragments import EMBEDDING, MATRIX, VECTOR, Group
from dugnad.averaging.merge import (
    INPUTS_MAX,
    RULES,
    MergeError,
    MergeInput,
    apply_coefficients,
    merge,
)
from dugnad.averaging.tree import LEAF_PARAMS, Vector

EVERY_RULE = pytest.mark.parametrize("rule", list(RULES))
DIRECTION_RULES = pytest.mark.parametrize("rule", ["radial", "centred"])
ONE = [Group(0, 2, MATRIX)]


def inputs(
    *vectors: list[float] | Vector, tokens: list[int] | None = None, steps: list[int] | None = None
) -> list[MergeInput]:
    count = len(vectors)
    return [
        MergeInput(b"peer%03d" % i, 7, t, s, np.asarray(v, np.float32))
        for i, (v, t, s) in enumerate(
            zip(vectors, tokens or [100] * count, steps or [10] * count, strict=True)
        )
    ]


def noise(n: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


@EVERY_RULE
def test_one_input_is_taken_as_it_is(rule: str) -> None:
    result = merge(inputs([3.0, 4.0]), ONE, rule=rule)
    np.testing.assert_allclose(result.vector, [3.0, 4.0], rtol=1e-6)
    assert result.clips == (1.0,)


@EVERY_RULE
def test_equal_inputs_merge_to_themselves(rule: str) -> None:
    groups = [Group(0, 3, EMBEDDING), Group(3, 8, MATRIX)]
    vector = noise(8, 0)
    result = merge(inputs(*[vector] * 5), groups, rule=rule)
    np.testing.assert_allclose(result.vector, vector, rtol=1e-5)


@EVERY_RULE
@pytest.mark.parametrize("seed", range(5))
def test_numbers_are_float32_and_the_vector_follows_from_them(rule: str, seed: int) -> None:
    n = LEAF_PARAMS + 50
    groups = [Group(0, 40, EMBEDDING), Group(40, n - 3, MATRIX), Group(n - 3, n, VECTOR)]
    found = inputs(*(noise(n, 10 * seed + i) for i in range(4)), tokens=[100, 200, 50, 999])
    result = merge(found, groups, rule=rule)
    for number in (*result.clips, *(c for row in result.coefficients for c in row)):
        assert float(np.float32(number)) == number
    again = apply_coefficients([one.vector for one in found], result.coefficients, groups)
    assert again.tobytes() == result.vector.tobytes()


def test_the_sum_is_one_float32_operation_at_a_time_in_order() -> None:
    vectors = [noise(300, i) for i in range(3)]
    factors = [0.3, 0.7, 0.1]
    by_hand = np.float32(0.3) * vectors[0]
    by_hand = by_hand + np.float32(0.7) * vectors[1]
    by_hand = by_hand + np.float32(0.1) * vectors[2]
    got = apply_coefficients(vectors, [[f] for f in factors], [Group(0, 300, MATRIX)])
    assert got.tobytes() == by_hand.tobytes()


def test_a_part_can_be_recomputed_alone() -> None:
    vectors = [noise(300, i) for i in range(3)]
    rows = [[0.3, 0.1], [0.7, 0.2], [0.1, 0.3]]
    whole = apply_coefficients(vectors, rows, [Group(0, 100, MATRIX), Group(100, 300, MATRIX)])
    part = apply_coefficients(
        [v[50:150] for v in vectors], rows, [Group(0, 50, MATRIX), Group(50, 100, MATRIX)]
    )
    assert part.tobytes() == whole[50:150].tobytes()


def test_the_mean_weighs_by_tokens_per_step() -> None:
    result = merge(
        inputs([4.0, 0.0], [0.0, 1.0], tokens=[400, 100], steps=[40, 10]), ONE, rule="mean"
    )
    np.testing.assert_allclose(result.vector, [2.0, 0.5])
    np.testing.assert_allclose(result.coefficients, [[0.5], [0.5]])


def test_a_fast_peer_among_slow_ones_is_not_clipped_in_the_mean() -> None:
    """Sixteen times the steps, and progress that grows with them: all of it counts."""
    slow = [[1.0, 0.0], [0.0, 1.0], [0.7, 0.7]]
    found = inputs(*slow, [0.0, 16.0], tokens=[100] * 3 + [1600], steps=[1] * 3 + [16])
    assert merge(found, ONE, rule="mean").clips == (1.0,) * 4


def test_claiming_one_step_does_not_gain_weight_beyond_the_clip() -> None:
    honest = [noise(100, i) for i in range(4)]
    liar = noise(100, 9)
    groups = [Group(0, 100, MATRIX)]
    result = merge(inputs(*honest, liar, steps=[20] * 4 + [1]), groups, rule="mean")
    effects = [
        abs(row[0]) * norm(v) for row, v in zip(result.coefficients, [*honest, liar], strict=True)
    ]
    assert effects[-1] <= 3.3 * max(effects[:-1])
    assert result.clips[-1] < 0.2


@DIRECTION_RULES
def test_direction_rules_clip_the_norm_to_three_times_the_median(rule: str) -> None:
    found = inputs([1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1000.0, 0.0])
    result = merge(found, ONE, rule=rule)
    median = (1.0 + np.sqrt(2.0)) / 2
    assert result.clips[:3] == (1.0, 1.0, 1.0)
    assert result.clips[3] == pytest.approx(3 * median / 1000)
    assert norm(result.vector) <= 3 * median


@EVERY_RULE
def test_of_two_inputs_none_is_clipped(rule: str) -> None:
    assert merge(inputs([1.0, 0.0], [0.0, 1e6]), ONE, rule=rule).clips == (1.0, 1.0)


def test_radial_keeps_the_mean_norm_of_unrelated_directions() -> None:
    vectors = [np.eye(16, dtype=np.float32)[i] * (1 + i % 2) for i in range(16)]
    groups = [Group(0, 16, MATRIX)]
    radial, mean = (merge(inputs(*vectors), groups, rule=rule) for rule in ("radial", "mean"))
    assert norm(radial.vector) == pytest.approx(1.5, rel=1e-5)
    assert norm(mean.vector) < 0.45
    np.testing.assert_allclose(radial.vector, radial.vector[0], rtol=1e-5)


def test_radial_is_the_published_formula() -> None:
    vectors = [noise(50, i) * (1 + i) for i in range(3)]
    tokens = np.array([100, 300, 50])
    result = merge(inputs(*vectors, tokens=tokens.tolist()), [Group(0, 50, MATRIX)], rule="radial")
    norms = np.array([norm(v) for v in vectors])
    directions = sum(w * v / n for w, v, n in zip(tokens, vectors, norms, strict=True))
    expected = (tokens @ norms) / tokens.sum() * directions / np.linalg.norm(directions)
    np.testing.assert_allclose(result.vector, expected, rtol=1e-4, atol=1e-6)


@DIRECTION_RULES
def test_embeddings_are_averaged_plainly(rule: str) -> None:
    found = inputs([1.0, 0.0], [0.0, 1.0])
    result = merge(found, [Group(0, 2, EMBEDDING)], rule=rule)
    np.testing.assert_allclose(result.vector, [0.5, 0.5], rtol=1e-6)


@DIRECTION_RULES
def test_directions_that_cancel_fall_back_to_the_mean(rule: str) -> None:
    found = inputs([1.0, 1.0], [-2.0, -2.0], tokens=[100, 100])
    result = merge(found, ONE, rule=rule)
    np.testing.assert_allclose(result.vector, [-0.5, -0.5], rtol=1e-6)


@EVERY_RULE
def test_zeros_merge_to_zero_and_count_among_others(rule: str) -> None:
    groups = [Group(0, 1, EMBEDDING), Group(1, 2, MATRIX)]
    nothing = merge(inputs([0.0, 0.0], [0.0, 0.0]), groups, rule=rule)
    assert not nothing.vector.any()
    assert nothing.clips == (1.0, 1.0)
    some = merge(inputs([0.0, 0.0], [1.0, 1.0], [1.0, 1.0]), groups, rule=rule)
    assert 0.0 < some.vector[1] <= 1.0


def test_centred_clipping_resists_a_third_of_attackers() -> None:
    truth = noise(200, 99)
    honest = [truth + noise(200, i) for i in range(8)]
    attack = [-10.0 * truth] * 4
    groups = [Group(0, 200, MATRIX)]
    found = inputs(*honest, *attack)
    cosine = {}
    for rule in RULES:
        vector = merge(found, groups, rule=rule).vector
        cosine[rule] = float(vector @ truth) / (norm(vector) * norm(truth))
    assert cosine["mean"] < 0.0
    assert cosine["centred"] > 0.8
    assert norm(merge(found, groups, rule="centred").vector) < 2 * norm(truth)


def test_centred_clipping_resists_attackers_in_embeddings() -> None:
    truth = noise(200, 99)
    found = inputs(*[truth + noise(200, i) for i in range(8)], *[-3.0 * truth] * 4)
    groups = [Group(0, 200, EMBEDDING)]
    assert float(merge(found, groups, rule="mean").vector @ truth) < 0.0
    vector = merge(found, groups, rule="centred").vector
    assert float(vector @ truth) / (norm(vector) * norm(truth)) > 0.8


@given(st.permutations(range(5)), st.sampled_from(list(RULES)))
def test_no_rule_depends_on_who_comes_first(order: list[int], rule: str) -> None:
    vectors = [noise(30, i) for i in range(5)]
    groups = [Group(0, 30, MATRIX)]
    straight = merge(inputs(*vectors), groups, rule=rule).vector
    turned = merge(inputs(*[vectors[i] for i in order]), groups, rule=rule).vector
    np.testing.assert_allclose(turned, straight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@EVERY_RULE
def test_inputs_that_are_not_finite_are_refused(rule: str, value: float) -> None:
    with pytest.raises(MergeError, match="not finite"):
        merge(inputs([1.0, 2.0], [value, 1.0]), ONE, rule=rule)


def test_a_sum_that_is_not_finite_is_refused() -> None:
    with pytest.raises(MergeError, match="merged vector"):
        merge(inputs([3e38, 3e38], [3e38, -3e38]), ONE, rule="radial")


def test_a_coefficient_beyond_float32_is_refused() -> None:
    with pytest.raises(MergeError, match="beyond float32"):
        merge(inputs([1e-25, 0.0], [0.0, 3e38]), ONE, rule="radial")


def test_wrong_inputs_are_refused_with_the_reason() -> None:
    good = inputs([1.0, 0.0], [0.0, 1.0])
    for bad, groups, reason in (
        ([], ONE, "0 inputs"),
        (good * (INPUTS_MAX // 2 + 1), ONE, "inputs"),
        (good[::-1], ONE, "ascend"),
        ([good[0], good[0]], ONE, "ascend"),
        (good, [Group(0, 1, MATRIX)], "not 1 float32"),
        (good, [Group(0, 1, MATRIX), Group(0, 2, MATRIX)], "gap or overlap"),
        (inputs([1.0, 0.0], tokens=[5], steps=[6]), ONE, "5 tokens in 6 steps"),
        (inputs([1.0, 0.0], tokens=[0], steps=[0]), ONE, "0 tokens"),
    ):
        with pytest.raises(MergeError, match=reason):
            merge(bad, groups, rule="mean")
    with pytest.raises(MergeError, match="no merging rule 'median'"):
        merge(good, ONE, rule="median")


def test_two_contributions_of_one_peer_go_by_their_seq() -> None:
    first, second = (MergeInput(b"a", seq, 10, 1, np.ones(2, np.float32)) for seq in (3, 4))
    assert merge([first, second], ONE, rule="mean").clips == (1.0, 1.0)
