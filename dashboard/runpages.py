"""The addresses of one run: each handler renders a view of the state, or looks up receipts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from dugnad.dashboard.assets import assets
from dugnad.dashboard.boardpage import (
    board_query,
    leaderboard_csv,
    leaderboard_json,
    leaderboard_page,
)
from dugnad.dashboard.charts import NARROW, WIDE
from dugnad.dashboard.contributor import RECEIPTS_SHOWN, contributor_page, known_peer
from dugnad.dashboard.feed import Feed
from dugnad.dashboard.figures import FIGURES, Figure, choice_of
from dugnad.dashboard.frontpage import events_page, front_page
from dugnad.dashboard.layout import View
from dugnad.dashboard.metrics import metrics_text
from dugnad.dashboard.peerspage import peers_page, peers_query
from dugnad.dashboard.query import FILTER_CHARS_MAX
from dugnad.dashboard.snapshot import etag, snapshot
from dugnad.dashboard.svgstyle import SVG_STYLE
from dugnad.dashboard.text import line

KEPT_ANSWERS_MAX: Final = 64
"""Answers kept for a second, so that many readers of one page cost one rendering."""
ADDRESS_CHARS_MAX: Final = 1000
"""Longer addresses are answered, but not kept."""
PEER_CHARS_MAX: Final = 64
ZIP_LEVEL: Final = 3
"""Four times smaller in two milliseconds; higher levels cost more than they save."""
FOREVER: Final = "public, max-age=31536000, immutable"

_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(SVG_STYLE.encode()).digest()).decode()
SVG_POLICY: Final = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'"
"""For charts that stand alone: their one style, and nothing else."""

Clock = Callable[[], int]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Kept:
    second: int
    etag: str
    body: bytes
    zipped: bytes


class RunPages:
    """The handlers of one run, mounted at `base`."""

    def __init__(self, feed: Feed, base: str, clock: Clock) -> None:
        self._feed = feed
        self._base = base
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def add_to(self, application: web.Application) -> None:
        """Add the routes, and the hook that ends the streams at shutdown."""
        routes: tuple[tuple[str, Handler], ...] = (
            ("/", self._front),
            ("/events", self._events),
            ("/peers", self._peers),
            ("/leaderboard", self._leaderboard),
            ("/leaderboard.json", self._leaderboard_json),
            ("/leaderboard.csv", self._leaderboard_csv),
            ("/peer/{peer}", self._peer),
            ("/api/v1/snapshot", self._snapshot),
            ("/api/chart/{name:[a-z]{1,20}}.svg", self._chart),
            ("/api/chart/{name:[a-z]{1,20}}.csv", self._chart_csv),
            ("/metrics", self._metrics),
            ("/static/{name}", static_file),
        )
        for path, handler in routes:
            application.router.add_get(path, handler)
        application.router.add_get("/api/v1/events", self._stream, allow_head=False)
        application.on_shutdown.append(self._shutdown)

    async def _shutdown(self, _: web.Application) -> None:
        self._feed.hub.close()

    def _view(self) -> View:
        state = self._feed.state()
        return View(state, self._clock(), self._base, etag(self._feed.hub, state.events))

    def _made(self, request: web.Request, make: Callable[[View], str | bytes]) -> _Kept:
        """What `make` makes of the view, or what it made for this address in this second."""
        view = self._view()
        key, second = request.path_qs, view.now_ms // 1000
        kept = self._kept.get(key)
        if kept is not None and kept.second == second:
            return kept
        made = make(view)
        body = made.encode("utf-8", "replace") if isinstance(made, str) else made
        kept = _Kept(second, view.place, body, gzip.compress(body, ZIP_LEVEL, mtime=0))
        if len(key) <= ADDRESS_CHARS_MAX:
            self._kept[key] = kept
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT_ANSWERS_MAX:
                self._kept.popitem(last=False)
        return kept

    async def _front(self, request: web.Request) -> web.Response:
        choice = choice_of(request.query)
        return _page(request, self._made(request, lambda view: front_page(view, choice)))

    async def _events(self, request: web.Request) -> web.Response:
        return _page(request, self._made(request, events_page))

    async def _peers(self, request: web.Request) -> web.Response:
        query = peers_query(request.query)
        return _page(request, self._made(request, lambda view: peers_page(view, query)))

    async def _leaderboard(self, request: web.Request) -> web.Response:
        query = board_query(request.query)
        me = line(request.query.get("me", ""), FILTER_CHARS_MAX)
        return _page(request, self._made(request, lambda view: leaderboard_page(view, query, me)))

    async def _leaderboard_json(self, request: web.Request) -> web.Response:
        made = self._made(request, leaderboard_json)
        return _data(request, made, "application/json")

    async def _leaderboard_csv(self, request: web.Request) -> web.Response:
        return _data(request, self._made(request, leaderboard_csv), "text/csv")

    async def _peer(self, request: web.Request) -> web.Response:
        peer = line(request.match_info["peer"][: 2 * PEER_CHARS_MAX], PEER_CHARS_MAX)
        receipts = await self._feed.receipts(peer, RECEIPTS_SHOWN)
        view = self._view()
        status = 200 if known_peer(view, peer) or receipts else 404
        return html_answer(request, contributor_page(view, peer, receipts), status)

    async def _snapshot(self, request: web.Request) -> web.Response:
        made = self._made(request, lambda view: snapshot(view, self._feed.hub))
        return _data(request, made, "application/json")

    def _figure(self, request: web.Request, view: View) -> Figure:
        make = FIGURES.get(request.match_info["name"])
        if make is None:
            raise web.HTTPNotFound
        return make(view, choice_of(request.query))

    async def _chart(self, request: web.Request) -> web.Response:
        size = NARROW if request.query.get("size") == "narrow" else WIDE
        made = self._made(
            request, lambda view: self._figure(request, view).svg(size, style=SVG_STYLE)
        )
        answer = _data(request, made, "image/svg+xml")
        answer.headers["Content-Security-Policy"] = SVG_POLICY
        answer.headers["Cross-Origin-Resource-Policy"] = (
            "cross-origin"  # made to be shown in READMEs
        )
        return answer

    async def _chart_csv(self, request: web.Request) -> web.Response:
        made = self._made(request, lambda view: self._figure(request, view).csv())
        return _data(request, made, "text/csv")

    async def _metrics(self, request: web.Request) -> web.Response:
        made = self._made(request, lambda view: metrics_text(view, self._feed.hub))
        return _body(request, made, "text/plain", {"Cache-Control": "no-store"})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        return await self._feed.hub.stream(request)


def html_answer(_: web.Request, body: str, status: int = 200) -> web.Response:
    """A page that is not kept by anybody."""
    return web.Response(
        body=body.encode("utf-8", "replace"),
        status=status,
        content_type="text/html",
        charset="utf-8",
        headers={"Cache-Control": "no-cache"},
    )


def _page(request: web.Request, made: _Kept) -> web.Response:
    return _body(request, made, "text/html", {"Cache-Control": "no-cache"})


def _data(request: web.Request, made: _Kept, kind: str) -> web.Response:
    """`made` under the name of its state, or 304 for whoever has it."""
    name = f'"{made.etag}"'
    headers = {"ETag": name, "Cache-Control": "no-cache"}
    if name in [one.strip() for one in request.headers.get("If-None-Match", "").split(",")]:
        return web.Response(status=304, headers=headers)
    return _body(request, made, kind, headers)


def _body(request: web.Request, made: _Kept, kind: str, headers: dict[str, str]) -> web.Response:
    """Compressed where the reader takes that: a volunteer's line pays for it."""
    charset = None if kind == "application/json" else "utf-8"
    headers = {**headers, "Vary": "Accept-Encoding"}
    body = made.body
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
        body = made.zipped
    return web.Response(body=body, content_type=kind, charset=charset, headers=headers)


async def static_file(request: web.Request) -> web.Response:
    """The style sheet or the script, by its name with the hash."""
    for asset in assets().values():
        if asset.name == request.match_info["name"]:
            return web.Response(
                body=asset.data,
                content_type=asset.kind,
                charset="utf-8",
                headers={"Cache-Control": FOREVER},
            )
    raise web.HTTPNotFound
