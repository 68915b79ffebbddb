"""A headless Chromium for the tests of the pages, and what it can be asked about a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from dugnad.dashboard.app import DashboardServer
from dugnad.dashboard.feed import RunFeed

async_api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Every rendered text node with its contrast: ink over all papers behind it, by WCAG 2.
CONTRAST = """() => {
  const channels = (text) => {
    const found = text.match(/rgba?\\(([^)]+)\\)/);
    if (!found) return [0, 0, 0, 0];
    const [r, g, b, a] = found[1].split(/[ ,/]+/).map(Number);
    return [r, g, b, a ?? 1];
  };
  const over = (top, below) => {
    const [r, g, b, a] = top;
    return [r, g, b].map((v, n) => v * a + below[n] * (1 - a)).concat(1);
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const paper = (element) => {
    const own = channels(getComputedStyle(element).backgroundColor);
    if (own[3] >= 1) return own;
    return over(own, element.parentElement ? paper(element.parentElement) : [255, 255, 255, 1]);
  };
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const low = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility()) continue;
    if (!element.getClientRects().length || element.closest("title, desc")) continue;
    const style = getComputedStyle(element);
    const ink = channels(element.closest("svg") ? style.fill : style.color);
    const below = paper(element.closest("svg") ?? element);
    const [a, b] = [light(over(ink, below)), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen += 1;
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${node.data.trim().slice(0, 40)}`);
  }
  return [seen, low];
}"""

# Text that does not fit where it is: cut off, or reaching out of its box.
OVERFLOW = """() => [...document.querySelectorAll("main *")].filter((one) => {
  const box = one.getBoundingClientRect();
  if (!box.width || one.closest(".scroll, svg, pre, .skip")) return false;
  return box.right > innerWidth + 1 || box.left < -1;
}).map((one) => `${one.tagName} ${one.textContent.slice(0, 40)}`)"""


def browser_path() -> str:
    """Where a Chromium is; the test is skipped where none is."""
    named = os.environ.get("DUGNAD_TEST_BROWSER", "")
    found = named or next(filter(None, map(shutil.which, BROWSERS)), "")
    if not found:
        pytest.skip("no Chromium is installed; DUGNAD_TEST_BROWSER may name one")
    return found


@asynccontextmanager
async def launched() -> AsyncIterator[Any]:  # Any: playwright may be missing where mypy runs
    """A running browser."""
    path = browser_path()
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def serving(
    feed: RunFeed | dict[str, RunFeed], port: int = 0
) -> AsyncIterator[DashboardServer]:
    """The pages of a feed, or of several."""
    server = DashboardServer(feed, "127.0.0.1", port)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@dataclass
class Tab:
    """A page, and what went wrong in it: errors of the console, requests to elsewhere, dialogs."""

    page: Any  # playwright's Page
    address: str
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("request", self._request)
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        at_home = urlsplit(request.url)[:2] == urlsplit(self.address)[:2]
        if not at_home and not request.url.startswith("data:"):
            self.faults.append(f"request: {request.url}")

    async def open(self, path: str = "") -> None:
        """Load a page of the server."""
        await self.page.goto(self.address + path, wait_until="load")

    async def focused(self) -> str:
        """What has the focus: its tag, and its id or the beginning of its text."""
        found: str = await self.page.evaluate(
            "() => { const at = document.activeElement; return"
            " `${at.tagName.toLowerCase()} ${at.id || at.textContent.trim().slice(0, 24)}`; }"
        )
        return found

    async def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        found: str = await self.page.locator(selector).first.inner_text()
        return found


@asynccontextmanager
async def tab(browser: Any, address: str, **options: Any) -> AsyncIterator[Tab]:
    """A new page with a profile of its own; at the end nothing may have gone wrong in it."""
    context = await browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    try:
        one = Tab(await context.new_page(), address)
        yield one
        assert one.faults == []
    finally:
        await context.close()
