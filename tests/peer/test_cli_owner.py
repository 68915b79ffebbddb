"""`dugnad owner`: made, signed, accepted, shown and ended, each with errors that say what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, peer_text
from dugnad.peer.cli_owner import accept, create, release, show, sign
from dugnad.peer.errors import UserError
from dugnad.peer.ownerfiles import load_bond, load_owned, read_offer
from dugnad.peer.paths import Home

Said = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """What was printed since the last look."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def owner(tmp_path: Path, said: Said) -> Home:
    """A data folder with an owner's key."""
    home = Home(tmp_path / "owner")
    create(name="Kari", home=home.root)
    assert said().startswith("owner Kari 12D3KooW")
    return home


@pytest.fixture
def machine(tmp_path: Path) -> Home:
    """The data folder of a peer."""
    home = Home(tmp_path / "machine")
    home.create()
    Identity.create(home.identity_key)
    return home


def peer_of(home: Home) -> str:
    return peer_text(Identity.load(home.identity_key).peer)


def bound(owner: Home, machine: Home, said: Said) -> str:
    sign(peer_of(machine), home=owner.root)
    offer = said().strip()
    accept(offer, home=machine.root)
    assert "belongs to Kari" in said()
    return offer


def test_a_machine_is_signed_accepted_shown_and_released(
    owner: Home, machine: Home, said: Said
) -> None:
    offer = bound(owner, machine, said)
    accept(offer, home=machine.root)
    assert "belongs to Kari" in said(), "twice is no harm"
    show(home=owner.root)
    assert peer_of(machine) in said()
    show(home=machine.root)
    assert "this machine belongs to Kari" in said()
    assert (owner.owner_key.stat().st_mode & 0o777) == 0o600
    release(peer_of(machine), home=owner.root)
    assert [bool(one.released) for one in load_owned(owner).offers] == [True]
    show(home=owner.root, as_json=True)
    assert '"machines": []' in said()
    sign(peer_of(machine), home=owner.root)
    again = said().strip()
    assert read_offer(again).number > read_offer(offer).number
    accept(again, home=machine.root)
    release(home=machine.root)
    assert "has left Kari" in said()
    bond = load_bond(machine)
    assert bond is not None
    assert bond.released


def test_what_cannot_be_done_is_said_with_its_fix(owner: Home, machine: Home, said: Said) -> None:
    offer = bound(owner, machine, said)
    release(home=machine.root)
    said()
    stranger = peer_text(PeerId(b"s" * 32))
    sign(stranger, home=owner.root)
    for_another = said().strip()
    own = peer_text(Identity.load(owner.owner_key).peer)
    wrong: list[tuple[str, str, Callable[[], None]]] = [
        ("E034", "already", lambda: create(home=owner.root)),
        ("E001", "control", lambda: create(name="a\x07", home=machine.root)),
        ("E048", "no owner's key", lambda: sign(stranger, home=machine.root)),
        ("E001", "nobody", lambda: sign("nobody", home=owner.root)),
        ("E001", "own itself", lambda: sign(own, home=owner.root)),
        ("E047", "another peer", lambda: accept(for_another, home=machine.root)),
        ("E047", "newer offer", lambda: accept(offer, home=machine.root)),
        ("E047", "begins with", lambda: accept("hello", home=machine.root)),
        ("E047", "cut or mistyped", lambda: accept(offer[:-9], home=machine.root)),
        ("E047", "not signed", lambda: accept(_changed(offer), home=machine.root)),
        ("E048", "has no owner", lambda: release(home=machine.root)),
        ("E048", "is no machine", lambda: release(peer_of(owner_as_peer(owner)), home=owner.root)),
        ("E019", "no identity key", lambda: accept(for_another, home=owner.root)),
    ]
    for number, words, do in wrong:
        if number == "E019":
            owner.identity_key.unlink()
        with pytest.raises(UserError, match=words) as caught:
            do()
        assert caught.value.number == number
    for file, look in ((machine.bond_file, load_bond), (owner.owned_file, load_owned)):
        file.write_bytes(b"\xc1")
        home = machine if look is load_bond else owner
        with pytest.raises(UserError, match="damaged") as caught:
            look(home)
        assert caught.value.number == "E048"


def _changed(offer: str) -> str:
    middle = 3 * len(offer) // 4  # in the signature
    return offer[:middle] + ("A" if offer[middle] != "A" else "B") + offer[middle + 1 :]


def owner_as_peer(owner: Home) -> Home:
    """The same folder with a peer's key as well."""
    Identity.create(owner.identity_key)
    return owner
