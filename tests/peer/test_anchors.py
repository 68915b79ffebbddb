"""Anchor files: the newest good one wins, and a bad one is named and passed over."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors

from dugnad.averaging.tree import array_root
from dugnad.peer.anchors import KEPT, AnchorFiles, Vector
from dugnad.peer.storeschema import StoreError

DIGEST = bytes(range(32))


def vector(seed: int, size: int = 1000) -> Vector:
    return np.arange(seed, seed + size, dtype=np.float32)


def save(files: AnchorFiles, version: int, fragment: int = 0) -> Path:
    return files.save(fragment, version, DIGEST, vector(version), vector(-version))


@pytest.fixture
def files(tmp_path: Path) -> AnchorFiles:
    return AnchorFiles(tmp_path / "anchors")


def test_an_anchor_comes_back_bit_for_bit(files: AnchorFiles) -> None:
    save(files, 3)
    found = files.load(0)
    assert found.anchor is not None
    assert (found.anchor.fragment, found.anchor.version, found.anchor.digest) == (0, 3, DIGEST)
    assert np.array_equal(found.anchor.theta, vector(3))
    assert np.array_equal(found.anchor.momentum, vector(-3))
    assert found.anchor.theta_root == array_root(vector(3))
    assert found.skipped == ()


def test_only_the_two_newest_of_each_fragment_are_kept(files: AnchorFiles) -> None:
    for version in (5, 6, 7, 8):
        save(files, version)
        save(files, version, fragment=1)
    assert len(list(files.folder.iterdir())) == 2 * KEPT


def test_the_last_saved_is_the_newest_although_its_version_is_lower(files: AnchorFiles) -> None:
    save(files, 10)
    save(files, 9)
    found = files.load(0).anchor
    assert found is not None
    assert found.version == 9


@pytest.mark.parametrize("cut", [0, 5, 40, 500, -1])
def test_a_torn_file_is_named_and_the_one_before_is_loaded(files: AnchorFiles, cut: int) -> None:
    save(files, 1)
    newest = save(files, 2)
    newest.write_bytes(newest.read_bytes()[:cut])
    found = files.load(0)
    assert found.anchor is not None
    assert found.anchor.version == 1
    assert [one.path for one in found.skipped] == [newest]
    assert "torn" in found.skipped[0].reason
    assert newest.exists(), "nothing is deleted"


def test_a_flipped_bit_is_noticed(files: AnchorFiles) -> None:
    newest = save(files, 2)
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    found = files.load(0)
    assert found.anchor is None
    assert "do not match its roots" in found.skipped[0].reason


@pytest.mark.parametrize(
    "data",
    [
        safetensors.save({"theta": vector(1), "momentum": vector(1)}),
        safetensors.save({"theta": vector(1)}, {"format": "dugnad anchor 1", "fragment": "0"}),
        safetensors.save(
            {"theta": vector(1).astype(np.float16), "momentum": vector(1).astype(np.float16)},
            {"format": "dugnad anchor 1", "fragment": "0"},
        ),
        b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
        b"\xff" * 64,
    ],
)
def test_a_foreign_file_is_passed_over(files: AnchorFiles, data: bytes) -> None:
    save(files, 2).write_bytes(data)
    found = files.load(0)
    assert found.anchor is None
    assert len(found.skipped) == 1


def test_an_interrupted_save_leaves_the_older_anchor_and_is_swept(
    files: AnchorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(files, 1)
    (files.folder / (kept.name + ".partial")).write_bytes(b"half")
    assert files.sweep() == 1

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError) as caught:
        save(files, 2)
    assert caught.value.disk_full
    assert list(files.folder.iterdir()) == [kept]
    found = files.load(0).anchor
    assert found is not None
    assert found.version == 1


def test_an_empty_folder_holds_no_anchor(files: AnchorFiles) -> None:
    assert files.load(0).anchor is None
    assert files.sweep() == 0
