"""The outer step: the same bits as a plain-Python copy that rounds after each operation."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging import outer
from dugnad.averaging.codecs import COMMIT_CODECS, SMALLEST
from dugnad.averaging.outer import OuterError, OuterState, Rates, bits_of, float_of, step
from dugnad.averaging.tree import LEAF_PARAMS, Vector

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled


def rates(eta: float, mu: float) -> Rates:
    return Rates.of_bits(eta_bits=bits_of(eta), mu_bits=bits_of(mu))


def single(value: float) -> float:
    """Round to float32: exact after one double operation, which has more than twice the bits."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def plain_step(theta: float, b: float, g: float, eta: float, mu: float) -> tuple[float, float]:
    eta, mu, direction = single(eta), single(mu), g
    if mu:
        b = single(single(mu * b) + g)
        b = b if abs(b) >= SMALLEST else 0.0
        direction = single(g + single(mu * b))
    theta = single(theta - single(eta * direction))
    return (theta if abs(theta) >= SMALLEST else 0.0), b


def array(*values: float) -> Vector:
    return np.array(values, np.float32)


VALUES = st.floats(-1e6, 1e6, width=32) | st.floats(-(2.0**-96), 2.0**-96, width=32)
ELEMENTS = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=30)


@given(ELEMENTS, st.sampled_from([0.4, 0.7, 1.0]), st.sampled_from([0.0, 0.5, 0.9]))
def test_the_step_has_the_bits_of_plain_python(
    elements: list[tuple[float, float, float]], eta: float, mu: float
) -> None:
    theta, momentum, gradient = (array(*column) for column in zip(*elements, strict=True))
    after = step(OuterState(theta, momentum), gradient, rates(eta, mu))
    expected = [plain_step(*element, eta, mu) for element in elements]
    assert after.theta.tolist() == [one for one, _ in expected]
    assert after.momentum.tolist() == [one for _, one in expected]


def test_without_momentum_and_at_rate_one_the_gradient_is_subtracted() -> None:
    after = step(OuterState(array(3.0), array(0.0)), array(1.0), rates(1.0, 0.0))
    assert after.theta.tolist() == [2.0]


def test_momentum_dies_out_instead_of_becoming_subnormal() -> None:
    state = OuterState(array(1.0), array(1e-4))
    for _ in range(113):  # where it would be subnormal (schedules.md 4.2)
        state = step(state, array(0.0), rates(0.7, 0.5))
    assert state.momentum.tolist() == [0.0]


def test_the_step_changes_no_argument_and_any_leaf_is_like_the_whole() -> None:
    n = LEAF_PARAMS + 100
    random = np.random.default_rng(1)
    theta, momentum, gradient = random.standard_normal((3, n)).astype(np.float32)
    copies = theta.copy(), momentum.copy(), gradient.copy()
    whole = step(OuterState(theta, momentum), gradient, rates(0.7, 0.5))
    part = slice(LEAF_PARAMS, n)
    leaf = step(OuterState(theta[part], momentum[part]), gradient[part], rates(0.7, 0.5))
    np.testing.assert_array_equal(whole.theta[part], leaf.theta)
    np.testing.assert_array_equal(whole.momentum[part], leaf.momentum)
    for array_, copy in zip((theta, momentum, gradient), copies, strict=True):
        np.testing.assert_array_equal(array_, copy)


def test_results_that_are_not_finite_are_refused_without_a_warning() -> None:
    big = array(3e38)
    with pytest.raises(OuterError, match="momentum"):
        step(OuterState(array(0.0), big), big, rates(1.0, 0.9))
    with pytest.raises(OuterError, match="anchor"):
        step(OuterState(-big, array(0.0)), big, rates(1.0, 0.0))
    with pytest.raises(OuterError, match="momentum"):
        step(OuterState(big, array(0.0)), array(float("nan")), rates(1.0, 0.5))
    with pytest.raises(OuterError, match="anchor"):
        step(OuterState(big, array(0.0)), array(float("nan")), rates(1.0, 0.0))


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="differ"):
        step(OuterState(array(1.0), array(1.0)), array(1.0, 2.0), rates(1.0, 0.0))


@given(st.floats(width=32, allow_nan=False))
def test_rates_travel_as_bits(value: float) -> None:
    assert float_of(bits_of(value)) == value


@pytest.mark.parametrize("eta", [0.0, -0.1, 2.5, float("nan"), float("inf"), 1e-40])
def test_a_learning_rate_out_of_range_is_refused(eta: float) -> None:
    with pytest.raises(OuterError, match="learning rate"):
        rates(eta, 0.5)


@pytest.mark.parametrize("mu", [-0.1, 1.0, float("nan"), 1e-40])
def test_a_momentum_out_of_range_is_refused(mu: float) -> None:
    with pytest.raises(OuterError, match="momentum"):
        rates(0.7, mu)


def test_rates_of_more_than_32_bits_are_refused() -> None:
    for bits in (-1, 1 << 32):
        with pytest.raises(OuterError, match="32 bits"):
            float_of(bits)


def test_this_machine_conforms() -> None:
    assert outer.conformance() is None


def test_the_conformance_vector_tells_a_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = outer._conformance_state

    def faulty() -> OuterState:
        state = honest()
        state.momentum.view(np.uint32)[17] ^= 1
        return state

    monkeypatch.setattr(outer, "_conformance_state", faulty)
    reason = outer.conformance()
    assert reason is not None
    assert "momentum" in reason


def test_a_refused_conformance_vector_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing() -> OuterState:
        raise OuterError("the processor lost a bit")

    monkeypatch.setattr(outer, "_conformance_state", refusing)
    assert outer.conformance() == "the conformance vector was refused: the processor lost a bit"


def test_the_conformance_constants_are_those_of_plain_python() -> None:
    """The digests in the source, found again without any numpy arithmetic in the step."""
    n = outer._CONFORMANCE_PARAMS
    theta = outer._integers(n, 1) * np.float32(2.0**-26)
    theta[:: outer._TINY_LANES] = 0.0
    state = [(float(one), 0.0) for one in theta]
    for number, (eta, mu) in enumerate(outer._CONFORMANCE_RATES):
        for index, (name, codec) in enumerate(COMMIT_CODECS.items()):
            data = outer._conformance_payload(name, n, seed=10 * number + index)
            gradient = codec.decode(data, n).tolist()
            state = [
                plain_step(t, b, g, eta, mu) for (t, b), g in zip(state, gradient, strict=True)
            ]
    found = [array(*column) for column in zip(*state, strict=True)]
    assert outer._digests(found) == outer._CONFORMANCE_DIGESTS
