"""Compiled kernels: the bits of the numpy code, whatever the numbers are."""

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging import kernelcheck, kernels
from dugnad.averaging.buffers import AnchorState, BuffersError, FragmentBuffers
from dugnad.averaging.codec_base import (
    FLOAT32_MAX,
    SCALE_MAX,
    SMALLEST,
    octets_of,
    settle_range,
)
from dugnad.averaging.codecs import CODECS, CodecError
from dugnad.averaging.fragments import Group
from dugnad.averaging.int8walk import MergeWalk, SquaresWalk, StepWalk
from dugnad.averaging.kernels import PAST_BYTES_MIN, Kernels, Octets, aligned
from dugnad.averaging.leaf import Encoded, leaf_room, squared
from dugnad.averaging.leafmerge import combine, squares_of
from dugnad.averaging.outer import OuterError, OuterState, Rates, conformance, step_leaf
from dugnad.averaging.pages import PAGES
from dugnad.averaging.tree import LEAF_PARAMS, Vector, array_root, root_of
from dugnad.peer import kernelload

SIZES = st.sampled_from([1, 2, 3, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 2049, 5000])
EDGES = np.array(
    [
        *(0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 126.5, 127.0, 127.49999, -127.5),
        *(SMALLEST, -SMALLEST, SMALLEST * (1 - 2**-24), SMALLEST * 127, SMALLEST * 126.99999),
        *(1e-45, -1e-45, 2.0**-126, 2.0**-127, 1e-30, 1e30, 2.0**64, -(2.0**96)),
        *(SCALE_MAX, SCALE_MAX * 127, -SCALE_MAX * 127, FLOAT32_MAX, -FLOAT32_MAX),
    ],
    np.float32,
)
FACTORS = st.sampled_from([0.0, 1.0, 1 / 3, -0.25, 1e-30, 1e30])
PAST = st.sampled_from([0, PAST_BYTES_MIN])
"""From how many bytes on results go past the caches: always, or never here."""
NEVER = np.array([np.nan, np.inf, -np.inf, -np.nan], np.float32)


@contextlib.contextmanager
def using(tried: Kernels | None) -> Iterator[None]:
    before = kernels.current()
    kernels.use(tried)
    try:
        yield
    finally:
        kernels.use(before)


@st.composite
def vectors(draw: st.DrawFn, n: int, *, finite: bool = False) -> Vector:
    """``n`` numbers: of one size or many, with edges among them, and rarely such as never are."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    spread = draw(st.sampled_from([0, 3, 120]))
    middle = draw(st.sampled_from([0, 0, -100, -125, 100]))
    powers = rng.integers(middle - spread, middle + spread + 1, n).clip(-149, 120)
    x = (rng.standard_normal(n) * np.exp2(powers.astype(np.float64))).astype(np.float32)
    if draw(st.booleans()):  # halves of a scale: to be rounded to even
        x[rng.random(n) < 0.5] = rng.integers(-254, 255) / 2.0
    chosen = rng.random(n) < draw(st.sampled_from([0.0, 0.05, 0.9]))
    x[chosen] = EDGES[rng.integers(0, EDGES.size, int(chosen.sum()))]
    if not finite and draw(st.integers(0, 5)) == 0:
        x[rng.integers(0, n)] = NEVER[rng.integers(0, NEVER.size)]
    return x


@st.composite
def payloads(draw: st.DrawFn, n: int, codec: str = "int8") -> bytes:
    """Any bytes of the right size, or valid ones with a few changed."""
    size = CODECS[codec].encoded_size(n)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    if draw(st.integers(0, 4)) == 0:
        return rng.bytes(size)
    with using(None):
        data = bytearray(CODECS[codec].encode(draw(vectors(n, finite=True))))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, size - 1))] = draw(st.sampled_from([0, 1, 0x80, 0x7F, 0xFF]))
    return bytes(data)


def unaligned(data: bytes) -> memoryview:
    """These bytes at an odd address, as in what was received behind a header."""
    return memoryview(b"#" + data)[1:]


def line_room(n: int) -> Vector:
    """Room that begins a cache line."""
    return aligned(4 * n).view(np.float32)


def same(a: Vector, b: Vector) -> bool:
    return a.tobytes() == b.tobytes()


def same_numbers(a: Vector, b: Vector) -> bool:
    """As `same`, but for the sign of a 0, which nothing reads in a rest."""
    return np.array_equal(a, b)


Encoding = tuple[bytes, Vector] | str


def encoding(codec: str, x: Vector) -> Encoding:
    room, rest = bytearray(CODECS[codec].encoded_size(x.size)), np.empty(x.size, np.float32)
    try:
        CODECS[codec].encode_rest(x, room, rest, np.empty(x.size, np.float32))
    except CodecError as fault:
        return fault.reason
    return bytes(room), rest


@given(st.data())
@pytest.mark.parametrize("codec", ["int8", "int4", "float16"])
def test_encoding_gives_the_bytes_and_the_rest_of_numpy(
    compiled: Kernels, codec: str, data: st.DataObject
) -> None:
    x = data.draw(SIZES.flatmap(vectors))
    before = x.copy()
    with using(None), np.errstate(all="ignore"):
        due = encoding(codec, x)
    with using(compiled):
        got = encoding(codec, x)
        again = None if isinstance(got, str) else CODECS[codec].encode(x)
    assert same(x, before)
    if isinstance(due, str) or isinstance(got, str):
        assert got == due
        return
    assert got[0] == due[0] == again
    assert same_numbers(got[1], due[1])


def test_every_float16_and_what_lies_between_two_is_as_numpy_has_it(compiled: Kernels) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    exact = finite.view(np.float16).astype(np.float32)
    around = [exact, *(np.nextafter(exact, np.float32(to)) for to in (-1e9, 1e9))]
    middle = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
    around += [middle, *(np.nextafter(middle, np.float32(to)) for to in (-1e9, 1e9))]
    for x in around:
        for start in range(0, x.size, LEAF_PARAMS):
            part = x[start : start + LEAF_PARAMS]
            with using(None):
                due = CODECS["float16"].encode(part)
            with using(compiled):
                assert CODECS["float16"].encode(part) == due
                assert same(
                    CODECS["float16"].decode(due, part.size),
                    np.frombuffer(due, "<f2").astype(np.float32),
                )


def decoding(codec: str, data: bytes, n: int) -> bytes | str:
    try:
        return CODECS[codec].decode(unaligned(data), n).tobytes()
    except CodecError as fault:
        return fault.reason


@given(st.data())
@pytest.mark.parametrize("codec", ["int8", "int4", "float16"])
def test_decoding_gives_the_bits_or_the_refusal_of_numpy(
    compiled: Kernels, codec: str, data: st.DataObject
) -> None:
    n = data.draw(SIZES)
    payload = data.draw(payloads(n, codec))
    with using(None):
        due = decoding(codec, payload, n)
    with using(compiled):
        assert decoding(codec, payload, n) == due
    if codec == "int8":
        out = line_room(n)
        done = compiled.int8_decode(octets_of(unaligned(payload)), out, past_from=0)
        assert (out.tobytes() if done else due) == due
        assert done == isinstance(due, bytes)


@given(st.data())
def test_adding_in_one_pass_gives_the_bits_of_decoding_multiplying_and_adding(
    compiled: Kernels, data: st.DataObject
) -> None:
    n, first = data.draw(SIZES), data.draw(st.booleans())
    payload, total = data.draw(payloads(n)), data.draw(vectors(n))
    factor = np.float32(data.draw(st.sampled_from([0.0, 1.0, 1 / 3, 1e-30, 1e30])))
    encoded, before = Encoded.of(CODECS["int8"], unaligned(payload), n), total.copy()
    due = None
    with using(None), contextlib.suppress(CodecError), np.errstate(all="ignore"):
        assert not encoded.add_to(0, total, factor, first=first)
        part = encoded.leaf(0, leaf_room(n), leaf_room(n)) * factor
        due = part if first else total + part
    with using(compiled):
        done = encoded.add_to(0, total, factor, first=first)
    assert done == (due is not None)
    np.testing.assert_array_equal(total, before if due is None else due)
    if due is not None and first:
        assert same(total, due)


def handed_in(codec: str, theta: Vector, ref: Vector, residual: Vector) -> object:
    buffers = FragmentBuffers(AnchorState.fresh(ref))
    buffers.residual = residual.copy()
    try:
        made = buffers.hand_in(0, theta, CODECS[codec])
    except BuffersError as fault:
        return fault.reason
    return made, (buffers.residual + 0.0).tobytes()


@given(st.data())
@pytest.mark.parametrize("codec", ["int8", "float16", "int4", "topk-25"])
def test_a_hand_in_is_the_same_to_the_last_bit_of_its_norms(
    compiled: Kernels, codec: str, data: st.DataObject
) -> None:
    n = data.draw(SIZES)
    theta, ref, residual = data.draw(
        st.tuples(vectors(n), vectors(n, finite=True), vectors(n, finite=True))
    )
    with using(None), np.errstate(all="ignore"):
        due = handed_in(codec, theta, ref, residual)
    with using(compiled), np.errstate(all="ignore"):
        assert handed_in(codec, theta, ref, residual) == due


@given(st.data())
def test_a_difference_has_the_same_bits(compiled: Kernels, data: st.DataObject) -> None:
    past_from = data.draw(PAST)
    n = data.draw(SIZES)
    a, b = data.draw(vectors(n)), data.draw(vectors(n))
    out = line_room(n)
    compiled.difference(a, b, out, past_from)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, a - b)


@given(st.data())
def test_sums_of_squares_have_the_same_bits(compiled: Kernels, data: st.DataObject) -> None:
    x = data.draw(st.sampled_from([1, 255, 256, 257, 32_768, 32_769, LEAF_PARAMS]).flatmap(vectors))
    with using(None):
        due = squared(x)
    with using(compiled):
        got = squared(x)
    assert got == due or (math.isnan(got) and math.isnan(due))


@given(st.data())
def test_squares_of_any_part_of_a_payload_are_those_of_its_numbers(
    compiled: Kernels, data: st.DataObject
) -> None:
    n = data.draw(SIZES)
    payload = data.draw(payloads(n))
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    walk = SquaresWalk(compiled, octets_of(unaligned(payload)), n)
    with using(None):
        due = decoding("int8", payload, n)
        if isinstance(due, str):
            assert walk.span(0, start, stop) is None
        else:
            part = np.frombuffer(due, np.float32)[start:stop]
            assert walk.span(0, start, stop) == squared(part)
    for wrong in ((start, n + 1), (-1, stop), (start, start)):
        with pytest.raises(ValueError, match="of a leaf of"):
            walk.span(0, *wrong)


@given(st.data())
def test_a_step_with_a_payload_is_decoding_it_and_the_step(
    compiled: Kernels, data: st.DataObject
) -> None:
    past_from = data.draw(PAST)
    n, eta = data.draw(SIZES), np.float32(data.draw(st.sampled_from([1.0, 0.7, 2.0**-99])))
    payload, theta = data.draw(payloads(n)), data.draw(vectors(n))
    out = line_room(n)
    with using(None), np.errstate(all="ignore"):
        due: bytes | None = None
        with contextlib.suppress(CodecError, OuterError):
            gradient = CODECS["int8"].decode(payload, n)
            state, after = OuterState(theta, theta), OuterState(np.empty_like(theta), theta)
            step_leaf(state, gradient, Rates(eta, np.float32(0.0)), after, np.empty_like(theta))
            due = after.theta.tobytes()
    walk = StepWalk(compiled, octets_of(unaligned(payload)), theta, eta, out, past_from)
    stepped = walk.leaf(0)
    assert (bytes(stepped) if stepped is not None else None) == due
    assert due is None or out.tobytes() == due


@given(st.data())
def test_a_merge_in_one_pass_is_decoding_summing_and_encoding(
    compiled: Kernels, data: st.DataObject
) -> None:
    past_from = data.draw(PAST)
    n, count = data.draw(SIZES), data.draw(st.integers(1, 4))
    sent = [unaligned(data.draw(payloads(n))) for _ in range(count)]
    factors = np.array(data.draw(st.lists(FACTORS, min_size=count, max_size=count)), np.float32)
    share, left = np.float32(data.draw(st.sampled_from([0.0, 1.0, 3.7]))), line_room(n)
    made = np.zeros(kernels.int8_size(n), np.uint8)
    walk = MergeWalk(compiled, [octets_of(one) for one in sent], made, left, share, past_from)
    done = walk.leaf(0, factors)
    due: Encoding = "refused"
    with using(None), contextlib.suppress(CodecError), np.errstate(all="ignore"):
        parts = [CODECS["int8"].decode(one, n) for one in sent]
        total = parts[0] * factors[0]
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            total = total + part * factor
        due = encoding("int8", total)
    assert done == (not isinstance(due, str))
    if not isinstance(due, str):
        assert made.tobytes() == due[0]
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(left, due[1] * share)


def test_a_large_fragment_is_the_same_past_the_caches(compiled: Kernels) -> None:
    n = PAST_BYTES_MIN // 4 + LEAF_PARAMS + 700
    rng = np.random.default_rng(7)
    theta, moved = (rng.standard_normal(n, np.float32) for _ in range(2))
    groups = Group(0, n // 3, "matrix"), Group(n // 3, n, "vector")
    state = AnchorState.fresh(theta)

    def whole() -> object:
        buffers = FragmentBuffers(state)
        buffers.residual = PAGES.vector(n)
        buffers.residual[:] = moved
        made = buffers.hand_in(0, moved, CODECS["int8"])
        encoded = Encoded.of(CODECS["int8"], made.payload, n)
        rates = Rates(np.float32(1.0), np.float32(0.0))
        rows = ((0.5, 0.5), (0.25, 0.5))  # one leaf has numbers of both groups
        after = combine(
            (encoded, encoded),
            rows,
            groups,
            codec=CODECS["int8"],
            state=state,
            rates=rates,
            rounding_factor=np.float32(2.0),
        )
        roots = after.state.theta_root, root_of(after.leaves), squares_of(encoded, groups)
        delta = buffers.adopt(after.state)
        left = [array_root(x + np.float32(0.0)) for x in (buffers.residual, after.rounding)]
        return made.payload_root, made.residual_norm, roots, left, array_root(delta)

    with using(None):
        due = whole()
    with using(compiled):
        assert whole() == due


@given(st.data())
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("eta", [1.0, 0.7])
def test_the_outer_step_has_the_same_bits_or_refusals(
    compiled: Kernels, eta: float, mu: float, data: st.DataObject
) -> None:
    n, rates = data.draw(SIZES), Rates(np.float32(eta), np.float32(mu))
    theta, momentum, gradient = data.draw(st.tuples(vectors(n), vectors(n), vectors(n)))

    def stepped() -> object:
        after = OuterState(np.empty(n, np.float32), np.empty(n, np.float32))
        try:
            step_leaf(OuterState(theta, momentum), gradient, rates, after, np.empty(n, np.float32))
        except OuterError as fault:
            return fault.reason
        return after.theta.tobytes(), after.momentum.tobytes()

    with using(None):
        due = stepped()
    with using(compiled):
        assert stepped() == due


@given(st.data())
def test_settling_the_range_has_the_same_bits(compiled: Kernels, data: st.DataObject) -> None:
    x = data.draw(SIZES.flatmap(vectors))
    y, scratch = x.copy(), np.empty_like(x)
    with using(None):
        due = settle_range(x, scratch)
    with using(compiled):
        assert settle_range(y, scratch) == due
    assert same(x, y)


def test_the_conformance_vector_comes_out(compiled: Kernels) -> None:
    with using(compiled):
        assert conformance() is None


@pytest.mark.parametrize("name", sorted(kernels.SIGNATURES))
def test_a_kernel_that_errs_is_found_before_it_is_used(compiled: Kernels, name: str) -> None:
    assert kernelcheck.fault_of(compiled) == ""
    broken = Kernels({**compiled.call, name: kernels.prototype(name)(lambda *_: 0)})
    assert name in kernelcheck.fault_of(broken)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1023, 1024, 1025, LEAF_PARAMS - 1, LEAF_PARAMS])
def test_kernels_and_codecs_agree_on_sizes(n: int) -> None:
    assert kernels.int8_size(n) == CODECS["int8"].encoded_size(n)
    assert kernels.int4_size(n) == CODECS["int4"].encoded_size(n)


def test_arrays_that_are_too_short_or_apart_are_never_touched(compiled: Kernels) -> None:
    x, octets = np.zeros(100, np.float32), np.zeros(104, np.uint8)
    short: Octets = octets[:-1]
    with pytest.raises(ValueError, match="in a row"):
        compiled.int8_rest(x, short, x.copy())
    with pytest.raises(ValueError, match="in a row"):
        compiled.int8_rest(x, octets, x[:-1].copy())
    with pytest.raises(ValueError, match="in a row"):
        compiled.settle(np.zeros((200,), np.float32)[::2])
    with pytest.raises(ValueError, match="in a row"):
        compiled.squares(x.astype(np.float64))
    fixed = x.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="written to"):
        compiled.settle(fixed)


@pytest.mark.slow
def test_what_the_compiler_makes_multiplies_and_adds_apart_and_calls_nobody() -> None:
    if lacking := kernelload.missing():
        pytest.skip(f"{lacking} is not installed")
    command = [sys.executable, "-P", "-m", "dugnad.peer.kernelbuild", "--assembly"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assembly = child.stdout.read()
        assert child.wait(60) == 0  # before its input ends, which would end it
    words = set(re.findall(r"^\s+([a-z][\w.]*)", assembly, re.MULTILINE))
    assert not {one for one in words if re.match(r"v?fn?m(add|sub|la|ls)", one)}, "contracted"
    assert re.search(r"^int8_rest:", assembly, re.MULTILINE)
