"""Fragment tables: balanced, complete, the same everywhere, and judged when foreign."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging.fragments import (
    EMBEDDING,
    FRAGMENTS_MAX,
    KINDS,
    MATRIX,
    VECTOR,
    Fragment,
    FragmentError,
    FragmentTable,
    Group,
    Slice,
    TensorSpec,
    build_table,
)


def llama(layers: int = 4, width: int = 64, vocabulary: int = 256) -> list[TensorSpec]:
    tensors = [TensorSpec("embed", (vocabulary, width), EMBEDDING)]
    for i in range(layers):
        tensors += [TensorSpec(f"{i}.{name}", (width, width), MATRIX) for name in "qkvo"]
        tensors += [
            TensorSpec(f"{i}.{name}", (3 * width, width), MATRIX) for name in ("up", "gate")
        ]
        tensors += [TensorSpec(f"{i}.down", (width, 3 * width), MATRIX)]
        tensors += [TensorSpec(f"{i}.{name}", (width,), VECTOR) for name in ("n1", "n2")]
    return tensors


def arrays(
    tensors: list[TensorSpec],
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(0)
    return {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in tensors}


SPECS = st.lists(
    st.tuples(st.lists(st.integers(1, 12), max_size=3), st.sampled_from(KINDS)),
    min_size=1,
    max_size=12,
).map(lambda found: [TensorSpec(f"t{i}", tuple(s), k) for i, (s, k) in enumerate(found)])


@given(SPECS, st.integers(1, 8))
def test_a_table_is_complete_and_refuses_only_what_has_too_few_rows(
    tensors: list[TensorSpec], count: int
) -> None:
    try:
        table = build_table(tensors, count)
    except FragmentError as refusal:
        too_few = "cannot fill" in refusal.reason
    else:
        too_few = False
    if too_few:
        return
    table.validate()
    assert len(table.fragments) == count
    assert table.total == sum(spec.size for spec in tensors)
    named = arrays(tensors)
    unpacked = table.unpack(table.pack(named))
    assert list(unpacked) == [spec.name for spec in tensors]
    for name, array in named.items():
        np.testing.assert_array_equal(unpacked[name], array)


def test_fragments_of_a_language_model_are_balanced_and_embeddings_apart() -> None:
    table = build_table(llama(), 8)
    kinds = [{group.kind for group in table.merge_groups(p)} for p in range(8)]
    assert kinds[0] == {EMBEDDING}
    assert not any(EMBEDDING in one for one in kinds[1:])
    assert max(table.sizes) <= 4 / 3 * table.total / 8
    assert table.offsets == tuple(sum(table.sizes[:p]) for p in range(8))


def test_tensors_within_a_fair_share_stay_whole() -> None:
    table = build_table(llama(), 8)
    slices = [part for one in table.fragments for part in one.slices]
    assert len(slices) == len(table.tensors)


def test_a_tensor_larger_than_a_share_is_cut_between_rows() -> None:
    tensors = [TensorSpec("big", (100, 8), MATRIX), TensorSpec("small", (8,), VECTOR)]
    table = build_table(tensors, 4)
    cuts = [part for one in table.fragments for part in one.slices if part.tensor == 0]
    assert len(cuts) >= 4
    assert all(part.start % 8 == 0 and part.stop % 8 == 0 for part in cuts)
    assert max(table.sizes) <= 1.1 * table.total / 4


def test_few_embeddings_lie_with_the_rest_but_keep_their_kind() -> None:
    tensors = [TensorSpec("embed", (4, 4), EMBEDDING), TensorSpec("m", (100, 4), MATRIX)]
    table = build_table(tensors, 2)
    groups = [group for p in range(2) for group in table.merge_groups(p)]
    assert sorted(group.kind for group in groups) == [EMBEDDING, MATRIX, MATRIX]
    assert any(len(one.slices) > 1 for one in table.fragments)


def test_large_embeddings_get_several_fragments() -> None:
    tensors = [TensorSpec("embed", (1000, 8), EMBEDDING), TensorSpec("m", (1000, 8), MATRIX)]
    table = build_table(tensors, 6)
    kinds = [{group.kind for group in table.merge_groups(p)} for p in range(6)]
    assert kinds == [{EMBEDDING}] * 3 + [{MATRIX}] * 3


def test_one_fragment_holds_everything() -> None:
    table = build_table(llama(layers=1), 1)
    assert table.sizes == (table.total,)
    assert table.offsets == (0,)


def test_a_model_of_embeddings_only_can_be_cut() -> None:
    assert len(build_table([TensorSpec("e", (10, 3), EMBEDDING)], 3).fragments) == 3


def test_too_many_fragments_are_refused() -> None:
    with pytest.raises(FragmentError, match="cannot fill"):
        build_table([TensorSpec("m", (2, 100), MATRIX)], 3)
    for count in (0, FRAGMENTS_MAX + 1):
        with pytest.raises(FragmentError, match="are allowed"):
            build_table(llama(), count)


def test_the_digest_is_the_same_everywhere_and_tells_tables_apart() -> None:
    table = build_table(llama(), 8)
    assert table.digest().hex() == DIGEST
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=FragmentTable)
    assert again == table
    assert again.digest() == table.digest()
    assert build_table(llama(), 7).digest() != table.digest()


DIGEST = "01f182d76293734476def2b739617577bbbc477540dc62c1b2a56cbcb99bd109"


def test_groups_are_the_slices_within_their_fragment() -> None:
    tensors = (TensorSpec("a", (2, 3), MATRIX), TensorSpec("b", (4,), VECTOR))
    table = FragmentTable(tensors, (Fragment((Slice(1, 0, 4), Slice(0, 0, 6))),))
    table.validate()
    assert table.groups(0) == [(0, 4), (4, 10)]
    assert table.merge_groups(0) == [Group(0, 4, VECTOR), Group(4, 10, MATRIX)]


def test_gather_and_scatter_are_inverse_and_touch_one_fragment() -> None:
    tensors = llama(layers=2)
    table = build_table(tensors, 4)
    named, empty = arrays(tensors), {k: np.zeros_like(v) for k, v in arrays(tensors).items()}
    flat = table.pack(named)
    for p, (offset, size) in enumerate(zip(table.offsets, table.sizes, strict=True)):
        vector = table.gather(p, named)
        np.testing.assert_array_equal(vector, flat[offset : offset + size])
        table.scatter(p, vector, empty)
        assert (table.pack(empty) != 0.0).sum() == (flat[: offset + size] != 0.0).sum()
    np.testing.assert_array_equal(table.pack(empty), flat)


def test_whole_tensors_unpack_as_views() -> None:
    table = build_table(llama(), 8)
    flat = np.zeros(table.total, np.float32)
    named = table.unpack(flat)
    named["0.q"][:] = 1.0
    assert flat.sum() == 64 * 64


def test_arrays_that_do_not_fit_are_refused_by_name() -> None:
    tensors = llama(layers=1)
    table = build_table(tensors, 2)
    named = arrays(tensors)
    for change in (named["0.q"].astype(np.float64), named["0.q"][:1]):
        with pytest.raises(FragmentError, match=r"'0\.q' is"):
            table.pack({**named, "0.q": change})  # type: ignore[dict-item]
    with pytest.raises(FragmentError, match=r"'0\.q' is missing"):
        table.pack({name: array for name, array in named.items() if name != "0.q"})
    turned = {**named, "0.q": np.asfortranarray(named["0.q"])}
    whole = build_table(tensors, 1)
    with pytest.raises(FragmentError, match="not contiguous"):
        whole.scatter(0, whole.pack(named), turned)
    with pytest.raises(FragmentError, match="vector of shape"):
        table.unpack(np.zeros(3, np.float32))
    with pytest.raises(FragmentError, match="vector of shape"):
        table.scatter(0, np.zeros(3, np.float32), named)
    with pytest.raises(FragmentError, match="room"):
        table.gather(0, named, np.zeros(3, np.float32))


A, B = TensorSpec("a", (2, 3), MATRIX), TensorSpec("b", (4,), VECTOR)


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        ([(0, 0, 6)], "end at tensor 0"),
        ([(0, 0, 6), (1, 0, 3)], "end at tensor 1"),
        ([(1, 0, 4)], "gap or overlap"),
        ([(0, 0, 3), (1, 0, 4)], "gap or overlap"),
        ([(0, 0, 6), (1, 0, 4), (1, 0, 4)], "gap or overlap"),
        ([(0, 0, 6), (0, 3, 6), (1, 0, 4)], "gap or overlap"),
        ([(0, 0, 6), (1, 0, 4), (2, 0, 4)], "gap or overlap"),
        ([(-1, 0, 6), (0, 0, 6), (1, 0, 4)], "gap or overlap"),
        ([(0, 0, 9), (1, 0, 4)], "outside"),
        ([(0, 0, 0), (0, 0, 6), (1, 0, 4)], "outside"),
        ([(0, 0, 2), (0, 2, 6), (1, 0, 4)], "within a row"),
        ([], "without slices"),
    ],
)
def test_a_foreign_table_must_cover_each_element_once(
    slices: list[tuple[int, int, int]], reason: str
) -> None:
    table = FragmentTable((A, B), (Fragment(tuple(Slice(*one) for one in slices)),))
    with pytest.raises(FragmentError, match=reason):
        table.validate()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((), "tensors"),
        ((A, A), "one name"),
        ((TensorSpec("", (1,), MATRIX),), "name"),
        ((TensorSpec("x" * 201, (1,), MATRIX),), "name"),
        ((TensorSpec("a\nb", (1,), MATRIX),), "name"),
        ((TensorSpec("a", (1,), "tensor"),), "kind"),
        ((TensorSpec("a", (0,), MATRIX),), "shape"),
        ((TensorSpec("a", (-1, -1), MATRIX),), "shape"),
        ((TensorSpec("a", (1,) * 9, MATRIX),), "shape"),
        ((TensorSpec("a", (1 << 30, 1 << 30), MATRIX),), "parameters"),
    ],
)
def test_foreign_tensors_are_bounded(tensors: tuple[TensorSpec, ...], reason: str) -> None:
    table = FragmentTable(tensors, (Fragment((Slice(0, 0, 1),)),))
    with pytest.raises(FragmentError, match=reason):
        table.validate()


def test_the_number_of_fragments_and_slices_is_bounded() -> None:
    big = TensorSpec("v", (1 << 20,), VECTOR)
    with pytest.raises(FragmentError, match="fragments"):
        FragmentTable((big,), ()).validate()
    many = tuple(Fragment((Slice(0, i, i + 1),)) for i in range(FRAGMENTS_MAX + 1))
    with pytest.raises(FragmentError, match="fragments"):
        FragmentTable((big,), many).validate()
    cut = tuple(Slice(0, i, i + 1) for i in range(20_000))
    with pytest.raises(FragmentError, match="slices"):
        FragmentTable((big,), (Fragment(cut),)).validate()


@given(st.binary(max_size=60))
def test_foreign_bytes_become_a_valid_table_or_a_refusal(data: bytes) -> None:
    try:
        msgspec.msgpack.decode(data, type=FragmentTable).validate()
    except (msgspec.MsgspecError, FragmentError):
        return
    raise AssertionError("random bytes made a table")
