"""The int4 codec: half a scale of error at most, and a decoder that any bytes may be fed to."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.codec_base import SMALLEST, CodecError
from dugnad.averaging.codec_int4 import INT4_BLOCK, Int4Codec
from dugnad.averaging.tree import LEAF_PARAMS, Vector

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled

INT4 = Int4Codec()
FLOATS = st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True)


def integers(n: int) -> Vector:
    """Integers in [-512, 512) by a hash: the same on every machine."""
    mixed = np.arange(1, n + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    return ((mixed >> np.uint32(22)).astype(np.int64) - 512).astype(np.float32)


def leaf(scales: list[float], *pairs: tuple[int, int]) -> bytes:
    """Bytes of a leaf, from scales that are bfloat16 and (low, high) integers."""
    halves = (np.array(scales, np.float32).view(np.uint32) >> np.uint32(16)).astype("<u2")
    return halves.tobytes() + bytes((low & 15) | (high & 15) << 4 for low, high in pairs)


@given(st.lists(FLOATS, min_size=1, max_size=200))
def test_it_errs_by_at_most_half_a_scale(values: list[float]) -> None:
    x = np.array(values, np.float32)
    got = INT4.decode(INT4.encode(x), x.size).astype(np.float64)
    for start in range(0, x.size, INT4_BLOCK):
        part = slice(start, start + INT4_BLOCK)
        scale = float(np.abs(x[part]).max()) / 7.0
        if scale < SMALLEST / 2:
            assert not got[part].any()
        elif scale <= 2.0**119:
            small = 7.0 * SMALLEST * (scale < 2 * SMALLEST)
            # 7 scales may be 2**-9 short of the peak; else it is half a scale, itself so rounded
            bound = max(scale * 0.5 * (1.0 + 2.0**-8), small)
            assert (np.abs(got[part] - x[part]) <= bound).all()


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 127, 129, 1000, LEAF_PARAMS])
def test_integers_up_to_seven_come_back_as_they_are(n: int) -> None:
    x = (np.arange(n) % 15 - 7).astype(np.float32)
    x[::INT4_BLOCK] = 7.0
    np.testing.assert_array_equal(INT4.decode(INT4.encode(x), n), x)


def test_it_takes_four_bits_and_a_quarter() -> None:
    assert INT4.bits_per_param(10 * LEAF_PARAMS) == 4.25


def test_halves_of_a_leaf_share_bytes() -> None:
    data = leaf([0.5], (1, -2), (7, -7), (-1, 0))
    expected = np.array([0.5, 3.5, -0.5, -1.0, -3.5], np.float32)
    np.testing.assert_array_equal(INT4.decode(data, 5), expected)


def test_it_rounds_half_to_even() -> None:
    x = np.array([7.0, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    expected = np.array([7, 0, 2, 2, 0, -2], np.float32)
    np.testing.assert_array_equal(INT4.decode(INT4.encode(x), 6), expected)


def test_it_clips_what_is_beyond_its_largest_scale() -> None:
    x = np.array([3.4e38, -3.4e38, 1.0], np.float32)
    expected = np.array([7.0, -7.0, 0.0], np.float32) * np.float32(2.0**120)
    np.testing.assert_array_equal(INT4.decode(INT4.encode(x), 3), expected)


def test_blocks_do_not_disturb_each_other() -> None:
    x = np.concatenate([integers(64) * np.float32(1e-9), integers(64)])
    got = INT4.decode(INT4.encode(x), 128)
    assert np.abs(got[:64] - x[:64]).max() < 4e-8


def test_scales_too_small_decode_to_zero() -> None:
    assert not INT4.decode(leaf([2.0**-101], (7, -3)), 2).any()
    assert INT4.decode(leaf([SMALLEST], (7, -3)), 2).all()


@pytest.mark.parametrize(
    ("data", "n", "reason"),
    [
        (leaf([float("nan")], (1, 1)), 2, "scale"),
        (leaf([float("inf")], (1, 1)), 2, "scale"),
        (leaf([-1.0], (1, 1)), 2, "negative"),
        (leaf([-0.0], (1, 1)), 2, "negative"),
        (leaf([2.0**121], (1, 1)), 2, "beyond"),
        (leaf([1.0], (-8, 1)), 2, "-8"),
        (leaf([1.0], (1, -8)), 2, "-8"),
        (leaf([1.0], (1, 3)), 1, "padding"),
        (leaf([1.0], (1, 1)), 3, "were due"),
    ],
)
def test_it_refuses_what_no_encoder_writes(data: bytes, n: int, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        INT4.decode(data, n)


def test_the_format_is_the_one_of_version_1() -> None:
    """Golden digests: a change of these is a change of the format."""
    data = INT4.encode(integers(LEAF_PARAMS + 77))
    found = INT4.decode(data, LEAF_PARAMS + 77).astype("<f4").tobytes()
    assert hashlib.sha256(data).hexdigest()[:32] == ENCODED
    assert hashlib.sha256(found).hexdigest()[:32] == DECODED


ENCODED = "f105923a2df932dd96da32055510bff5"
DECODED = "afeb5bbc68c7711db6b0f92fa612c752"
