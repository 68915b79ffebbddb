"""`dugnad config`: what holds and why; `config init`: a file with every setting explained."""

import typer

from dugnad.peer.cli_common import HomeOption, JsonOption, print_json
from dugnad.peer.paths import Home

app = typer.Typer(invoke_without_command=True)


@app.callback()
def config(context: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Every setting of the daemon, its value here, and where that comes from."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from dugnad.peer.config import load_settings
    from dugnad.peer.render import table

    rows = [asdict(row) for row in load_settings(Home.locate(home)).explain()]
    if as_json:
        print_json(rows)
    else:
        print(table(rows))


@app.command()
def init(home: HomeOption = None) -> None:
    """Write config.toml with every setting, what it does and its default."""
    from dugnad.peer.configfile import write_config

    place = Home.locate(home)
    write_config(place)
    print(f"wrote {place.config}")
