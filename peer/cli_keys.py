"""`dugnad identity export|import`: the key as one file, to keep or to move."""

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from dugnad.peer.cli_common import HomeOption
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home, read_bounded

PassphraseOption = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="Its first line is the passphrase."),
]
_LINE_BYTES_MAX: Final = 4096


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("export")(export_key)
    app.command("import")(import_key)


def export_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    *,
    home: HomeOption = None,
    passphrase_file: PassphraseOption = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without a passphrase.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write this peer's key to one file. Whoever has it is this peer: keep it safe."""
    from dugnad.dht.ids import peer_text
    from dugnad.peer.identityfile import export_identity

    secret = "" if plain else _passphrase(passphrase_file, twice=True)
    peer = export_identity(Home.locate(home), file, secret, force=force or _may(file))
    print(f"wrote the key of {peer_text(peer)} to {file}" + ("" if secret else ", not encrypted"))


def import_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `identity export` wrote.")],
    *,
    home: HomeOption = None,
    passphrase_file: PassphraseOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another identity.")] = False,
) -> None:
    """Make this data folder the peer of FILE. Use it on one machine at a time."""
    from dugnad.dht.ids import peer_text
    from dugnad.peer.identityfile import import_identity

    secret = ""
    if passphrase_file is not None or _encrypted(file):
        secret = _passphrase(passphrase_file, twice=False)
    peer = import_identity(Home.locate(home), file, secret, force=force)
    print(f"this data folder is {peer_text(peer)} now; stop it on the other machine first")


def _may(file: Path) -> bool:
    """Whether a person at a terminal wants the file overwritten."""
    return (
        file.exists()
        and sys.stdin.isatty()
        and typer.confirm(f"{file} exists; overwrite it?", default=False)
    )


def _encrypted(file: Path) -> bool:
    try:
        return b"ENCRYPTED" in read_bounded(file, 1 << 14)
    except (OSError, ValueError):
        return False  # reading it says why


def _passphrase(file: Path | None, *, twice: bool) -> str:
    if file is not None:
        try:
            return read_bounded(file, _LINE_BYTES_MAX).decode().split("\n", 1)[0]
        except (OSError, ValueError) as error:
            raise UserError("E001", f"cannot read {os.fspath(file)}", "check it") from error
    if not sys.stdin.isatty():
        raise UserError(
            "E003",
            "a passphrase is needed, and there is no terminal to ask on",
            "add --passphrase-file FILE" + (", or --plain for none" if twice else ""),
        )
    asked: str = typer.prompt(
        "passphrase (empty for none)" if twice else "passphrase",
        hide_input=True,
        confirmation_prompt=twice,
        default="",
        show_default=False,
    )
    return asked
