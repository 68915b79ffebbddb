"""`dugnad receipts`: what stands behind the leaderboard, as a file that anybody can check."""

from pathlib import Path
from typing import Annotated

import typer

from dugnad.peer.cli_common import HomeOption, JsonOption
from dugnad.peer.paths import Home

app = typer.Typer(
    no_args_is_help=True, help="What stands behind the leaderboard, as a file to check."
)


@app.command("export")
def export_receipts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file.")],
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="An id or a name; default: the newest.")
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    home: HomeOption = None,
) -> None:
    """Write the receipts that this machine holds: manifest, commits, inputs and signatures."""
    from dugnad.peer.receiptexport import export

    raise typer.Exit(export(Home.locate(home), run, file, force=force))


@app.command("verify")
def verify_receipts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that somebody exported.")],
    *,
    run: Annotated[str, typer.Option(metavar="ID", help="It must be of this run.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Check every signature and link of a file, offline, and print the board that follows. Exit
    50: something in it is wrong; the first such thing is named.
    """
    from dugnad.peer.receiptverify import verify

    raise typer.Exit(verify(file, run, as_json=as_json))
