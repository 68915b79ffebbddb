"""The identity as one file: carried to another machine, and never overwritten unasked."""

import stat
from pathlib import Path

import pytest

from dugnad.dht.identity import FolderLock, Identity
from dugnad.peer.errors import UserError
from dugnad.peer.identityfile import export_identity, import_identity
from dugnad.peer.paths import Home


@pytest.mark.parametrize("secret", ["", "a pass phrase"])
def test_an_exported_identity_is_the_same_peer_elsewhere(
    home: Home, tmp_path: Path, secret: str
) -> None:
    peer = Identity.create(home.identity_key).peer
    file, other = tmp_path / "key.pem", Home(tmp_path / "other")
    assert export_identity(home, file, secret) == peer
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert import_identity(other, file, secret) == peer
    assert Identity.load(other.identity_key).peer == peer
    assert import_identity(other, file, secret) == peer  # the same one is no loss


def test_nothing_is_overwritten_unless_it_is_wanted(home: Home, tmp_path: Path) -> None:
    peer = Identity.create(home.identity_key).peer
    file, other = tmp_path / "key.pem", Home(tmp_path / "other")
    export_identity(home, file, "")
    with pytest.raises(UserError, match="E034"):
        export_identity(home, file, "")
    other.create()
    mine = Identity.create(other.identity_key).peer
    with pytest.raises(UserError, match="E034"):
        import_identity(other, file, "")
    assert Identity.load(other.identity_key).peer == mine
    with FolderLock(other.root), pytest.raises(UserError, match="E022"):
        import_identity(other, file, "", force=True)
    assert import_identity(other, file, "", force=True) == peer


def test_a_wrong_passphrase_or_file_is_said(home: Home, tmp_path: Path) -> None:
    Identity.create(home.identity_key)
    export_identity(home, tmp_path / "locked", "right")
    export_identity(home, tmp_path / "open", "")
    (tmp_path / "junk").write_text("junk")
    other = Home(tmp_path / "other")
    for name, secret in (("locked", ""), ("locked", "wrong"), ("open", "x"), ("junk", "")):
        with pytest.raises(UserError, match="E035"):
            import_identity(other, tmp_path / name, secret)
    with pytest.raises(UserError, match="E035"):
        import_identity(other, tmp_path / "none", "")
    assert not other.identity_key.exists()
