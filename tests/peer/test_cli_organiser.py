"""`dugnad organiser` without a daemon: who may order, and what waits in the data folder."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId, peer_text, run_text
from dugnad.peer import starting
from dugnad.peer.cli_organiser import ban, show, stop, unban
from dugnad.peer.errors import UserError
from dugnad.peer.orderkeeper import stored_orders
from dugnad.peer.paths import Home

RUN = RunId(b"r" * 32)
BAD = PeerId(b"b" * 32)


class FakeManifest(msgspec.Struct, frozen=True):
    organiser: bytes
    name: str = "a run"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The data folder in which the run was started."""
    found = Home(tmp_path)
    found.create()
    found.run(RUN).create()
    organiser = Identity.create(found.identity_key).peer
    manifest = FakeManifest(bytes(organiser))
    monkeypatch.setattr(starting, "stored_manifest", lambda run, home: manifest)
    return found


def held(home: Home) -> tuple[str, list[str]]:
    orders = stored_orders(home, RUN, Identity.load(home.identity_key).peer)
    return orders.stop, [one.reason for one in orders.bans]


def test_orders_wait_in_the_data_folder_for_the_next_start(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    run, bad = run_text(RUN), peer_text(BAD)
    ban(run, bad, reason="floods", home=home.root)
    assert "when the daemon of this data folder starts" in capsys.readouterr().out
    stop(run, reason="done", home=home.root)
    assert held(home) == ("done", ["floods"])
    unban(run, bad, home=home.root)
    assert held(home) == ("done", [])
    capsys.readouterr()
    show(run, home=home.root)
    assert capsys.readouterr().out.splitlines() == ["stopped: done", "nobody is banned"]


def test_whoever_is_not_the_organiser_orders_nothing(home: Home) -> None:
    home.identity_key.unlink()
    Identity.create(home.identity_key)
    with pytest.raises(UserError, match="was started by") as caught:
        stop(run_text(RUN), reason="mine", home=home.root)
    assert caught.value.number == "E045"
    assert not home.run(RUN).orders.exists()


def test_what_cannot_be_ordered_is_said_with_its_fix(home: Home) -> None:
    orders: list[tuple[str, Callable[[], None]]] = [
        ("E046", lambda: stop(run_text(RUN), reason=" ", home=home.root)),
        ("E046", lambda: unban(run_text(RUN), peer_text(BAD), home=home.root)),
        ("E001", lambda: unban(run_text(RUN), "nobody", home=home.root)),
        ("E042", lambda: stop("zz", reason="x", home=home.root)),
    ]
    for number, order in orders:
        with pytest.raises(UserError) as caught:
            order()
        assert caught.value.number == number


def test_damaged_orders_are_named_with_their_file(home: Home) -> None:
    home.run(RUN).orders.write_bytes(b"\xc1")
    with pytest.raises(UserError, match=r"orders\.bin") as caught:
        show(run_text(RUN), home=home.root)
    assert caught.value.number == "E046"
