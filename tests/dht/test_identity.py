"""The identity key file and the folder lock."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dugnad.dht.identity import FolderLock, FolderLocked, Identity, IdentityError, load_or_create
from dugnad.dht.records import verify_ed25519


def test_a_created_identity_loads_again_and_signs(tmp_path: Path) -> None:
    path = tmp_path / "data" / "identity.key"
    made = Identity.create(path)
    loaded = Identity.load(path)
    assert loaded.peer == made.peer
    assert verify_ed25519(made.peer, b"m", loaded.sign(b"m"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_file_is_libp2ps_private_key_protobuf(tmp_path: Path) -> None:
    path = tmp_path / "k"
    made = Identity.create(path)
    raw = path.read_bytes()
    assert raw[:4] == bytes([0x08, 0x01, 0x12, 0x40])
    assert len(raw) == 68
    assert raw[36:] == made.peer


def test_load_or_create_makes_the_key_once(tmp_path: Path) -> None:
    path = tmp_path / "k"
    assert load_or_create(path).peer == load_or_create(path).peer


def test_create_never_replaces_a_key(tmp_path: Path) -> None:
    path = tmp_path / "k"
    Identity.create(path)
    before = path.read_bytes()
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_may_read_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "k"
    Identity.create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError) as caught:
        Identity.load(path)
    assert caught.value.fix == f"chmod 600 {path}"


def _damaged(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_damaged_keys_are_refused_with_their_reason(tmp_path: Path) -> None:
    Identity.create(tmp_path / "k")
    good = (tmp_path / "k").read_bytes()
    cases = {
        b"": "cut short",
        good[:-1]: "cut short",
        good[:3]: "cut short",
        bytes([0x08, 0x00]) + good[2:]: "not an Ed25519 key",
        good + b"x": "does not hold",
        b"-----BEGIN PRIVATE KEY-----": "does not hold",
        good[:-1] + bytes([good[-1] ^ 1]): "do not fit",
    }
    for content, reason in cases.items():
        with pytest.raises(IdentityError, match=reason):
            Identity.load(_damaged(tmp_path, content))


def test_a_missing_key_is_an_identity_error(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no identity key"):
        Identity.load(tmp_path / "nothing")


def test_a_folder_serves_as_key_of_nobody(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot read"):
        Identity.load(tmp_path)


def test_an_identity_shows_no_secret(tmp_path: Path) -> None:
    assert repr(Identity.ephemeral(bytes(32))).startswith("Identity(")
    assert len(repr(Identity.ephemeral(bytes(32)))) == len("Identity(123456)")


def test_a_second_lock_on_a_folder_names_the_holder(tmp_path: Path) -> None:
    with FolderLock(tmp_path), pytest.raises(FolderLocked) as caught:
        FolderLock(tmp_path).acquire()
    assert caught.value.pid == os.getpid()


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        lock = FolderLock(tmp_path)
        with lock:
            pass
        lock.release()


@pytest.mark.slow
def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from dugnad.dht.identity import FolderLock\n"
        "FolderLock(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FolderLocked) as caught:
            FolderLock(tmp_path).acquire()
        assert caught.value.pid == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with FolderLock(tmp_path):
            pass
