"""`dugnad doctor`: what is wrong with this machine, its settings and its network, and the fix."""

from typing import Annotated, Final

import typer

from dugnad.peer.cli_common import HomeOption, JsonOption, print_json
from dugnad.peer.errors import EXIT_FAILURE, EXIT_OK
from dugnad.peer.paths import Home

_MARKS: Final = {"ok": "ok  ", "warn": "warn", "bad": "BAD ", "skip": "-   "}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(doctor)


def doctor(
    home: HomeOption = None,
    as_json: JsonOption = False,
    devices: Annotated[bool, typer.Option(help="Try the devices with torch: seconds.")] = True,
) -> None:
    """Look for what is wrong, and say how to put it right. Exit 1: something is bad."""
    from dataclasses import asdict

    from dugnad.peer.config import load_settings
    from dugnad.peer.doctor import examine
    from dugnad.peer.views import printable

    place = Home.locate(home)
    findings = examine(place, load_settings(place).settings, devices=devices)
    if as_json:
        print_json([asdict(one) for one in findings])
    else:
        width = max(len(one.check) for one in findings)
        for one in findings:
            print(f"{_MARKS[one.level]} {one.check:<{width}}  {printable(one.text, 300)}")
            if one.fix and one.level in ("bad", "warn"):
                print(f"     {'':<{width}}  fix: {one.fix}")
    raise typer.Exit(EXIT_FAILURE if any(one.level == "bad" for one in findings) else EXIT_OK)
