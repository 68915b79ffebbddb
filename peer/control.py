"""The control API: how programs on this machine, and nobody else, see and steer a running daemon.

It listens on 127.0.0.1 and asks for a secret from a file that only the owner can read. A web page
that the owner happens to visit can reach 127.0.0.1 too, so unknown `Host` names (DNS rebinding)
and every foreign `Origin` are refused, verbs are POSTs with a JSON body (which browsers do not
send across origins without asking first), and no answer carries a CORS header. The public pages
are a different application.
"""

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Final, Literal

import msgspec
from aiohttp import web

from dugnad.peer.clock import wall_ms
from dugnad.peer.errors import UserError
from dugnad.peer.lifecycle import SNOOZE_MS_MAX, Input
from dugnad.peer.paths import DaemonFile, Home, write_private
from dugnad.peer.views import EVENTS_PER_REPLY_MAX, DaemonView

LOOPBACK: Final = "127.0.0.1"
REQUEST_BYTES_MAX: Final = 64 * 1024
"""The organiser's orders in base64 have 46 KB at most; other requests a few dozen bytes."""
TOKEN_BYTES: Final = 32
SHUTDOWN_S: Final = 0.5
"""How long a request under way may go on when the daemon stops: all of them answer from memory."""
_EVENT_NUMBER_MAX: Final = 2**53

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/leave`."""

    drain: bool = False


class SteerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/steer`. `seconds` belong to a snooze."""

    wish: Literal["pause", "resume", "snooze", "finish"]
    seconds: Annotated[float, msgspec.Meta(ge=1.0, le=SNOOZE_MS_MAX / 1000)] = 3600.0


class OrdersRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/orders`: the signed record in base64."""

    record: bytes


class ControlServer:
    """Serves `view` to whoever has the token of `home`. `start` and `close` in the daemon's own
    loop.
    """

    def __init__(self, view: DaemonView, home: Home, port: int = 0) -> None:
        self._view = view
        self._home = home
        self._wanted_port = port
        self._token = ""
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listens, then writes the token and `daemon.json`. UserError E018: the port is taken."""
        assert self._runner is None, "the control server runs already"
        runner = web.AppRunner(
            self._application(), access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            self._token = secrets.token_urlsafe(TOKEN_BYTES)
            await web.TCPSite(runner, LOOPBACK, self._wanted_port).start()
            self.port = runner.addresses[0][1]
            write_private(self._home.control_token, self._token.encode("ascii"))
            DaemonFile(os.getpid(), self.port, wall_ms()).write(self._home)
        except OSError as error:
            await runner.cleanup()
            raise UserError(
                "E018",
                f"cannot listen on {LOOPBACK}:{self._wanted_port}: {error.strerror or error}",
                "set control_port to a free port, or to 0",
            ) from error
        except UserError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def close(self) -> None:
        """Stops listening and removes the token and `daemon.json`; may be called again."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        with suppress(OSError):  # a vanished data folder must not keep the daemon from stopping
            self._home.daemon_file.unlink(missing_ok=True)
            self._home.control_token.unlink(missing_ok=True)
        await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._answer_in_json, self._admit], client_max_size=REQUEST_BYTES_MAX
        )
        application.add_routes(
            [
                web.get("/v1/status", self._get_status),
                web.get("/v1/peers", self._get_peers),
                web.get("/v1/leaderboard", self._get_leaderboard),
                web.get("/v1/units", self._get_units),
                web.get("/v1/evaluation", self._get_evaluation),
                web.get("/v1/events", self._get_events),
                web.post("/v1/leave", self._post_leave),
                web.post("/v1/steer", self._post_steer),
                web.post("/v1/orders", self._post_orders),
                web.post("/v1/owner", self._post_owner),
            ]
        )
        return application

    @web.middleware
    async def _answer_in_json(self, request: web.Request, handler: Route) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as answer:
            allow = answer.headers.get("Allow")
            reply = _json({"error": answer.text or answer.reason}, answer.status)
            if allow:
                reply.headers["Allow"] = allow
            return reply

    @web.middleware
    async def _admit(self, request: web.Request, handler: Route) -> web.StreamResponse:
        hosts = {f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"}
        if request.headers.get("Host") not in hosts:
            raise web.HTTPForbidden(text="this API answers to 127.0.0.1 only")
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in hosts:
            raise web.HTTPForbidden(text="this API does not answer to web pages")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        offered = token.strip().encode("utf-8", "surrogateescape")
        if scheme != "Bearer" or not hmac.compare_digest(offered, self._token.encode("ascii")):
            raise web.HTTPUnauthorized(text="wrong or missing token")
        if request.method == "POST" and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send application/json")
        return await handler(request)

    async def _get_status(self, _: web.Request) -> web.Response:
        return _json(self._view.status())

    async def _get_peers(self, _: web.Request) -> web.Response:
        return _json(self._view.peers())

    async def _get_leaderboard(self, _: web.Request) -> web.Response:
        return _json(self._view.leaderboard())

    async def _get_units(self, _: web.Request) -> web.Response:
        return _json(self._view.units())

    async def _get_evaluation(self, _: web.Request) -> web.Response:
        return _json(self._view.evaluation())

    async def _get_events(self, request: web.Request) -> web.Response:
        text = request.query.get("since", "0")
        if not (
            text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= _EVENT_NUMBER_MAX
        ):
            raise web.HTTPBadRequest(text="since is the number of an event")
        return _json(self._view.events(int(text))[:EVENTS_PER_REPLY_MAX])

    async def _post_leave(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read() or b"{}", type=LeaveRequest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"not a leave request: {error}") from None
        self._view.request_leave(asked.drain)
        return _json({"leaving": True, "drain": asked.drain})

    async def _post_orders(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read() or b"{}", type=OrdersRequest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"not orders: {error}") from None
        return _json({"refused": self._view.order(asked.record)})

    async def _post_owner(self, _: web.Request) -> web.Response:
        return _json({"refused": self._view.owner_changed()})

    async def _post_steer(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=SteerRequest)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"not a wish: {error}") from None
        until_ms = wall_end(asked.seconds) if asked.wish == "snooze" else 0
        said = self._view.steer(Input(asked.wish), until_ms)
        state = self._view.status()
        return _json({"said": said, "state": state.state, "reason": state.reason})


def wall_end(seconds: float) -> int:
    """The wall clock in so many seconds, milliseconds."""
    return wall_ms() + round(seconds * 1000)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
