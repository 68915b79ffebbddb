"""Commands of whoever started a run: stop it, ban a peer, lift a ban, and see what was ordered."""

import base64
from pathlib import Path
from typing import Annotated, Any

import typer

from dugnad.peer.cli_common import HomeOption, JsonOption, print_json
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

app = typer.Typer(
    no_args_is_help=True, help="Stop your own run, or ban a peer from it, for everybody to see."
)
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, the beginning of one, or its name.")
]
PeerArgument = Annotated[str, typer.Argument(metavar="PEER", help="A peer id, 12D3KooW…")]
ReasonOption = Annotated[str, typer.Option(help="Why: everybody reads it.")]


@app.command()
def stop(run: RunArgument, *, reason: ReasonOption, home: HomeOption = None) -> None:
    """Stop the run: nothing is merged any more, the model stays, export and page go on."""
    _order(home, run, lambda before, now: _orders().stopped(before, reason, now))


@app.command()
def ban(
    run: RunArgument, peer: PeerArgument, *, reason: ReasonOption, home: HomeOption = None
) -> None:
    """Take no contribution of a peer any more. What it did before stands."""
    whom = _peer(peer)
    _order(home, run, lambda before, now: _orders().banned(before, whom, reason, now))


@app.command()
def unban(run: RunArgument, peer: PeerArgument, *, home: HomeOption = None) -> None:
    """Lift the ban of a peer."""
    whom = _peer(peer)
    _order(home, run, lambda before, now: _orders().unbanned(before, whom, now))


@app.command()
def show(run: RunArgument, *, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """What the organiser has ordered, as far as this data folder has heard."""
    from dugnad.dht.ids import name_of, peer_text

    _, _, held = _held(Home.locate(home), run)
    if as_json:
        bans = [{"peer": peer_text(one.peer), "reason": one.reason} for one in held.bans]
        print_json({"number": held.number, "stop": held.stop, "bans": bans})
        return
    print(f"stopped: {held.stop}" if held.stop else "the run is not stopped")
    for one in held.bans:
        print(f"banned: {name_of(one.peer)} {peer_text(one.peer)}: {one.reason}")
    if not held.bans:
        print("nobody is banned")


def _orders() -> Any:  # Any: a module, loaded when it is needed
    from dugnad.averaging import orders

    return orders


def _peer(text: str) -> Any:  # Any: PeerId, whose module is loaded when it is needed
    from dugnad.dht.ids import parse_peer

    try:
        return parse_peer(text)
    except ValueError as error:
        raise UserError("E001", f"{text!r}: {error}", "`dugnad peers` lists the ids") from error


def _held(home: Home, text: str) -> tuple[Any, Any, Any]:
    """Run, manifest and orders of a run in this data folder. Any: types that are loaded late."""
    from dugnad.dht.ids import PeerId
    from dugnad.dht.records import RecordError
    from dugnad.peer.exportsources import find_run
    from dugnad.peer.orderkeeper import stored_orders
    from dugnad.peer.starting import stored_manifest

    run = find_run(home, text)
    manifest = stored_manifest(run, home)
    if manifest is None:
        raise UserError(
            "E042", f"{home.root} keeps no manifest of that run", "start or join it once"
        )
    try:
        return run, manifest, stored_orders(home, run, PeerId(manifest.organiser))
    except RecordError as error:
        path = home.run(run).orders
        raise UserError("E046", f"{path}: {error.reason}", f"move {path} away") from error


def _order(folder: Path | None, text: str, change: Any) -> None:
    """Sign what follows from the orders so far, keep it, and hand it to the running daemon."""
    from dugnad.averaging.orders import OrderError, sign_orders
    from dugnad.dht.identity import Identity, IdentityError
    from dugnad.dht.ids import peer_text
    from dugnad.dht.records import encode
    from dugnad.peer.clock import wall_ms
    from dugnad.peer.orderkeeper import store_orders
    from dugnad.peer.starting import identity_error

    home = Home.locate(folder)
    run, manifest, before = _held(home, text)
    try:
        identity = Identity.load(home.identity_key)
    except IdentityError as error:
        raise identity_error(error) from error
    if identity.peer != manifest.organiser:
        raise UserError(
            "E045",
            f"the run {manifest.name!r} was started by {peer_text(manifest.organiser)}, "
            f"this is {peer_text(identity.peer)}",
            "give --home of the data folder that the run was started in",
        )
    try:
        orders = sign_orders(change(before, wall_ms()), run, identity)
    except OrderError as error:
        raise UserError("E046", error.reason, "`dugnad organiser show` lists the orders") from error
    _hand_over(home, encode(orders), lambda: store_orders(home, run, orders))


def _hand_over(home: Home, data: bytes, store: Any) -> None:
    """To the daemon if one runs, which keeps it, too; else into the data folder."""
    from dugnad.peer.client import Client

    try:
        answer = Client(home).post("/v1/orders", {"record": base64.b64encode(data).decode("ascii")})
    except UserError as error:
        if error.number != "E030":
            raise
        store()
        print("written; it takes effect when the daemon of this data folder starts")
        return
    if answer["refused"]:
        store()
        print(f"written; the running daemon does not take it: {answer['refused']}")
    else:
        print("ordered; the peers that are reached obey at once, others when they hear of it")
