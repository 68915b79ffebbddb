"""The web application: read-only pages of a run, for anybody.

How a host uses it::

    feed = RunFeed(receipts=store)           # store has `async receipts(peer, limit)`
    feed.publish(RunDescribed(...))          # and each event of dugnad.dashboard.events
    server = DashboardServer(feed, "127.0.0.1", 8080)
    await server.start()                     # DashboardError(reason, fix) when the port is taken
    ...
    await server.close()                     # at once, open streams included

`publish` is called in the loop that serves. Several runs: `DashboardServer({"name": feed, ...})`.
A `Status` event each 15 s keeps pages from saying that they are stale. To keep the history over
restarts, write `historyrows.changed(written, feed.state().history)` to a database now and then, and
start with `RunFeed(history=historyrows.history_of(rows, now_ms))`.

It answers GET and HEAD only, sets no cookie, sends no CORS header, loads nothing from elsewhere
and has a strict content security policy. It shares nothing with the control API.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from dugnad.dashboard.feed import Feed
from dugnad.dashboard.layout import View, document
from dugnad.dashboard.live import TooManyReaders
from dugnad.dashboard.markup import el
from dugnad.dashboard.runpages import Clock, RunPages, html_answer, static_file, wall_ms
from dugnad.dashboard.startpage import start_page

SHUTDOWN_S: Final = 0.5
"""All answers but the streams, which end by themselves, are made from memory."""
REQUEST_BYTES_MAX: Final = 1024
"""Nobody has anything to send."""

POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(feed: Feed, base: str = "", clock: Clock = wall_ms) -> web.Application:
    """The pages of one run. `base` is the path under which it is mounted, for links."""
    application = _bare_application()
    RunPages(feed, base, clock).add_to(application)
    return application


def make_site(feeds: Mapping[str, Feed], clock: Clock = wall_ms) -> web.Application:
    """Several runs: a page that lists them, and each under `/run/<key>`. Keys are URL-safe."""
    site = _bare_application()

    async def start(request: web.Request) -> web.Response:
        now = clock()
        views = {key: View(feed.state(), now, f"/run/{key}") for key, feed in feeds.items()}
        return html_answer(request, start_page(views))

    site.router.add_get("/", start)
    site.router.add_get("/static/{name}", static_file)
    for key, feed in feeds.items():
        run = web.Application()
        RunPages(feed, f"/run/{key}", clock).add_to(run)
        site.add_subapp(f"/run/{key}", run)
    return site


def _bare_application() -> web.Application:
    application = web.Application(middlewares=[_guard], client_max_size=REQUEST_BYTES_MAX)
    application.on_response_prepare.append(_secure)
    return application


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Only reading, the security headers on every answer, and errors as pages."""
    if request.method not in ("GET", "HEAD"):
        refusal = web.Response(status=405, text="this page can only be read\n")
        refusal.headers["Allow"] = "GET, HEAD"
        return refusal
    try:
        return await handler(request)
    except web.HTTPNotFound:
        body = document(
            "Not found",
            el("h1", "There is no such page"),
            el("p", el("a", "To the start", href="/")),
        )
        return web.Response(status=404, text=body, content_type="text/html")
    except TooManyReaders:
        return web.Response(status=503, text="too many readers\n", headers={"Retry-After": "60"})


async def _secure(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "dugnad"  # versions of libraries are nobody's business
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


class DashboardError(Exception):
    """The pages cannot be served; `reason` says why and `fix` what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason = reason
        self.fix = fix


class DashboardServer:
    """Serves one feed, or several by name, on `host` and `port` (0: any free one)."""

    def __init__(self, feed: Feed | Mapping[str, Feed], host: str, port: int) -> None:
        self._feed = feed
        self._host = host
        self._wanted_port = port
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """Where the pages are, for people."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/"

    async def start(self) -> None:
        """Listen. DashboardError when host and port cannot be had."""
        assert self._runner is None, "the dashboard is served already"
        feed = self._feed
        application = make_site(feed) if isinstance(feed, Mapping) else make_app(feed)
        runner = web.AppRunner(
            application, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._wanted_port).start()
        except OSError as error:
            await runner.cleanup()
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise DashboardError(
                f"the dashboard cannot listen on {self._host}:{self._wanted_port}: {why}",
                "choose another port, or 0 for any free one",
            ) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop at once, open streams included; may be called again."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
