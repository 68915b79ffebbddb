"""What the modules of the command line share. Imports nothing heavy."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dugnad.peer.paths import Home

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Data folder (default: $DUGNAD_HOME, else your own).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ask(home: Path | None, path: str) -> Any:
    """What the daemon answers; Any: JSON of the shapes in `dugnad.peer.views`."""
    from dugnad.peer.client import Client

    return Client(Home.locate(home)).get(path)


def print_json(value: Any) -> None:
    """Any: whatever JSON can hold."""
    print(json.dumps(value, indent=2))
