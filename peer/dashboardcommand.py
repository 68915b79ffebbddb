"""`dugnad dashboard`: pages of a run that others make, or of the runs on this machine."""

from __future__ import annotations

import sys
from typing import Final

import uvloop

from dugnad.dht.link import LinkError, parse_link
from dugnad.peer.client import Client
from dugnad.peer.config import Endpoint, parse_page
from dugnad.peer.errors import EXIT_FAILURE, UserError
from dugnad.peer.linkfile import resolve_link
from dugnad.peer.paths import Home

DEFAULT: Final = Endpoint("127.0.0.1", 8080)
"""For this machine alone: whoever wants others to read it says so."""


def endpoint_of(listen: str | None) -> Endpoint:
    """Where the pages are to be served. UserError E001."""
    if listen is None:
        return DEFAULT
    try:
        found = parse_page(listen)
    except ValueError as error:
        raise UserError("E001", f"--listen: {error}", "give HOST:PORT, or a port") from error
    if found is None:
        raise UserError("E001", "--listen is empty", "give HOST:PORT, or a port")
    return found


def serve(source: str | None, listen: str | None, home: Home) -> int:
    """Serve the pages until a signal says stop; the exit status. UserError."""
    endpoint = endpoint_of(listen)
    if source is None:
        from dugnad.peer.localpages import serve_local

        return uvloop.run(serve_local(home, endpoint))
    try:
        link = parse_link(resolve_link(source))
    except LinkError as error:
        raise UserError("E013", error.reason, error.fix) from error
    from dugnad.peer.observer import observe_run

    return uvloop.run(observe_run(home, endpoint, link))


def say_where(home: Home) -> int:
    """Print where the running daemon serves its page; 1 when it serves none. UserError E030."""
    address = Client(home).get("/v1/status").get("dashboard", "")
    if address:
        print(address)
        return 0
    print(
        "the daemon serves no public page; start or join with --dashboard HOST:PORT, put"
        ' dashboard = "HOST:PORT" into config.toml, or run `dugnad dashboard` without --where',
        file=sys.stderr,
    )
    return EXIT_FAILURE
