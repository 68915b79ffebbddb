"""`dugnad service install|remove`: training whenever its owner is logged in (or always)."""

import sys
from typing import Annotated

import typer

from dugnad.peer.cli_common import HomeOption
from dugnad.peer.paths import Home

app = typer.Typer(no_args_is_help=True, help="Run dugnad as a service of your own session.")


@app.command()
def install(
    what: Annotated[str, typer.Argument(metavar="LINK|RUN.toml", help="What it takes part in.")],
    *,
    home: HomeOption = None,
    start: Annotated[bool, typer.Option(help="Start it now, too.")] = True,
) -> None:
    """Write a systemd user unit (a launchd agent on macOS) and start it."""
    from pathlib import Path

    from dugnad.peer import service
    from dugnad.peer.config import load_settings

    place = Home.locate(home)
    place.create()
    load_settings(place)  # what is wrong with them is said now, not in a log
    if what.startswith("dugnad:"):
        command = ["join", what]
    else:
        command = ["start", str(Path(what).expanduser().absolute())]
    path, left = service.install(command, place, start=start)
    print(f"wrote {path}")
    for line in left:
        print(f"now run: {line}")
    if sys.platform.startswith("linux"):
        print("it runs while you are logged in; for always: loginctl enable-linger")


@app.command()
def remove() -> None:
    """Stop the service and take its file away. Keys, data and credit stay."""
    from dugnad.peer import service

    path, was = service.remove()
    print(f"removed {path}" if was else f"there is no service at {path}")
