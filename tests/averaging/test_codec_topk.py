"""The topk codec: 0.15 bit a parameter, nothing lost, and a decoder for any bytes."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.averaging.buffers import AnchorState, FragmentBuffers
from dugnad.averaging.codec_base import SMALLEST, Codec, CodecError
from dugnad.averaging.codec_int4 import Int4Codec
from dugnad.averaging.codec_topk import CHUNK, TOPK_KEPT, TopkCodec
from dugnad.averaging.tree import LEAF_PARAMS, Vector

TOPK = TopkCodec(64)
EACH = pytest.mark.parametrize(
    "codec", [TopkCodec(kept) for kept in TOPK_KEPT], ids=lambda c: c.name
)


def noise(n: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def integers(n: int) -> Vector:
    """Integers in [-2**20, 2**20) by a hash: the same on every machine, few alike."""
    mixed = np.arange(1, n + 1, dtype=np.uint32) * np.uint32(2_654_435_761)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(2_246_822_519)
    return ((mixed >> np.uint32(11)).astype(np.int64) - (1 << 20)).astype(np.float32)


def leaf(counts: tuple[int, int], levels: list[int], bits: str, *, n: int) -> bytes:
    """Bytes of a leaf of ``n`` parameters from its parts as the module describes them."""
    packed = b"".join(
        (low | high << 12).to_bytes(3, "little")
        for low, high in zip(levels[::2], levels[1::2], strict=True)
    )
    room = TOPK.leaf_size(n) - 4 - len(packed)
    head = b"".join(one.to_bytes(2, "little") for one in counts)
    return head + packed + int(bits.ljust(8 * room, "0"), 2).to_bytes(room, "big")


def code(level: float) -> int:
    """The 12 bits of a level that has at most five significant bits."""
    return int(np.float32(level).view(np.uint32)) >> 19


ONE = code(1.0)


def test_it_takes_less_than_015_bit_a_parameter_and_keeps_1_56_per_cent() -> None:
    n = 8 * LEAF_PARAMS
    assert TOPK.bits_per_param(n) == 8 * 1228 / LEAF_PARAMS  # 0.1499
    assert TOPK.bits_per_param(10_000_000) <= 0.15
    kept = np.count_nonzero(TOPK.decode(TOPK.encode(noise(n)), n))
    assert 0.01555 < kept / n <= 64 / 4096


@EACH
def test_the_largest_of_each_chunk_are_kept_at_the_mean_of_their_half(codec: TopkCodec) -> None:
    n = 3 * CHUNK + 1000
    x = noise(n)
    x[CHUNK : 2 * CHUNK] *= 1000.0
    got = codec.decode(codec.encode(x), n)
    for start in range(0, n, CHUNK):
        part, sent = x[start : start + CHUNK], got[start : start + CHUNK]
        kept = np.flatnonzero(sent)
        assert 0.75 * codec.kept_of(part.size) <= kept.size <= codec.kept_of(part.size)
        left = np.delete(np.abs(part), kept)
        assert np.sort(left)[-codec.kept_of(part.size) // 4] <= np.abs(part[kept]).min()
        assert (np.sign(sent[kept]) == np.sign(part[kept])).all()
        for level in np.unique(np.abs(sent[kept])).tolist():
            group = np.abs(part[kept[np.abs(sent[kept]) == level]])
            assert level == pytest.approx(group.mean(), rel=1 / 31)


@EACH
def test_evenly_spread_values_find_room(codec: TopkCodec) -> None:
    """Most leaves of random positions drop nothing; the room has little more than they need."""
    most = codec.kept_of(LEAF_PARAMS)
    kept = [
        np.count_nonzero(codec.decode(codec.encode(noise(LEAF_PARAMS, seed)), LEAF_PARAMS))
        for seed in range(6)
    ]
    assert sorted(kept)[2] == most
    assert min(kept) > 0.97 * most


@EACH
@pytest.mark.parametrize("n", [1, 2, 100, CHUNK, CHUNK + 1, LEAF_PARAMS])
@pytest.mark.parametrize("case", ["alike", "widest gaps", "at the end", "nothing"])
def test_the_room_suffices_whatever_the_positions(codec: TopkCodec, n: int, case: str) -> None:
    x = np.zeros(n, np.float32)
    step = 1 << codec.rice
    if case == "alike":
        x[:] = -1.0
    elif case == "widest gaps":  # each gap just reaches its next unary bit
        x[:: 2 * step + 1] = 1.0 + np.arange(x[:: 2 * step + 1].size) % 9
        x[step :: 4 * step + 2] = 3.0
    elif case == "at the end":
        x[-1] = 1.0
    got = codec.decode(codec.encode(x), n)
    if case == "at the end":
        np.testing.assert_array_equal(got, x)
    elif case != "nothing":
        most = min(codec.kept_of(n), int(np.count_nonzero(x)))
        assert np.count_nonzero(got) >= 0.75 * most
    else:
        assert not got.any()


def test_of_equal_values_the_first_are_kept() -> None:
    x = np.full(CHUNK, 2.0, np.float32)
    x[100] = 3.0
    got = TOPK.decode(TOPK.encode(x), CHUNK)
    np.testing.assert_array_equal(np.flatnonzero(got), [*range(63), 100])


def test_magnitudes_that_count_as_zero_are_not_kept() -> None:
    x = np.full(200, 2.0**-101, np.float32)
    x[7] = -SMALLEST
    expected = np.zeros(200, np.float32)
    expected[7] = -SMALLEST
    np.testing.assert_array_equal(TOPK.decode(TOPK.encode(x), 200), expected)


def test_what_is_beyond_the_largest_level_is_clipped() -> None:
    x = np.array([3.4e38, 0.0, 1.0], np.float32)
    got = TOPK.decode(TOPK.encode(x), 3)
    np.testing.assert_array_equal(got, np.array([2.0**120, 0.0, 0.0], np.float32))


def test_a_leaf_is_read_as_its_description_says() -> None:
    n = 2 * CHUNK
    # +: gap 3; -: gap 32 + 1, marked; +: gap 4 * 32 + 0, marked
    signs_and_low = "000011" + "100001" + "000000"
    marks_low = "01" + "00"
    unary = "1" + "01" + "00001" + "1" + "1"
    data = leaf((3, 2), [ONE, code(2.5), ONE, ONE], signs_and_low + marks_low + unary, n=n)
    expected = np.zeros(n, np.float32)
    expected[[3, 37, 166]] = 1.0, -2.5, 2.5
    np.testing.assert_array_equal(TOPK.decode(data, n), expected)


def test_levels_too_small_decode_to_plus_zero() -> None:
    data = leaf((1, 0), [code(2.0**-101), 0], "1000001", n=64)
    got = TOPK.decode(data, 64)
    assert not got.any()
    assert not np.signbit(got).any()


BITS = "0000001"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (leaf((1, 0), [ONE, ONE], BITS, n=64)[:-1], "were due"),
        (leaf((2, 0), [ONE, ONE], "0" * 12 + "11", n=64), "2 values"),
        (leaf((1, 2), [ONE, ONE], BITS, n=64), "2 of them marked"),
        (leaf((65535, 65535), [ONE, ONE], BITS, n=64), "65535 values"),
        (leaf((1, 0), [code(2.0**120) + 1, ONE], BITS, n=64), "level"),
        (leaf((1, 0), [ONE, 0xFF0], BITS, n=64), "level"),
        (leaf((1, 0), [ONE, 0xFFF], BITS, n=64), "level"),
        (leaf((1, 0), [ONE, ONE], "0000000", n=64), "cut"),
        (leaf((1, 0), [ONE, ONE], BITS + "01", n=64), "padding"),
        (leaf((0, 0), [ONE, ONE], "00000001", n=64), "padding"),
        (leaf((1, 0), [ONE, ONE], "000000001", n=64), "beyond the end"),
        (leaf((1, 1), [ONE, ONE], "0000000111", n=64), "beyond the last value"),
        (leaf((1, 1), [ONE, ONE], "00000000101", n=64), "beyond the last value"),
        (leaf((64, 64), [ONE, ONE], "1" * 580, n=CHUNK), "cut"),
        (leaf((64, 64), [ONE, ONE], "0" * 512 + "1" * 91, n=CHUNK), "cut"),
    ],
)
def test_it_refuses_what_no_encoder_writes(data: bytes, reason: str) -> None:
    n = CHUNK if len(data) == TOPK.leaf_size(CHUNK) else 64
    with pytest.raises(CodecError, match=reason):
        TOPK.decode(data, n)


def plain_decode(data: bytes, kept: int, n: int) -> list[float]:
    """The format once more, a bit at a time."""
    rice, at = (CHUNK // kept).bit_length() - 2, 4 + 3 * -(-n // CHUNK)
    count, marks = (int.from_bytes(data[i : i + 2], "little") for i in (0, 2))
    pairs = [int.from_bytes(data[i : i + 3], "little") for i in range(4, at, 3)]
    bits = iter("".join(f"{one:08b}" for one in data[at:]))

    def take(width: int) -> int:
        return int("".join(next(bits) for _ in range(width)), 2)

    def unary() -> int:
        zeros = 0
        while next(bits) == "0":
            zeros += 1
        return zeros

    fields = [(take(1), take(rice)) for _ in range(count)]
    mark_low = [take(2) for _ in range(marks)]
    where, marked, position, number = [], set(), -1, -1
    for _, low in fields:
        position += (unary() << rice) + low + 1
        where.append(position)
    for low in mark_low:
        number += (unary() << 2) + low + 1
        marked.add(number)
    assert "1" not in "".join(bits)
    found = [0.0] * n
    for i, ((negative, _), position) in enumerate(zip(fields, where, strict=True)):
        level = pairs[position // CHUNK] >> (12 if i in marked else 0) & 4095
        value = struct.unpack("<f", (level << 19).to_bytes(4, "little"))[0]
        found[position] = -value if negative else value
    return found


@EACH
@pytest.mark.parametrize("n", [1, 77, CHUNK, 3 * CHUNK + 500])
def test_a_plain_reading_of_the_format_finds_the_same(codec: TopkCodec, n: int) -> None:
    data = codec.encode(noise(n, 3))
    assert codec.decode(data, n).tolist() == plain_decode(data, codec.kept, n)


@settings(max_examples=200)
@given(
    st.sampled_from(list(TOPK_KEPT)),
    st.sampled_from([1, 40, 700, CHUNK + 9]),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 7)), max_size=6),
)
def test_valid_bytes_with_bits_turned_decode_or_are_refused(
    kept: int, n: int, seed: int, flips: list[tuple[int, int]]
) -> None:
    codec = TopkCodec(kept)
    data = bytearray(codec.encode(noise(n, seed)))
    for at, bit in flips:
        data[at % len(data)] ^= 1 << bit
    try:
        got = codec.decode(data, n)
    except CodecError:
        return
    assert np.isfinite(got).all()
    assert np.count_nonzero(got) <= codec.kept_of(n)
    assert not ((got != 0.0) & (np.abs(got) < SMALLEST)).any()


@pytest.mark.parametrize("codec", [TOPK, TopkCodec(512), Int4Codec()], ids=lambda c: c.name)
def test_what_is_not_sent_waits_and_is_sent_in_the_end(codec: Codec) -> None:
    """Sum of what was delivered and the residual = all progress; then the residual empties."""
    n = 2 * CHUNK + 77
    theta = noise(n)
    buffers = FragmentBuffers(AnchorState.fresh(theta))
    made, delivered = np.zeros(n), np.zeros(n)
    for seq in range(60):
        before, theta = theta, theta - noise(n, seq + 1) * np.float32(1e-2)
        made += before.astype(np.float64) - theta
        delivered += codec.decode(buffers.hand_in(seq, theta, codec).payload, n)
        buffers.forget(seq)
        assert np.abs(delivered + buffers.residual - made).max() < 1e-5
    before_rest = float(np.linalg.norm(buffers.residual))
    for seq in range(60, 200):
        delivered += codec.decode(buffers.hand_in(seq, theta, codec).payload, n)
        buffers.forget(seq)
    assert np.abs(delivered + buffers.residual - made).max() < 1e-5
    assert np.linalg.norm(buffers.residual) < 0.3 * before_rest
    assert buffers.dropped_norm == 0.0


@pytest.mark.parametrize(
    ("kept", "encoded", "decoded"),
    [
        (64, "1a204732271c24003d05874c02a89e8d", "a50e35676bc0994eea789d1f0256ae2c"),
        (1024, "fc4c2ccc14a69f47097a8404190815da", "23a33d585cebdf11f906de4032f0a6f0"),
    ],
)
def test_the_format_is_the_one_of_version_1(kept: int, encoded: str, decoded: str) -> None:
    """Golden digests: a change of these is a change of the format."""
    n = LEAF_PARAMS + CHUNK + 77
    codec = TopkCodec(kept)
    data = codec.encode(integers(n))
    found = codec.decode(data, n).astype("<f4").tobytes()
    assert hashlib.sha256(data).hexdigest()[:32] == encoded
    assert hashlib.sha256(found).hexdigest()[:32] == decoded
