"""A kill seen on the screen: three real peers, the page of one in Chromium, and nobody reloads it.

    python benchmarks/onscreen.py --pictures DIR --json FILE

One of the others is killed (SIGKILL); the page must show one live peer fewer and say who was lost.
Then the peer that serves the page is killed; the page must say since when it is stale, and go on by
itself once that peer is started again, with the history of its former life. Needs playwright
and an installed Chromium.

| key | what | goal |
|---|---|---|
| event_s, live_s | from the kill until the page says who was lost; shows one peer fewer | <= 10 |
| units_said | the page says that the serving peer took over work of the lost one | |
| stale_s | from the kill of the serving peer until the page says that it is stale | <= 10 |
| back_s | from its new start until the page is current again | <= 60 |
| history_kept | the loss of its former life is on the chart of the new one | true |
| reloads | times that the page was loaded anew | 0 |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from _churnswarm import ChurnPeer, interrupted_in_order, link_of, write_run_file

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
CPU_SHARE: Final = 0.2
START_S: Final = 120.0
"""Three peers train and are on the page after this, or the benchmark gives up."""
SEEN_S: Final = 10.0
BACK_S: Final = 60.0
LOOK_S: Final = 0.05
MERGES_MIN: Final = 6
KEPT_S: Final = 20.0
"""After this much of a page's life its history has been written (`publicpage.HISTORY_S`)."""
PAGE_LINE: Final = "page: "


def main() -> None:
    """Run it, print the figures, and fail when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--pictures", type=Path, help="put screenshots into this folder")
    options = parser.parse_args()
    with interrupted_in_order(), tempfile.TemporaryDirectory(prefix="dugnad-screen-") as folder:
        (Path(folder) / "s").mkdir(mode=0o700)
        screen = Screen(Path(folder), options.pictures)
        try:
            figures = asyncio.run(screen.watched())
        finally:
            for peer in screen.peers:
                peer.end()
    for name, value in figures.items():
        print(f"{name:14} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    in_time = max(figures["event_s"], figures["live_s"], figures["stale_s"]) <= SEEN_S
    kept = figures["history_kept"] and figures["reloads"] == 0 and figures["back_s"] <= BACK_S
    sys.exit(0 if in_time and kept else 1)


class Screen:
    """The peers, and the page of the first."""

    def __init__(self, folder: Path, pictures: Path | None) -> None:
        self.folder = folder
        self.pictures = pictures
        self.peers: list[ChurnPeer] = []
        self.address = ""
        self.page: Any = None  # playwright's
        self.loads = 0

    async def watched(self) -> dict[str, Any]:
        """The figures."""
        from playwright.async_api import async_playwright

        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None:
            raise SystemExit("no Chromium is installed")
        await self.start()
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            self.page = await browser.new_page(viewport={"width": 1280, "height": 1600})
            self.page.on("load", lambda _: setattr(self, "loads", self.loads + 1))
            await self.page.goto(self.address)
            await self.until(self.live_is(3), START_S, "three live peers")
            await self.until(self.merged, START_S, "merges")
            await self.picture("1-three-peers")
            figures = await self.lose_one()
            figures |= await self.lose_the_server()
            await browser.close()
        return figures | {"reloads": self.loads - 1}

    async def start(self) -> None:
        """Three peers that train, each seen by the first."""
        run = write_run_file(self.folder, seed=1, merge_s=2.0)
        place = f"127.0.0.1:{free_port()}"  # the same in its next life
        first = ChurnPeer(1, self.folder, ["start", str(run), "--dashboard", place], CPU_SHARE)
        self.peers.append(first)
        first.start()
        link = await self.told(lambda: link_of(first))
        self.address = await self.told(lambda: page_of(first))
        for number in (2, 3):
            self.peers.append(ChurnPeer(number, self.folder, ["join", link], CPU_SHARE))
            self.peers[-1].start()

    async def told(self, what: Callable[[], str]) -> str:
        """What a log says, once it does."""
        until = time.monotonic() + START_S
        while not (found := what()):
            if time.monotonic() > until:
                raise SystemExit("the first peer did not start: " + self.peers[0].log.read_text())
            await asyncio.sleep(LOOK_S)
        return found

    async def until(self, seen: Callable[[], Awaitable[bool]], limit_s: float, what: str) -> float:
        """Seconds until the page shows it."""
        begun = time.monotonic()
        while not await seen():
            if time.monotonic() - begun > limit_s:
                await self.picture("missed")
                raise SystemExit(f"the page did not show {what} within {limit_s} s")
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - begun

    def live_is(self, count: int) -> Callable[[], Awaitable[bool]]:
        """Whether the tile says so many peers."""

        async def seen() -> bool:
            return await self.text("[data-live=live]") == str(count)

        return seen

    async def merged(self) -> bool:
        """Whether work was merged a few times."""
        words = re.findall(r"(\d+) merges", await self.text("[data-part=numbers]"))
        return bool(words) and int(words[0]) >= MERGES_MIN

    def says(self, selector: str, words: str) -> Callable[[], Awaitable[bool]]:
        """Whether a visible part of the page says these words."""

        async def seen() -> bool:
            return words in await self.text(selector)

        return seen

    async def text(self, selector: str) -> str:
        """The visible text of a part; '' where it is hidden."""
        found: str = await self.page.evaluate(
            "(selector) => { const one = document.querySelector(selector);"
            " return one?.checkVisibility() ? one.innerText : ''; }",
            selector,
        )
        return found

    async def picture(self, name: str) -> None:
        """Keep what is on the screen."""
        if self.pictures is not None:
            self.pictures.mkdir(parents=True, exist_ok=True)
            path = str(self.pictures / f"{name}.png")
            await self.page.screenshot(path=path, full_page=True)

    async def lose_one(self) -> dict[str, Any]:
        """Kill the third peer, and watch."""
        victim = self.peers[2]
        victim.look()
        key = str(victim.last["peer"])[-6:]
        killing = asyncio.create_task(asyncio.to_thread(victim.kill))
        log = "[data-part=log]"
        waits = {
            "event_s": self.until(self.says(log, f"({key}) was lost"), START_S, "the loss"),
            "live_s": self.until(self.live_is(2), START_S, "one peer fewer"),
        }
        figures: dict[str, Any] = dict(
            zip(waits, await asyncio.gather(*waits.values()), strict=True)
        )
        await killing
        figures["units_said"] = await self.says(log, f"({key}) moved to")()
        await self.picture("2-one-was-lost")
        return figures

    async def lose_the_server(self) -> dict[str, Any]:
        """Kill the peer whose page it is, start it again at the same port, and watch."""
        first = self.peers[0]
        first.look()
        born = first.span.begin or time.time()
        await asyncio.sleep(max(0.0, KEPT_S - (time.time() - born)))
        former = loss_times(self.address)
        killing = asyncio.create_task(asyncio.to_thread(first.kill))
        figures: dict[str, Any] = {
            "stale_s": await self.until(
                self.says("#stale", "stale since"), START_S, "that it is stale"
            )
        }
        await self.picture("3-stale")
        await killing
        first.start()

        async def current() -> bool:
            return not await self.text("#stale") and await self.live_is(2)()

        figures["back_s"] = await self.until(current, START_S, "both peers, current again")
        await self.picture("4-back")
        figures["history_kept"] = loss_times(self.address)[0] <= former[-1]
        return figures


def free_port() -> int:
    """A TCP port of loopback that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def page_of(peer: ChurnPeer) -> str:
    """Where its page is, once its log says so."""
    if not peer.log.exists():
        return ""
    lines = peer.log.read_text(errors="replace").splitlines()
    return next((one.removeprefix(PAGE_LINE) for one in lines if one.startswith(PAGE_LINE)), "")


def loss_times(address: str) -> list[str]:
    """When the losses on the chart were measured, oldest first."""
    with urllib.request.urlopen(f"{address}api/chart/loss.csv", timeout=10) as answer:
        rows = answer.read().decode().splitlines()[1:]
    return sorted(row.split(",")[1] for row in rows)


if __name__ == "__main__":
    main()
