"""Leaves decoded one at a time, and norms that no number of threads changes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dugnad.averaging.codecs import CODECS, CodecError
from dugnad.averaging.kernels import LANES
from dugnad.averaging.leaf import Encoded, leaf_room, squared
from dugnad.averaging.tree import LEAF_PARAMS, Vector

pytestmark = pytest.mark.usefixtures("arithmetic")  # numpy's, then compiled


def noise(n: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [1, LEAF_PARAMS, 2 * LEAF_PARAMS + 4321])
def test_leaves_are_the_parts_of_the_whole(name: str, n: int) -> None:
    payload = CODECS[name].encode(noise(n, 1))
    encoded = Encoded.of(CODECS[name], payload, n)
    rooms = leaf_room(n), leaf_room(n)
    leaves = [encoded.leaf(k, *rooms).copy() for k in range(len(encoded.bounds))]
    assert np.concatenate(leaves).tobytes() == CODECS[name].decode(payload, n).tobytes()


def test_a_payload_of_another_size_is_refused() -> None:
    payload = CODECS["int8"].encode(noise(100, 1))
    for wrong in (payload[:-1], payload + b"\x00", b""):
        with pytest.raises(CodecError, match="were due"):
            Encoded.of(CODECS["int8"], wrong, 100)


def test_encoding_in_several_threads_at_once_gives_the_same_bytes() -> None:
    vectors = [noise(LEAF_PARAMS + 99, seed) for seed in range(8)]
    expected = [CODECS["int8"].encode(vector) for vector in vectors]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(CODECS["int8"].encode, vectors)) == expected


@pytest.mark.parametrize("n", [0, 1, LANES, 3 * LANES + 5, 2 * LEAF_PARAMS + 4321])
def test_squares_are_summed_in_float64(n: int) -> None:
    vector = noise(n, 2)
    exact = float(np.square(vector.astype(np.float64)).sum())
    assert squared(vector) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    vector = noise(LANES + 3, 2)
    vector[-1] = value
    assert not np.isfinite(squared(vector))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [1, 700, 1024, 5000, LEAF_PARAMS])
@pytest.mark.parametrize("scale", [0.0, 2.0**-99, 1.0, 1e37])
def test_encoding_with_the_rest_is_encoding_and_what_decoding_lacks(
    name: str, n: int, scale: float
) -> None:
    codec, vector = CODECS[name], (noise(n, 4) * np.float32(scale)).astype(np.float32)
    room, rest = bytearray(codec.encoded_size(n)), np.full(n, np.nan, np.float32)
    before = vector.copy()
    codec.encode_rest(vector, room, rest, np.empty(n, np.float32))
    assert bytes(room) == codec.encode(before)
    np.testing.assert_array_equal(rest, before - codec.decode(bytes(room), n))
    np.testing.assert_array_equal(vector, before)


@pytest.mark.parametrize("name", CODECS)
def test_encoding_with_the_rest_refuses_what_does_not_fit(name: str) -> None:
    codec, vector = CODECS[name], noise(100, 5)
    room, rest, scratch = bytearray(codec.encoded_size(100)), vector.copy(), vector.copy()
    with pytest.raises(ValueError, match="of room"):
        codec.encode_rest(vector, room + b"\0", rest, scratch)
    with pytest.raises(ValueError, match="of one leaf"):
        codec.encode_rest(vector, room, rest[1:], scratch)
    vector[7] = np.nan
    with pytest.raises(CodecError, match="not finite"):
        codec.encode_rest(vector, room, rest, scratch)
