"""`dugnad owner`: several machines, one row of the leaderboard."""

from typing import Annotated, Any

import typer

from dugnad.peer.cli_common import HomeOption, JsonOption, print_json
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

app = typer.Typer(
    no_args_is_help=True,
    help="Several machines, one row of the leaderboard: an owner's key signs peers, they accept.",
)
PeerArgument = Annotated[str, typer.Argument(metavar="PEER", help="The machine's id, 12D3KooW…")]


@app.command()
def create(
    *,
    name: Annotated[str, typer.Option(help="What the row is called; three words if left.")] = "",
    home: HomeOption = None,
) -> None:
    """Make an owner's key in this data folder. Whoever has owner.key is the owner: keep it safe."""
    from dugnad.dht.ids import name_of, peer_text
    from dugnad.peer.ownerfiles import create_owner

    made = create_owner(Home.locate(home), name)
    print(f"owner {name or name_of(made.peer)} {peer_text(made.peer)}")
    print("next: `dugnad owner sign PEER` for each machine (`dugnad identity show` there)")


@app.command()
def sign(peer: PeerArgument, *, home: HomeOption = None) -> None:
    """Sign a machine. Prints a line to give to `dugnad owner accept` there."""
    from dugnad.peer.clock import wall_ms
    from dugnad.peer.ownerfiles import offer_text, sign_machine

    print(offer_text(sign_machine(Home.locate(home), _peer(peer), wall_ms())))


@app.command()
def accept(
    offer: Annotated[str, typer.Argument(metavar="OFFER", help="What `owner sign` printed.")],
    *,
    home: HomeOption = None,
) -> None:
    """On the machine: accept its owner. From then on its credit stands in the owner's row."""
    from dugnad.peer.ownerfiles import accept_offer

    place = Home.locate(home)
    bond = accept_offer(place, offer)
    print(f"this machine belongs to {_called(bond)} now; {_told(place)}")


@app.command()
def release(
    peer: Annotated[
        str | None, typer.Argument(metavar="PEER", help="A machine of the owner's key here.")
    ] = None,
    *,
    home: HomeOption = None,
) -> None:
    """End it: with PEER the owner lets that machine go, without it this machine leaves."""
    from dugnad.peer.ownerfiles import leave_owner, release_machine

    place = Home.locate(home)
    if peer is None:
        print(f"this machine has left {_called(leave_owner(place))}; {_told(place)}")
    else:
        release_machine(place, _peer(peer))
        print(f"{peer} is released; {_told(place)}")


@app.command()
def show(*, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """The owner's key of this folder with its machines, and whose machine this is."""
    from dugnad.dht.ids import PeerId, name_of, peer_text
    from dugnad.peer.ownerfiles import load_bond, load_owned, load_owner

    place = Home.locate(home)
    key = load_owner(place).peer if place.owner_key.exists() else None
    owned, bond = load_owned(place), load_bond(place)
    machines = [PeerId(one.peer) for one in owned.offers if not one.released]
    mine = bond if bond is not None and not bond.released else None
    if as_json:
        print_json(
            {
                "owner": peer_text(key) if key is not None else "",
                "name": owned.name,
                "machines": [peer_text(one) for one in machines],
                "machine_of": peer_text(PeerId(mine.owner)) if mine is not None else "",
            }
        )
        return
    if key is None:
        print("there is no owner's key here")
    else:
        print(f"owner {owned.name or name_of(key)} {peer_text(key)}")
    for one in machines:
        print(f"signed: {name_of(one)} {peer_text(one)}")
    print(f"this machine belongs to {_called(mine)}" if mine else "this machine has no owner")


def _called(bond: Any) -> str:  # Any: a type whose module is loaded when it is needed
    from dugnad.dht.ids import PeerId, name_of, peer_text

    owner = PeerId(bond.owner)
    return f"{bond.name or name_of(owner)} ({peer_text(owner)})"


def _peer(text: str) -> Any:  # Any: PeerId, as in `_called`
    from dugnad.dht.ids import parse_peer

    try:
        return parse_peer(text)
    except ValueError as error:
        fix = "`dugnad identity show` on that machine prints it"
        raise UserError("E001", f"{text!r}: {error}", fix) from error


def _told(home: Home) -> str:
    """Let a running daemon of this folder look at the change at once; what came of it."""
    from dugnad.peer.client import Client

    try:
        refused = Client(home).post("/v1/owner", {})["refused"]
    except UserError as error:
        if error.number != "E030":
            raise
        return "the boards show it once a daemon of this data folder takes part"
    return f"the daemon does not take it: {refused}" if refused else "the boards show it soon"
