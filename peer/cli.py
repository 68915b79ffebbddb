"""The command line. Every command is short: heavy modules are imported inside the commands that
need them, so that `dugnad status` answers in a blink.

Exit codes: 0 ok, 1 failure, 2 bad input, 3 paused, 4 not running, and one for each kind of bad
input; the table is `dugnad.peer.errors.ERRORS`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dugnad.peer import (
    cli_config,
    cli_doctor,
    cli_keys,
    cli_organiser,
    cli_owner,
    cli_receipts,
    cli_service,
    cli_steer,
)
from dugnad.peer.cli_common import HomeOption, JsonOption, ask, print_json
from dugnad.peer.clock import wall_ms
from dugnad.peer.errors import (
    EXIT_OK,
    EXIT_PAUSED,
    UserError,
)
from dugnad.peer.paths import Home

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Neighbours who train one model together, with nobody in charge.",
)
identity_app = typer.Typer(no_args_is_help=True, help="The key that is this peer.")
app.add_typer(identity_app, name="identity")
app.add_typer(cli_config.app, name="config")
app.add_typer(cli_service.app, name="service")
app.add_typer(cli_organiser.app, name="organiser")
app.add_typer(cli_owner.app, name="owner")
app.add_typer(cli_receipts.app, name="receipts")
cli_keys.register(identity_app)
cli_steer.register(app)
cli_doctor.register(app)

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the first run.")]
ListenOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where other peers reach this one.")
]
AnnounceOption = Annotated[
    list[str] | None, typer.Option(metavar="MULTIADDR", help="Address to tell others; repeatable.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads (default: half of the cores).")
]
CpuShareOption = Annotated[
    float | None, typer.Option(help="Share of the time that they may be busy, 0.01 to 1.")
]
NameOption = Annotated[str | None, typer.Option(help="The name that others see.")]
OutboundOption = Annotated[
    bool | None, typer.Option("--outbound-only", help="Take no connections from others.")
]

LinkFileOption = Annotated[
    str | None, typer.Option(metavar="PATH", help="Write the link there, for `join @PATH`.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting; repeatable.")
]
DashboardOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Serve the public page of the run there.")
]


@app.command()
def start(
    run: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="The run file.")] = None,
    *,
    example: Annotated[bool, typer.Option(help="Print a complete run file and stop.")] = False,
    new: Annotated[
        bool, typer.Option(help="A new run, even if this file was started before.")
    ] = False,
    home: HomeOption = None,
    yes: YesOption = False,
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    threads: ThreadsOption = None,
    cpu_share: CpuShareOption = None,
    name: NameOption = None,
    outbound_only: OutboundOption = None,
    dashboard: DashboardOption = None,
    link_file: LinkFileOption = None,
    setting: SetOption = None,
) -> None:
    """Start a run of your own and be its first peer."""
    if example:
        from dugnad.peer.runfile import EXAMPLE_RUN

        print(EXAMPLE_RUN, end="")
        return
    if run is None:
        raise UserError(
            "E001", "start needs a run file", "`dugnad start --example > run.toml` writes one"
        )
    from dugnad.peer.config import load_settings
    from dugnad.peer.starting import prepare_start

    place = Home.locate(home)
    flags = _flags(yes, listen, announce, threads, cpu_share, name, outbound_only, dashboard)
    flags |= {"link_file": link_file, **set_flags(setting)}
    settings = load_settings(place, flags).settings
    ready = prepare_start(run, place, settings, new=new)
    from dugnad.peer.launch import become_daemon

    _finish(become_daemon(place, settings, manifest=ready.manifest, link=ready.link, link_text=""))


@app.command()
def join(
    link: Annotated[str, typer.Argument(metavar="LINK", help="The line that somebody shared.")],
    *,
    home: HomeOption = None,
    yes: YesOption = False,
    listen: ListenOption = None,
    announce: AnnounceOption = None,
    threads: ThreadsOption = None,
    cpu_share: CpuShareOption = None,
    name: NameOption = None,
    outbound_only: OutboundOption = None,
    dashboard: DashboardOption = None,
    setting: SetOption = None,
) -> None:
    """Lend this machine to a run. `@FILE` waits for a file with the link in it."""
    from dugnad.peer.config import load_settings
    from dugnad.peer.linkfile import resolve_link
    from dugnad.peer.starting import prepare_join

    place = Home.locate(home)
    flags = _flags(yes, listen, announce, threads, cpu_share, name, outbound_only, dashboard)
    flags |= set_flags(setting)
    settings = load_settings(place, flags).settings
    link = resolve_link(link)
    ready = prepare_join(link, place, settings)
    from dugnad.peer.launch import become_daemon

    _finish(
        become_daemon(place, settings, manifest=ready.manifest, link=ready.link, link_text=link)
    )


@app.command()
def status(
    home: HomeOption = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the exit code.")] = False,
) -> None:
    """What the daemon is doing, and if it is not training, why. Exit 3: paused, 4: not running."""
    answer = ask(home, "/v1/status")
    if quiet:
        pass
    elif as_json:
        print_json(answer)
    else:
        from dugnad.peer.render import status_text

        print(status_text(answer))
    if answer["state"] == "paused":
        _finish(EXIT_PAUSED)


@app.command()
def peers(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """The peers of the swarm, as this daemon sees them."""
    answer = ask(home, "/v1/peers")
    columns: tuple[str, ...] = (
        "name",
        "peer",
        "state",
        "roles",
        "link",
        "tokens_per_s",
        "listed_tokens",
        "last_seen_s",
    )
    if any(row.get("rate_bytes_per_s") for row in answer):
        columns = (*columns, "codec", "rate_bytes_per_s")
    if any(row.get("reason") for row in answer):
        columns = (*columns, "reason")
    _show(answer, answer, as_json, columns)


@app.command()
def leaderboard(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Who did how much, confirmed by others."""
    from dugnad.peer.leaderboard import board_text, print_board, read_board

    board = read_board(ask(home, "/v1/leaderboard"))
    if as_json:
        print(board_text(board))
    else:
        print_board(board, sys.stdout, now_ms=wall_ms())


@app.command()
def units(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """The work units: open, claimed, trained, listed, settled, done twice; and the open ones."""
    answer = ask(home, "/v1/units")
    if as_json:
        print_json(answer)
        return
    from dugnad.peer.render import units_text

    print(units_text(answer))


@app.command()
def evaluation(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """The validation curve, and the credit of evaluated and prepared tokens."""
    answer = ask(home, "/v1/evaluation")
    if as_json:
        print_json(answer)
        return
    from dugnad.peer.render import evaluation_text

    print(evaluation_text(answer))


@app.command("dashboard")
def dashboard_pages(
    link: Annotated[
        str | None, typer.Argument(metavar="[LINK]", help="Watch this run; `@FILE` as with join.")
    ] = None,
    *,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Default: 127.0.0.1:8080.")
    ] = None,
    where: Annotated[
        bool, typer.Option("--where", help="Say where the running daemon serves its page.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Serve the pages of a run without taking part in it, or of the runs on this machine's disk."""
    from dugnad.peer.dashboardcommand import say_where, serve

    place = Home.locate(home)
    _finish(say_where(place) if where else serve(link, listen, place))


@app.command()
def leave(
    home: HomeOption = None,
    drain: Annotated[
        bool, typer.Option(help="Wait up to five minutes until all is handed in, not just ten s.")
    ] = False,
) -> None:
    """Leave the run and stop the daemon."""
    from dugnad.peer.client import Client

    Client(Home.locate(home)).post("/v1/leave", {"drain": drain})
    print("leaving, when all that was learned is handed in" if drain else "leaving")


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="LINK|RUN", help="A link, or a run's id here.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.")],
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    home: HomeOption = None,
) -> None:
    """Write the agreed model as files that transformers' Llama loads."""
    from dugnad.peer.export import export as write

    _finish(write(source, folder, Home.locate(home), force=force))


@app.command()
def sample(
    source: Annotated[
        str | None, typer.Argument(metavar="[LINK|RUN]", help="Default: the newest run here.")
    ] = None,
    *,
    prompt: Annotated[str, typer.Option(help="The text to go on with.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Bytes to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="0: always the likeliest.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    home: HomeOption = None,
) -> None:
    """Text that the newest agreed model writes."""
    from dugnad.peer.export import sample as write

    place = Home.locate(home)
    _finish(write(source, place, prompt=prompt, count=tokens, temperature=temperature, seed=seed))


@app.command()
def probe(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Measure what this machine can do."""
    from dugnad.peer.probe import main as measure

    _finish(measure(Home.locate(home), as_json=as_json))


@app.command()
def demo(
    *,
    peers: Annotated[int, typer.Option(min=1, max=16, help="Peers on this machine.")] = 4,
    minutes: Annotated[float, typer.Option(min=0.2, max=600.0, help="How long to train.")] = 1.5,
    churn: Annotated[bool, typer.Option(help="Kill one peer and let another join late.")] = True,
    control: Annotated[bool, typer.Option(help="Also train without exchange, to compare.")] = True,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
) -> None:
    """Train a small model with a swarm on this machine, kill a peer on the way, and say how it
    went.
    """
    from dugnad.peer.demo import main as show

    _finish(
        show(
            peers=peers,
            minutes=minutes,
            churn=churn,
            control=control,
            seed=seed,
            json_file=json_file,
        )
    )


@app.command()
def simulate(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A name, a TOML file, or all.")
    ] = "all",
    *,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds, one run each: 10, or a crowd's 1.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    replay: Annotated[bool, typer.Option("--replay", help="One seed, with its story.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="SVG", help="Draw the first broken, or the first, run.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the scenarios and stop.")] = False,
) -> None:
    """Play what volunteers do to a swarm, in virtual time, and check every promise."""
    from dugnad.simulation.command import Wish
    from dugnad.simulation.command import main as rehearse

    wish = Wish(scenario, seeds, seed, replay, json_file, plot, listing)
    _finish(rehearse(wish, time.perf_counter))


@app.command()
def version() -> None:
    """Versions of the program and of what it speaks."""
    from dugnad.dht.protocol import PROTOCOL
    from dugnad.peer.manifest import FORMAT

    print(f"dugnad {program_version()}, protocol {PROTOCOL}, manifest format {FORMAT}")


@identity_app.command("show")
def identity_show(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """The id and the name of this peer."""
    place = Home.locate(home)
    if not place.identity_key.exists():
        raise UserError(
            "E024",
            f"there is no identity in {place.root} yet",
            "`dugnad identity create` makes one; so do `dugnad join` and `dugnad start`",
        )
    _show_identity(place, as_json)


@identity_app.command("create")
def identity_create(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Make the key now, to send its id to the organiser of a run that is not open."""
    place = Home.locate(home)
    place.create()
    from dugnad.dht.identity import Identity, IdentityError
    from dugnad.peer.starting import identity_error

    try:
        Identity.create(place.identity_key)
    except IdentityError as error:
        raise identity_error(error) from error
    _show_identity(place, as_json)


def program_version() -> str:
    """The version of the installed distribution, or 'unknown' when run from a bare tree."""
    import importlib.metadata

    try:
        return importlib.metadata.version("dugnad")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code; errors that a person can put right go to stderr."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="dugnad")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells expect
    sys.exit(EXIT_OK)


def _flags(
    yes: bool,
    listen: str | None,
    announce: list[str] | None,
    threads: int | None,
    cpu_share: float | None,
    name: str | None,
    outbound_only: bool | None,
    dashboard: str | None,
) -> dict[str, object]:
    return {
        "yes": yes or None,
        "listen": listen,
        "announce": announce or None,
        "threads": threads,
        "cpu_share": cpu_share,
        "name": name,
        "outbound_only": outbound_only,
        "dashboard": dashboard,
    }


def set_flags(given: list[str] | None) -> dict[str, object]:
    """Settings of `--set NAME=VALUE`. UserError E001 for what is none."""
    from dugnad.peer.config import SETTING_NAMES, nearest

    found: dict[str, object] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in SETTING_NAMES:
            raise UserError(
                "E001",
                f"--set {one}: {name!r} is not a setting{nearest(name, SETTING_NAMES)}",
                "give NAME=VALUE; `dugnad config` lists the names",
            )
        found[name] = value.strip()
    return found


def _show(answer: Any, rows: Any, as_json: bool, columns: Sequence[str] = ()) -> None:
    """Prints JSON, or `rows` as a table. Any: as for `_ask`."""
    if as_json:
        print_json(answer)
        return
    from dugnad.peer.render import table

    print(table(rows, columns))


def _show_identity(home: Home, as_json: bool) -> None:
    from dugnad.dht.identity import Identity, IdentityError
    from dugnad.dht.ids import name_of, peer_text
    from dugnad.peer.render import pairs
    from dugnad.peer.starting import identity_error

    try:
        peer = Identity.load(home.identity_key).peer
    except IdentityError as error:
        raise identity_error(error) from error
    fields = {"peer": peer_text(peer), "name": name_of(peer), "key": str(home.identity_key)}
    if as_json:
        print_json(fields)
    else:
        print(pairs(list(fields.items())))


def _finish(code: int) -> NoReturn:
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
