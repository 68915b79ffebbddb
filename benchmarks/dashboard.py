"""How long the dashboard takes: a front page with 1 000 peers and 100 000 receipts, and the rest.

Each rendering is of a state that was never rendered before: one more event is folded first, and
the memory of answers, which spares most readers a rendering, is not used. `front_page_ms` is the
median (goal: < 20). `stream_cpu_share` is what 200 readers and a lively swarm cost this process.

`training_loss_under_load` (goal: <= 0.01) is of a real daemon with its learner: the share of its
tokens a second that it loses while as many readers listen to its page, the median over pairs of
phases with and without them, and the 95 % interval of that median. On a machine that others use the
interval tells more than the median; `training_loss_per_cpu` is the same per CPU second of the
learner, and `daemon_cpu_…` what the daemon uses of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from _churnswarm import interrupted_in_order
from _fakerun import keys, story
from _underload import training_loss

from dugnad.dashboard import events as ev
from dugnad.dashboard.app import DashboardServer
from dugnad.dashboard.boardpage import board_query, leaderboard_page
from dugnad.dashboard.feed import RunFeed
from dugnad.dashboard.figures import Choice
from dugnad.dashboard.frontpage import front_page
from dugnad.dashboard.layout import View
from dugnad.dashboard.metrics import metrics_text
from dugnad.dashboard.peerspage import peers_page, peers_query

NEWS_PER_S = 20
"""Events a second while readers listen: a lively swarm."""


def main() -> None:
    """Measure, print, and write the numbers to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--receipts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--pairs", type=int, default=20, help="of phases; 0: no daemon is started")
    parser.add_argument("--phase", type=float, default=3.0, help="seconds of a phase")
    options = parser.parse_args()
    now_ms = time.time_ns() // 1_000_000
    feed = RunFeed()
    begin = time.perf_counter()
    for event in story(keys(options.peers), options.receipts, now_ms):
        feed.publish(event)
    folded = feed.state().events
    figures: dict[str, float] = {
        "peers": options.peers,
        "receipts": options.receipts,
        "fold_us_per_event": 1e6 * (time.perf_counter() - begin) / folded,
    }
    for name, render in pages().items():
        wall_ms, cpu_ms = median_ms(feed, render, now_ms, options.repeats)
        figures |= {f"{name}_ms": wall_ms, f"{name}_cpu_ms": cpu_ms}
    figures |= asyncio.run(streams(feed, options.readers, options.seconds))
    if options.pairs:
        with (
            interrupted_in_order(),
            tempfile.TemporaryDirectory(prefix="dugnad-board-") as folder,
        ):
            figures |= training_loss(Path(folder), options.readers, options.pairs, options.phase)
    for name, value in figures.items():
        print(f"{name:26} {value:.4g}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


def pages() -> dict[str, Callable[[RunFeed, View], object]]:
    """What is rendered, by name."""
    return {
        "front_page": lambda _, view: front_page(view, Choice()),
        "front_page_log_time": lambda _, view: front_page(view, Choice("time", True)),
        "peers_page": lambda _, view: peers_page(view, peers_query({})),
        "leaderboard_page": lambda _, view: leaderboard_page(view, board_query({}), ""),
        "metrics": lambda feed, view: metrics_text(view, feed.hub),
    }


def median_ms(
    feed: RunFeed, render: Callable[[RunFeed, View], object], now_ms: int, repeats: int
) -> tuple[float, float]:
    """Time and CPU time of renderings, each of a state with one more measurement."""
    times, cpu_times = [], []
    for n in range(repeats):
        loss = 2.0 + 0.01 * (n % 7)
        feed.publish(ev.TrainLoss(at_ms=now_ms + n, tokens=1_900_000_000 + n, loss=loss))
        begin, cpu_begin = time.perf_counter(), time.process_time()
        render(feed, View(feed.state(), now_ms + n))
        times.append(1000 * (time.perf_counter() - begin))
        cpu_times.append(1000 * (time.process_time() - cpu_begin))
    return statistics.median(times), statistics.median(cpu_times)


async def streams(feed: RunFeed, readers: int, seconds: float) -> dict[str, float]:
    """What `readers` event streams cost this process, and how long the news takes to reach them.

    The readers are in the same process, so their own work is part of the share: it is an upper
    bound.
    """
    server = DashboardServer(feed, "127.0.0.1", 0)
    await server.start()
    delays: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.address, connector=connector) as client:
        tasks = [asyncio.create_task(listen(client, delays)) for _ in range(readers)]
        await asyncio.sleep(2.0)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(round(seconds * NEWS_PER_S)):
            at_ms = time.time_ns() // 1_000_000
            feed.publish(ev.Throughput(at_ms=at_ms, tokens_per_s=4000.0))
            await asyncio.sleep(1 / NEWS_PER_S)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        begin = time.perf_counter()
        await server.close()
        closing = time.perf_counter() - begin
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "stream_readers": readers,
        "stream_cpu_share": share,
        "stream_delay_ms": statistics.median(delays) if delays else 0.0,
        "shutdown_ms": 1000 * closing,
    }


async def listen(client: aiohttp.ClientSession, delays: list[float]) -> None:
    """Read to the end, noting how old each piece of news is when it comes."""
    async with client.get("/api/v1/events") as answer:
        async for row in answer.content:
            if row.startswith(b"data: {"):
                at_ms = json.loads(row[6:]).get("at_ms")
                if at_ms:
                    delays.append(time.time_ns() / 1e6 - at_ms)


if __name__ == "__main__":
    main()
