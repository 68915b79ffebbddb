"""The pages of the runs in a data folder: from what lies on the disk, and from the running daemon.

Nothing is asked of the network. Receipts are read as they come into a run's file, whoever writes
there, a peer or an observer; who is here and how fast it goes is known of the run in which a daemon
of this folder takes part, by its control API.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dugnad.dashboard import events as ev
from dugnad.dashboard.app import DashboardError, DashboardServer
from dugnad.dht.ids import RunId, run_text
from dugnad.peer import clock
from dugnad.peer.client import Client
from dugnad.peer.config import Endpoint
from dugnad.peer.errors import UserError
from dugnad.peer.exportsources import run_manifest, written
from dugnad.peer.failures import store_error
from dugnad.peer.manifest import Manifest
from dugnad.peer.pagehistory import PageHistory
from dugnad.peer.pageviews import public_state, without_addresses
from dugnad.peer.paths import Home
from dugnad.peer.runwatch import RunWatch
from dugnad.peer.signals import stop_signals
from dugnad.peer.store import StoreError
from dugnad.peer.storethread import StoreThread
from dugnad.peer.watchpage import WatchPage

LOOK_S: Final = 2.0
"""Between two looks at the disk and at the daemon."""
SEEN_S: Final = 15.0
"""When each peer was last seen is told this often; nothing else of it may have changed."""
RESCAN_S: Final = 30.0
"""Between two looks for runs that came into the folder."""
RUNS_MAX: Final = 16
"""Runs shown, those written to last: each holds a file open and its newest receipts in memory."""
KEY_CHARS: Final = 12
"""Of a run's id in the address of its page."""
_HERE: Final = frozenset({"this peer", "live", "indirect", "suspect"})
_LINKS: Final = frozenset({"direct", "relayed", "outbound"})

Row = Mapping[str, Any]
"""An object of the control API; Any: what JSON holds."""


class LocalRun:
    """One run of the data folder and its page. `open`, `look` again and again, `close`."""

    def __init__(self, home: Home, run: RunId, manifest: Manifest) -> None:
        self.run_id = run
        self.page: WatchPage
        self._path = home.run(run).state
        self._manifest = manifest
        self._store = StoreThread()
        self._watch = RunWatch(manifest, run)
        self._here: set[str] = set()
        self._told: tuple[object, ...] = ()
        self._seen_due = 0

    async def open(self) -> None:
        """Open the file and read what is there. StoreError."""
        await self._store.open(self._path, self.run_id)
        now = clock.wall_ms()
        self.page = WatchPage(self._manifest, self.run_id, self._store)
        try:
            history = await PageHistory(self._store).load(now)
        except ValueError as error:
            print(f"page: the kept history cannot be used: {error}", file=sys.stderr)
            history = None
        self.page.begin(history, "", now)

    async def close(self) -> None:
        """Close the file."""
        await self._store.close()

    async def look(self, status: Row | None, peers: Sequence[Row]) -> None:
        """Tell the page what is new: on the disk, and of the daemon that takes part in this run
        (None: there is none). StoreError.
        """
        now = clock.wall_ms()
        standing = await self._store.call(self._watch.refresh)
        if standing is not None:
            self.page.stands(standing, [str(row["peer"]) for row in peers], now)
        self._tell_peers(peers, now)
        if status is None:
            self.page.feed.publish(
                ev.Status(
                    at_ms=now,
                    peer="",
                    name="this machine",
                    state="stopped",
                    reason="no daemon takes part here; the page shows what lies on the disk",
                )
            )
            return
        state, reason = public_state(str(status["state"]), str(status["reason"]))
        name = next((str(r["name"]) for r in peers if r["peer"] == status["peer"]), "an observer")
        self.page.feed.publish(
            ev.Status(at_ms=now, peer=str(status["peer"]), name=name, state=state, reason=reason)
        )
        self.page.linked(str(status["link"]), now)
        self._tell_measured(status, now)

    def _tell_measured(self, status: Row, now: int) -> None:
        tokens, speed = int(status["swarm_tokens"]), float(status["swarm_tokens_per_s"])
        train, held_out = status["train_loss"], status["anchor_loss"]
        told, self._told = self._told, (train, held_out)
        fresh = [
            one is not None and (not told or one != told[n]) for n, one in enumerate(self._told)
        ]
        self.page.measured(
            now,
            train=(tokens, float(train)) if fresh[0] else None,
            held_out=(tokens, float(held_out)) if fresh[1] else None,
            speed=speed if speed > 0.0 else None,
        )

    def _tell_peers(self, peers: Sequence[Row], now: int) -> None:
        rows = {row.peer: row for row in (self._row(one, now) for one in peers)}
        here = {peer for peer, row in rows.items() if not row.gone_ms}
        for peer in sorted(here - self._here):
            self.page.came(rows[peer], now)
        for peer in sorted(self._here - here):
            known = rows.get(peer)
            left = known is not None and known.state == "left"
            self.page.went(peer, left, known.reason if known is not None else "", now)
        self._here = here
        everybody = now >= self._seen_due
        if everybody:
            self._seen_due = now + round(1000 * SEEN_S)
        self.page.peers(rows.values(), now, everybody=everybody)

    def _row(self, row: Row, now: int) -> ev.PeerRow:
        """A row of the control API as the pages have it."""
        state, speed = str(row["state"]), float(row["tokens_per_s"])
        here = state in _HERE
        since = now - round(1000 * float(row["since_s"]))
        link: ev.Link = row["link"] if row["link"] in _LINKS else "unknown"
        if here and state in ("this peer", "live"):
            state = "training" if speed > 0.0 else "here"
        return ev.PeerRow(
            peer=str(row["peer"]),
            name=str(row["name"]),
            tokens_per_s=speed if here else 0.0,
            link=link,
            codec=self._manifest.exchange.hand_in_codec,
            state=state,
            reason=without_addresses(str(row["reason"])),
            since_ms=since,
            last_seen_ms=now - round(1000 * float(row["last_seen_s"])),
            listed_tokens=int(row["listed_tokens"]),
            version=str(row["version"]),
            gone_ms=0 if here else since,
        )


class LocalPages:
    """The pages of all runs of one data folder."""

    def __init__(self, home: Home, endpoint: Endpoint) -> None:
        self._home, self._endpoint = home, endpoint
        self.runs: list[LocalRun] = []
        self.address = ""
        self.serving = asyncio.Event()
        """Set when the pages can be read."""
        self._seen: set[RunId] = set()

    async def serve(self, stopping: asyncio.Event) -> None:
        """Serve until told to stop. UserError E042: there is nothing to show; E018: the port."""
        try:
            if not await self._open():
                raise UserError(
                    "E042",
                    f"no run in {self._home.root} has anything to show",
                    "give a link to watch a run, or another --home",
                )
            await self._watch(stopping)
        except StoreError as error:
            raise store_error(error) from error
        finally:
            for one in self.runs:
                await one.close()

    async def _watch(self, stopping: asyncio.Event) -> None:
        server = await self._started(self._endpoint.port)
        print(f"page: {server.address}", flush=True)
        rescan = clock.now() + RESCAN_S
        try:
            while not stopping.is_set():
                if clock.now() >= rescan and await self._open():  # somebody joined another run
                    await server.close()
                    for one in self.runs:
                        one.page.feed.hub.reopen()
                    server = await self._started(server.port)
                    rescan = clock.now() + RESCAN_S
                await self._look()
                self.serving.set()
                await _within(stopping, LOOK_S)
        finally:
            await server.close()

    async def _started(self, port: int) -> DashboardServer:
        """A server of all runs; of one run alone without a page that lists it. UserError E018."""
        feeds = {run_text(one.run_id)[:KEY_CHARS]: one.page.feed for one in self.runs}
        feed = feeds if len(feeds) > 1 else next(iter(feeds.values()))
        server = DashboardServer(feed, self._endpoint.host, port)
        try:
            await server.start()
        except DashboardError as error:
            raise UserError("E018", error.reason, error.fix) from error
        self.address = server.address
        return server

    async def _open(self) -> bool:
        """Open the runs of the folder that are not open; whether there were any. What cannot be
        shown is said, once, and passed over.
        """
        home = self._home
        known = [run for run in home.known_runs() if run not in self._seen]
        known = [run for run in known if home.run(run).state.exists()]
        known.sort(key=lambda run: written(home.run(run).state), reverse=True)
        before = len(self.runs)
        for run in known[: RUNS_MAX - before]:
            self._seen.add(run)
            try:
                one = LocalRun(home, run, run_manifest(home, run))
            except UserError as error:
                print(error, file=sys.stderr)
                continue
            await one.open()
            self.runs.append(one)
        return len(self.runs) > before

    async def _look(self) -> None:
        status, peers = await asyncio.to_thread(self._ask)
        for one in self.runs:
            mine = status is not None and status["run"] == run_text(one.run_id)
            await one.look(status if mine else None, peers if mine else ())

    def _ask(self) -> tuple[Row | None, Sequence[Row]]:
        """What the daemon of the folder says of itself and of its peers; None: none answers."""
        client = Client(self._home)
        try:
            return client.get("/v1/status"), client.get("/v1/peers")
        except UserError:
            return None, ()


async def _within(stopping: asyncio.Event, seconds: float) -> None:
    """Wait until it is time to look again, or to stop."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return


async def serve_local(home: Home, endpoint: Endpoint) -> int:
    """Serve the pages of a data folder until a signal says stop; the exit status. UserError."""
    stopping = asyncio.Event()
    with stop_signals(stopping):
        await LocalPages(home, endpoint).serve(stopping)
    return 0
