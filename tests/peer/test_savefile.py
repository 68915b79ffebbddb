"""Files that are whole or not there: generations, checksums, torn writes, a full disk."""

import errno
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dugnad.peer import savefile
from dugnad.peer.savefile import SaveFault, SaveFolder, read_tensors, require
from dugnad.peer.store import StoreError

ARRAYS: dict[str, npt.NDArray[Any]] = {
    "bytes": np.frombuffer(b"odd", np.uint8),
    "theta": np.linspace(-1.0, 1.0, 77, dtype=np.float32),
    "norms": np.array([0.5, 2.0], np.float64),
    "seq": np.array([7], np.int64),
    "nothing": np.zeros(0, np.float32),
}
LIMIT = 1 << 16


@pytest.fixture
def folder(tmp_path: Path) -> SaveFolder:
    return SaveFolder(tmp_path / "made", "thing")


def test_what_was_saved_is_read_back_bit_for_bit(folder: SaveFolder) -> None:
    path = folder.save({"a": "ø"}, ARRAYS)
    metadata, arrays = read_tensors(path, LIMIT)
    assert metadata == {"a": "ø"}
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].tobytes() == array.tobytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_any_safetensors_reader_opens_the_file(folder: SaveFolder) -> None:
    path = folder.save({"a": "b"}, ARRAYS)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"a": "b"}
        assert np.array_equal(file.get_tensor("theta"), ARRAYS["theta"])
        assert set(file.keys()) == {*ARRAYS, "check"}


def test_two_generations_are_kept_and_others_in_the_folder_are_left_alone(
    folder: SaveFolder,
) -> None:
    other = SaveFolder(folder.folder, "thing-two")
    kept = other.save({}, ARRAYS)
    paths = [folder.save({"n": str(n)}, ARRAYS) for n in range(4)]
    assert [path for _, path in folder.files()] == paths[2:]
    assert kept.exists()
    (folder.folder / "thing-save-0000000009.safetensors.partial").write_bytes(b"torn")
    folder.sweep()
    assert sorted(os.listdir(folder.folder)) == sorted(one.name for one in (*paths[2:], kept))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_torn_or_rotten_file_is_taken_for_a_good_one(data: st.DataObject) -> None:
    whole = b"".join(savefile.tensors_file({"a": "b"}, ARRAYS))
    at = data.draw(st.integers(0, len(whole) - 1))
    torn = data.draw(st.booleans())
    bad = whole[:at] if torn else whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
    with tempfile.NamedTemporaryFile() as file:
        file.write(bad)
        file.flush()
        with pytest.raises(SaveFault):
            read_tensors(Path(file.name), LIMIT)


def test_a_full_disk_spoils_nothing(folder: SaveFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    good = folder.save({"n": "1"}, ARRAYS)

    def full(*_: object) -> Iterator[bytes]:
        yield b"a part of it"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(savefile, "tensors_file", full)
    with pytest.raises(StoreError, match="no room"):
        folder.save({"n": "2"}, ARRAYS)
    assert os.listdir(folder.folder) == [good.name]
    assert read_tensors(good, LIMIT)[0] == {"n": "1"}


def test_a_file_that_is_too_large_or_gone_is_refused_with_the_reason(folder: SaveFolder) -> None:
    path = folder.save({}, ARRAYS)
    with pytest.raises(SaveFault, match="at most 100 are expected"):
        read_tensors(path, 100)
    path.unlink()
    with pytest.raises(SaveFault, match="cannot be read"):
        read_tensors(path, LIMIT)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}', "another size"),
        (b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}', "outside"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[-8,8]}}', "outside"),
        (b'{"a":{"dtype":"F32","shape":[400],"data_offsets":[0,1600]}}', "outside"),
        (b'{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}', "outside"),
        (b'{"a":3}', "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff\xff", "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(
    folder: SaveFolder, monkeypatch: pytest.MonkeyPatch, header: bytes, said: str
) -> None:
    text = header + b" " * (-len(header) % 8)
    head = len(text).to_bytes(8, "little") + text + bytes(16)
    whole = [head, zlib.crc32(head).to_bytes(4, "little")]
    monkeypatch.setattr(savefile, "tensors_file", lambda *_: iter(whole))
    with pytest.raises(SaveFault, match=said):
        read_tensors(folder.save({}, {}), LIMIT)


def test_vectors_of_another_size_or_that_are_not_finite_are_refused() -> None:
    require(ARRAYS, ("theta",), 77)
    with pytest.raises(SaveFault, match="not 78 float32"):
        require(ARRAYS, ("theta",), 78)
    with pytest.raises(SaveFault, match="not 2 float32"):
        require(ARRAYS, ("norms",), 2)
    with pytest.raises(SaveFault, match="not 1 float32"):
        require(ARRAYS, ("absent",), 1)
    with pytest.raises(SaveFault, match="not finite"):
        require({"theta": np.array([np.inf], np.float32)}, ("theta",), 1)
