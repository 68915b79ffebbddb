"""Merkle trees: leaves, roots and proofs."""

import hashlib

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from dugnad.averaging import tree


def hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(bytes([i])).digest() for i in range(count)]


def test_root_depends_on_every_leaf_and_on_order() -> None:
    some = hashes(5)
    roots = {tree.root_of(some), tree.root_of(some[::-1]), tree.root_of(some[:4])}
    roots |= {tree.root_of([*some[:i], bytes(32), *some[i + 1 :]]) for i in range(5)}
    assert len(roots) == 8


def test_a_single_leaf_is_not_its_own_root() -> None:
    assert tree.root_of(hashes(1)) != hashes(1)[0]


def test_a_promoted_leaf_is_not_a_doubled_one() -> None:
    some = hashes(3)
    assert tree.root_of(some) != tree.root_of([*some, some[-1]])


def test_no_leaves_have_a_root() -> None:
    assert len(tree.root_of([])) == tree.HASH_BYTES
    assert tree.root(b"", []) == tree.root_of([])


def test_a_tree_of_two_inner_nodes_is_not_the_tree_of_four_leaves() -> None:
    a, b, c, d = hashes(4)
    inner = [tree._node(a, b), tree._node(c, d)]
    assert tree.root_of(inner) != tree.root_of([a, b, c, d])


def test_leaf_hashes_need_bounds_without_gaps() -> None:
    data = bytes(10)
    assert len(tree.leaf_hashes(data, [(0, 4), (4, 10)])) == 2
    for bad in ([(0, 4), (5, 10)], [(0, 4)], [(0, 4), (4, 4), (4, 10)], [(0, 11)]):
        with pytest.raises(ValueError, match="leaf bounds"):
            tree.leaf_hashes(data, bad)


def test_array_root_is_the_root_of_little_endian_leaves() -> None:
    array = np.arange(2 * tree.LEAF_PARAMS + 3, dtype=np.float32)
    data = array.astype("<f4").tobytes()
    size = 4 * tree.LEAF_PARAMS
    bounds = [(0, size), (size, 2 * size), (2 * size, 2 * size + 12)]
    assert tree.array_root(array) == tree.root(data, bounds)
    assert tree.array_root(array.astype(">f4").astype(np.float32)) == tree.array_root(array)


def test_array_root_refuses_other_arrays() -> None:
    for array in (np.zeros((2, 2), np.float32), np.zeros(4, np.float64)):
        with pytest.raises(ValueError, match="float32"):
            tree.array_root(array)  # type: ignore[arg-type]


def test_verify_leaf_tells_a_changed_byte() -> None:
    data = bytearray(b"some bytes")
    expected = tree.leaf_hash(data)
    assert tree.verify_leaf(data, expected)
    data[3] ^= 1
    assert not tree.verify_leaf(data, expected)


@given(st.integers(1, 40), st.data())
def test_a_proof_holds_for_its_leaf_and_no_other(count: int, data: st.DataObject) -> None:
    some = hashes(count)
    index = data.draw(st.integers(0, count - 1))
    root, siblings = tree.root_of(some), tree.proof(some, index)
    assert tree.check_proof(root, some[index], siblings, index=index, count=count)
    assert not tree.check_proof(root, bytes(32), siblings, index=index, count=count)
    assert not tree.check_proof(root, some[index], siblings, index=index, count=count + 1)
    assert not tree.check_proof(root, some[index], (*siblings, bytes(32)), index=index, count=count)
    if siblings:
        assert not tree.check_proof(root, some[index], siblings[:-1], index=index, count=count)
        assert not tree.check_proof(root, some[index], siblings, index=index ^ 1, count=count)


@given(
    st.lists(st.binary(max_size=40), max_size=30),
    st.binary(max_size=40),
    st.integers(-5, 1 << 70),
    st.integers(-5, 1 << 70),
)
def test_a_foreign_proof_is_refused_without_an_error(
    siblings: list[bytes], leaf: bytes, index: int, count: int
) -> None:
    assert not tree.check_proof(bytes(32), leaf, siblings, index=index, count=count)


def test_a_proof_of_a_leaf_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="leaf 3 of 3"):
        tree.proof(hashes(3), 3)


def test_a_leafs_hash_is_blake3_in_its_own_domain() -> None:
    found = tree.leaf_hash(b"dugnad")
    assert found.hex() == "6fba9bf7796e6a9eef7e6d1861bac543220d244dfb24376747a49830f07a2670"
    assert found != blake3(b"dugnad").digest()
    assert tree.leaf_hash(memoryview(bytearray(b"dugnad"))) == found
