"""Codecs: exact sizes, bounded errors, and decoders that any bytes may be fed to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.codecs import (
    COMMIT_CODECS,
    FLOAT16_MAX,
    HAND_IN_ONLY,
    INT8_BLOCK,
    SMALLEST,
    Codec,
    CodecError,
    leaf_bounds,
    settle_range,
)
from dugnad.averaging.tree import LEAF_PARAMS, Vector

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled

CODECS = COMMIT_CODECS | HAND_IN_ONLY
ALL = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
LENGTHS = [1, 5, INT8_BLOCK, INT8_BLOCK + 1, LEAF_PARAMS, LEAF_PARAMS + 1, 2 * LEAF_PARAMS + 77]


def noise(n: int, *, seed: int = 0, size: float = 1.0) -> Vector:
    return (np.random.default_rng(seed).standard_normal(n) * size).astype(np.float32)


def int8_block(scale: float, codes: list[int]) -> bytes:
    return np.array([scale], "<f4").tobytes() + np.array(codes, np.int8).tobytes()


@ALL
@pytest.mark.parametrize("n", LENGTHS)
def test_the_size_is_known_before_encoding(codec: Codec, n: int) -> None:
    data = codec.encode(noise(n))
    assert len(data) == codec.encoded_size(n)
    assert codec.bits_per_param(n) == 8 * len(data) / n


def test_sizes_are_those_of_the_format() -> None:
    sizes = {name: codec.encoded_size(LEAF_PARAMS + 1) for name, codec in CODECS.items()}
    assert sizes == {
        "float32": 262_148,
        "float16": 131_074,
        "int8": 65_536 + 64 * 4 + 1 + 4,
        "int4": 32_768 + 1024 * 2 + 1 + 2,
        "topk-25": 10_616 + 10,
        "topk-12.5": 6360 + 10,
        "topk-6.25": 3720 + 10,
        "topk-3.12": 2144 + 10,
        "topk-1.56": 1228 + 10,
        "topk-0.78": 706 + 10,
    }


@ALL
def test_nothing_encodes_to_nothing(codec: Codec) -> None:
    assert codec.encode(np.empty(0, np.float32)) == b""
    assert codec.decode(b"", 0).size == 0
    assert leaf_bounds(codec, 0) == []
    assert codec.bits_per_param(0) == 0.0


@ALL
@pytest.mark.parametrize("n", LENGTHS)
def test_each_leaf_is_encoded_by_itself(codec: Codec, n: int) -> None:
    x = noise(n)
    data = codec.encode(x)
    bounds = leaf_bounds(codec, n)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(data)
    for i, (first, last) in enumerate(bounds):
        leaf = x[i * LEAF_PARAMS : (i + 1) * LEAF_PARAMS]
        assert codec.encode(leaf) == data[first:last]
        np.testing.assert_array_equal(
            codec.decode(data[first:last], leaf.size),
            codec.decode(data, n)[i * LEAF_PARAMS : (i + 1) * LEAF_PARAMS],
        )


@ALL
def test_what_was_decoded_encodes_to_itself_within_rounding(codec: Codec) -> None:
    once = codec.decode(codec.encode(noise(3000)), 3000)
    again = codec.decode(codec.encode(once), 3000)
    np.testing.assert_allclose(again, once, rtol=1e-6)


FLOATS = st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True)


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_float32_is_exact_but_for_what_counts_as_zero(values: list[float]) -> None:
    x = np.array(values, np.float32)
    codec = CODECS["float32"]
    expected = np.where(np.abs(x) < np.float32(SMALLEST), np.float32(0.0), x)
    np.testing.assert_array_equal(codec.decode(codec.encode(x), x.size), expected)


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_float16_clips_and_errs_by_at_most_half_its_last_place(values: list[float]) -> None:
    x = np.array(values, np.float32)
    codec = CODECS["float16"]
    got = codec.decode(codec.encode(x), x.size).astype(np.float64)
    clipped = np.clip(x.astype(np.float64), -FLOAT16_MAX, FLOAT16_MAX)
    bound = np.maximum(np.abs(clipped) * 2.0**-11, 2.0**-25)
    assert (np.abs(got - clipped) <= bound).all()


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_int8_errs_by_at_most_half_a_scale(values: list[float]) -> None:
    x = np.array(values, np.float32)
    codec = CODECS["int8"]
    got = codec.decode(codec.encode(x), x.size)
    scale = float(np.abs(x).max()) / 127.0
    if scale < SMALLEST / 2:
        assert not got.any()
    elif scale <= 2.0**119:
        bound = max(scale * 0.5 * (1.0 + 1e-4), 127.0 * SMALLEST * (scale < 2 * SMALLEST))
        assert (np.abs(got.astype(np.float64) - x) <= bound).all()


def test_int8_clips_what_is_beyond_its_largest_scale() -> None:
    x = np.array([3.4e38, -3.4e38, 1.0], np.float32)
    got = CODECS["int8"].decode(CODECS["int8"].encode(x), 3)
    np.testing.assert_array_equal(got, np.array([127.0, -127.0, 0.0], np.float32) * 2.0**120)


def test_int8_blocks_do_not_disturb_each_other() -> None:
    x = np.concatenate([noise(INT8_BLOCK, size=1e-6), noise(INT8_BLOCK, size=1e6)])
    got = CODECS["int8"].decode(CODECS["int8"].encode(x), x.size)
    assert np.abs(got[:INT8_BLOCK] - x[:INT8_BLOCK]).max() < 1e-7


def test_int8_is_one_multiply_of_code_and_scale() -> None:
    data = int8_block(0.1, [1, -2, 127, -127, 0])
    expected = np.array([1, -2, 127, -127, 0], np.float32) * np.float32(0.1)
    np.testing.assert_array_equal(CODECS["int8"].decode(data, 5), expected)


def test_int8_rounds_half_to_even() -> None:
    x = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32)
    got = CODECS["int8"].decode(CODECS["int8"].encode(x), 6)
    np.testing.assert_array_equal(got, np.array([127, 0, 2, 2, 0, -2], np.float32))


def test_scales_too_small_decode_to_zero() -> None:
    below = float(np.nextafter(np.float32(SMALLEST), np.float32(0.0)))
    assert not CODECS["int8"].decode(int8_block(below, [127, -3]), 2).any()
    assert CODECS["int8"].decode(int8_block(SMALLEST, [127, -3]), 2).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (int8_block(float("nan"), [1]), "scale"),
        (int8_block(float("inf"), [1]), "scale"),
        (int8_block(-1.0, [1]), "negative"),
        (int8_block(-0.0, [1]), "negative"),
        (int8_block(2.0**121, [1]), "beyond"),
        (int8_block(1.0, [-128]), "-128"),
    ],
)
def test_int8_refuses_what_no_encoder_writes(data: bytes, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        CODECS["int8"].decode(data, 1)


@pytest.mark.parametrize(("name", "dtype"), [("float32", "<f4"), ("float16", "<f2")])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_floats_that_are_not_finite_are_refused(name: str, dtype: str, value: float) -> None:
    data = np.array([1.0, value, 2.0], dtype).tobytes()
    with pytest.raises(CodecError, match="not finite"):
        CODECS[name].decode(data, 3)


@ALL
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_are_not_encoded(codec: Codec, value: float) -> None:
    x = noise(LEAF_PARAMS + 2000)
    x[-1] = value
    with pytest.raises(CodecError, match="not finite"):
        codec.encode(x)


@ALL
def test_a_wrong_length_is_refused(codec: Codec) -> None:
    data = codec.encode(noise(100))
    for cut in (data[:-1], data + b"\x00", b""):
        with pytest.raises(CodecError, match="were due"):
            codec.decode(cut, 100)


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 30), st.data())
def test_any_bytes_decode_to_finite_numbers_or_are_refused(
    name: str, n: int, data: st.DataObject
) -> None:
    codec = CODECS[name]
    size = codec.encoded_size(n)
    payload = data.draw(st.binary(min_size=size, max_size=size) | st.binary(max_size=2 * size))
    try:
        got = codec.decode(payload, n)
    except CodecError:
        return
    assert got.dtype == np.float32
    assert got.shape == (n,)
    assert np.isfinite(got).all()
    assert not ((got != 0.0) & (np.abs(got) < SMALLEST)).any()


@ALL
def test_buffers_can_be_given(codec: Codec) -> None:
    x = noise(5000)
    room = bytearray(codec.encoded_size(5000))
    codec.encode_into(x, memoryview(room))
    assert bytes(room) == codec.encode(x)
    out = np.empty(5000, np.float32)
    assert codec.decode(memoryview(room), 5000, out) is out
    np.testing.assert_array_equal(out, codec.decode(bytes(room), 5000))


@ALL
def test_buffers_of_the_wrong_size_or_type_are_errors(codec: Codec) -> None:
    with pytest.raises(ValueError, match="room"):
        codec.encode_into(noise(10), bytearray(3))
    with pytest.raises(ValueError, match="room"):
        codec.decode(codec.encode(noise(10)), 10, np.empty(9, np.float32))
    with pytest.raises(ValueError, match="float32"):
        codec.encode(np.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="float32"):
        codec.encode(noise(10)[::2])


def test_payloads_that_do_not_start_on_a_word_decode_alike() -> None:
    for codec in CODECS.values():
        data = codec.encode(noise(3000))
        shifted = memoryview(b"\x00" + data)[1:]
        np.testing.assert_array_equal(codec.decode(shifted, 3000), codec.decode(data, 3000))


def test_settle_range_clears_what_is_small_and_reports_what_is_not_finite() -> None:
    x = np.array([1.0, -0.0, 1e-40, -(2.0**-101), SMALLEST], np.float32)
    assert settle_range(x, np.empty_like(x))
    np.testing.assert_array_equal(x, np.array([1.0, 0.0, 0.0, 0.0, SMALLEST], np.float32))
    assert not np.signbit(x).any()
    bad = np.array([1e-40, np.nan], np.float32)
    assert not settle_range(bad, np.empty_like(bad))
    assert bad[0] == np.float32(1e-40)
