"""Commands with which an owner steers a running daemon, and watches it: pause, resume, snooze,
finish, top."""

import re
import time
from typing import Annotated, Final

import typer

from dugnad.peer.cli_common import HomeOption, JsonOption, ask, print_json
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home

TOP_S: Final = 1.0
"""Between two pictures of `top`."""
_UNITS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(pause)
    app.command()(resume)
    app.command()(snooze)
    app.command()(finish)
    app.command()(top)


def pause(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Train no further until `dugnad resume`, also after a restart. The peer stays in the swarm."""
    _steer(home, as_json, "pause")


def resume(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Train again: after a pause, a snooze or too many failures; or instead of finishing."""
    _steer(home, as_json, "resume")


def snooze(
    duration: Annotated[str, typer.Argument(metavar="TIME", help="Such as 30m, 2h or 1d.")] = "1h",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause for some time."""
    _steer(home, as_json, "snooze", parse_duration(duration))


def finish(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Finish the work in hand, hand in, hand over, then stop. `resume` takes it back."""
    _steer(home, as_json, "finish")


def top(
    home: HomeOption = None,
    once: Annotated[bool, typer.Option(help="One picture, then stop.")] = False,
) -> None:
    """Watch this peer and its swarm. Ctrl-C ends the view, not the daemon."""
    from rich.console import Console
    from rich.live import Live

    from dugnad.peer.topview import picture

    console = Console()
    first = picture(ask(home, "/v1/status"), ask(home, "/v1/peers"))
    if once or not console.is_terminal:
        console.print(first)
        return
    with Live(first, console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(TOP_S)
            live.update(picture(ask(home, "/v1/status"), ask(home, "/v1/peers")), refresh=True)


def parse_duration(text: str) -> float:
    """Seconds of '30m', '2h', '1.5h', '1d'; UserError E001. A bare number would be a guess."""
    from dugnad.peer.lifecycle import SNOOZE_MS_MAX

    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|min|m|h|d)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1.0 <= seconds <= SNOOZE_MS_MAX / 1000:
        raise UserError(
            "E001",
            f"{text!r} is not a time from a second to 31 days",
            "give it like 30m, 2h or 1d; without an end, use `dugnad pause`",
        )
    return seconds


def _steer(home: HomeOption, as_json: bool, wish: str, seconds: float | None = None) -> None:
    from dugnad.peer.client import Client

    body: dict[str, object] = {"wish": wish}
    if seconds is not None:
        body["seconds"] = seconds
    answer = Client(Home.locate(home)).post("/v1/steer", body)
    if as_json:
        print_json(answer)
        return
    state = f"{answer['state']}: {answer['reason']}" if answer["reason"] else answer["state"]
    print(f"{answer['said']} ({state})")
