"""A daemon as a process: it alone uses the data folder, and signals make it leave."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import uvloop

from dugnad.dht.identity import FolderLock, FolderLocked, Identity, IdentityError
from dugnad.dht.link import Link
from dugnad.peer.config import Settings
from dugnad.peer.daemon import EXIT_INTERRUPTED, Daemon, Start
from dugnad.peer.manifest import Manifest
from dugnad.peer.paths import Home
from dugnad.peer.starting import folder_locked, identity_error


def run_daemon(
    home: Home,
    settings: Settings,
    *,
    manifest: Manifest | None,
    link: Link | None,
) -> int:
    """Run a peer until it leaves; returns the exit status. Raises UserError."""
    try:
        with FolderLock(home.root):
            identity = Identity.load_or_create(home.identity_key)
            return uvloop.run(_run(Start(home, settings, manifest, link), identity))
    except FolderLocked as error:
        raise folder_locked(error, home) from error
    except IdentityError as error:
        raise identity_error(error) from error


async def _run(start: Start, identity: Identity) -> int:
    daemon = Daemon(start, identity)
    with _signals(daemon):
        try:
            return await daemon.run()
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED  # by a signal, before it took part


@contextlib.contextmanager
def _signals(daemon: Daemon) -> Iterator[None]:
    """SIGTERM and Ctrl-C do what `leave` does; the second one goes at once."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.request_leave, False)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
