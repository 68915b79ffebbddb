"""The pages in a headless Chromium: legible, quiet, at home, and usable with keys or no script."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dugnad.dashboard import events as ev
from dugnad.dashboard import live
from dugnad.dashboard.feed import RunFeed
from dugnad.dashboard.live import RING_MAX

from .browser_world import (  # noqa: TID252  the world is no installed package
    CONTRAST,
    OVERFLOW,
    async_api,
    launched,
    serving,
    tab,
)
from .run_world import HOSTILE, ids, row, story  # noqa: TID252

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FRIENDLY = ("kind-otter", "calm-birch", "kind-otter", "bold-heron", "deep-fjord", "mild-rowan")
PATHS = ("", "peers", "leaderboard", "peer/{}", "events")
SOON_MS = 20_000
"""A page is asked for anew 1 to 3 s after news and drawn; a busy machine may take its time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    """One browser for all tests; each has a profile of its own."""
    async with launched() as running:
        yield running


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def fed(names: tuple[str, ...] = FRIENDLY) -> RunFeed:
    """A run that is as of now."""
    feed = RunFeed()
    for event in story(names):
        feed.publish(event)
    feed.publish(ev.Status(at_ms=now_ms(), peer=ids(1)[0], name="kind-otter", state="training"))
    return feed


@pytest.mark.parametrize(
    ("width", "scheme", "names"),
    [
        (360, "light", FRIENDLY),
        (360, "dark", HOSTILE),
        (1440, "light", HOSTILE),
        (1440, "dark", FRIENDLY),
    ],
    ids=["phone, light", "phone, dark, hostile", "desk, light, hostile", "desk, dark"],
)
async def test_pages_are_legible_fit_the_screen_and_load_nothing_from_elsewhere(
    browser: Any, width: int, scheme: str, names: tuple[str, ...]
) -> None:
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    async with serving(fed(names)) as server, tab(browser, server.address, **options) as one:
        for path in PATHS:
            await one.open(path.format(ids(1)[0]))
            seen, low = await one.page.evaluate(CONTRAST)
            assert seen > 20, path
            assert low == [], path
            wide = await one.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, path
            assert await one.page.evaluate(OVERFLOW) == [], path
            assert not await one.page.locator("#stale").is_visible()
        shown = await one.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert shown == ("rgb(247, 248, 248)" if scheme == "light" else "rgb(15, 20, 23)")


async def test_of_several_runs_each_is_legible_and_live(browser: Any) -> None:
    feeds = {"one": fed(), "two": fed(HOSTILE)}
    options = {"viewport": {"width": 360, "height": 800}}
    async with serving(feeds) as server, tab(browser, server.address, **options) as one:
        await one.open()
        assert (await one.page.evaluate(CONTRAST))[1] == []
        assert await one.page.evaluate("document.documentElement.scrollWidth") <= 360
        await one.page.locator("a[href='/run/one/']").first.click()
        assert await one.text("h1") == "Fjord stories"
        await one.page.locator("[data-live=speed]").wait_for()
        feeds["one"].publish(ev.Throughput(at_ms=now_ms(), tokens_per_s=4560.0))
        await one.page.get_by_text("4.56 k/s").wait_for(timeout=SOON_MS)


async def test_everything_can_be_done_with_keys(browser: Any) -> None:
    async with serving(fed()) as server, tab(browser, server.address) as one:
        keys = one.page.keyboard
        await one.open()
        await keys.press("Tab")
        assert await one.focused() == "a Skip to content"
        box = await one.page.locator(".skip").bounding_box()
        assert box["x"] >= 0, "the skip link shows itself"
        await keys.press("Enter")
        assert await one.focused() == "main main"
        await one.open()
        order = []
        for _ in range(13):
            await keys.press("Tab")
            order.append(await one.focused())
            outlined = await one.page.evaluate(
                "() => getComputedStyle(document.activeElement).outlineStyle"
            )
            assert outlined == "solid", order[-1]
        assert order[:7] == [
            "a Skip to content",
            "a Fjord stories",
            "a Run",
            "a Peers",
            "a Leaderboard",
            "a Events",
            "button theme",
        ]
        assert order[7] == "button Copy"
        assert [one.split()[-1] for one in order[9:13]] == ["tokens", "time", "linear", "log"]


async def test_a_chart_is_read_with_keys_and_with_a_pointer(browser: Any) -> None:
    async with serving(fed()) as server, tab(browser, server.address) as one:
        await one.open()
        figure = "figure[data-chart=loss]"
        await one.page.locator(f"{figure} [data-choice]").last.focus()
        await one.page.keyboard.press("Shift+Tab")
        for _ in range(3):
            await one.page.keyboard.press("Shift+Tab")
        assert (await one.focused()).startswith("figure")
        assert "Arrow keys" in await one.text(f"{figure} .readout")
        await one.page.keyboard.press("Home")
        assert await one.text(f"{figure} .readout") == (
            "10.0 k tokens: training 5.00, held out 5.10 nats a token"
        )
        await one.page.keyboard.press("End")
        assert await one.text(f"{figure} .readout") == (
            "600 k tokens: training 2.05, held out 2.15 nats a token"
        )
        await one.page.keyboard.press("PageDown")
        assert (await one.text(f"{figure} .readout")).startswith("540 k tokens")
        assert await one.page.locator(f"{figure} .cursor-dot:visible").count() == 2
        await one.page.keyboard.press("Escape")
        assert await one.page.locator(f"{figure} .cursor-dot").count() == 0
        await one.page.locator(f"{figure} svg.wide").hover(position={"x": 400, "y": 120})
        assert re.match(r"\d+ k tokens: training", await one.text(f"{figure} .readout"))
        await one.page.mouse.move(5, 5)
        assert await one.text(f"{figure} .readout") == ""


async def test_scale_and_axis_change_in_place_and_can_be_shared(browser: Any) -> None:
    async with serving(fed()) as server, tab(browser, server.address) as one:
        await one.open()
        await one.page.evaluate("() => { window.stayed = true; }")
        await one.page.get_by_role("link", name="log").focus()
        await one.page.keyboard.press("Enter")
        await one.page.wait_for_selector("figure[data-chart=loss] svg[data-log='1']:visible")
        await one.page.get_by_role("link", name="time", exact=True).click()
        await one.page.wait_for_selector("figure[data-chart=loss] svg[data-axis=time]:visible")
        assert await one.page.locator("[data-choice][aria-current]").all_inner_texts() == [
            "time",
            "log",
        ]
        assert one.page.url.endswith("?x=time&y=log")
        assert await one.page.evaluate("window.stayed")


async def test_the_theme_is_chosen_with_keys_and_kept(browser: Any) -> None:
    async with (
        serving(fed()) as server,
        tab(browser, server.address, color_scheme="light") as one,
    ):
        await one.open()
        await one.page.locator("#theme").focus()
        for _ in range(2):
            await one.page.keyboard.press("Enter")
        assert await one.text("#theme") == "Theme: dark"
        await one.open("leaderboard")
        paper = await one.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(15, 20, 23)"
        assert (await one.page.evaluate(CONTRAST))[1] == []


async def test_tables_sort_and_filter_in_place_and_a_search_keeps_the_order(browser: Any) -> None:
    names = tuple(f"peer-{n:03}" for n in range(120))
    async with serving(fed(names)) as server, tab(browser, server.address) as one:
        await one.open("peers")
        await one.page.evaluate("() => { window.stayed = true; }")
        await one.page.get_by_role("link", name="Name").focus()
        await one.page.keyboard.press("Enter")
        await one.page.wait_for_selector("th[aria-sort=ascending]")
        assert (await one.text("tbody th")).startswith("peer-000")
        assert await one.focused() == "a Name ▲"
        await one.page.locator("[data-filter]").focus()
        await one.page.keyboard.type("peer-11")
        await async_api.expect(one.page.locator("tbody tr")).to_have_count(10)
        assert (await one.text("tbody th")).startswith("peer-110"), "of a page that was not shown"
        assert "10 rows" in await one.text(".pager")
        await one.page.keyboard.type("no such peer")
        await one.page.get_by_text("No peer matches.").wait_for()
        await one.page.locator("[data-filter]").fill("peer-119")
        await async_api.expect(one.page.locator("tbody tr")).to_have_count(1)
        assert await one.page.evaluate("window.stayed")
        await one.page.keyboard.press("Enter")
        await one.page.wait_for_url("**sort=name&dir=up&show=all**")
        await async_api.expect(one.page.locator("tbody tr")).to_have_count(1)


async def test_pages_work_without_a_script(browser: Any) -> None:
    async with (
        serving(fed()) as server,
        tab(browser, server.address, java_script_enabled=False) as one,
    ):
        await one.open()
        assert await one.text("h1") == "Fjord stories"
        assert await one.page.locator("figure[data-chart=loss] svg.wide").is_visible()
        assert not await one.page.locator("#theme").is_visible()
        await one.page.get_by_role("link", name="log").click()
        await one.page.wait_for_selector("svg[data-log='1']:visible")
        await one.page.get_by_role("link", name="Peers").click()
        await one.page.get_by_role("link", name="Name", exact=True).click()
        assert (await one.text("tbody th")).startswith("bold-heron")
        await one.page.locator("[name=q]").fill("calm")
        await one.page.keyboard.press("Enter")
        await one.page.wait_for_url("**q=calm**")
        await async_api.expect(one.page.locator("tbody tr")).to_have_count(1)
        await one.page.get_by_role("link", name="Leaderboard").click()
        await one.page.locator("[name=me]").fill("calm-birch")
        await one.page.get_by_role("button", name="Show").click()
        await one.page.locator("tr.me").wait_for()
        await one.page.locator("tr.me th a").click()
        assert await one.text("h1") == "calm-birch"


async def test_news_comes_by_itself_and_moves_only_for_those_who_like_it(browser: Any) -> None:
    feed = fed()
    async with (
        serving(feed) as server,
        tab(browser, server.address, reduced_motion="reduce") as calm,
        tab(browser, server.address, reduced_motion="no-preference") as lively,
    ):
        for one in (calm, lively):
            await one.open()
            await one.page.evaluate("() => { window.stayed = true; }")
        feed.publish(ev.Throughput(at_ms=now_ms(), tokens_per_s=7890.0))
        for one in (calm, lively):
            await one.page.get_by_text("7.89 k/s").wait_for(timeout=SOON_MS)
        await async_api.expect(lively.page.locator(".fresh")).to_have_count(1)
        assert await calm.page.locator(".fresh").count() == 0
        here = feed.state().live
        feed.publish(ev.PeerSeen(at_ms=now_ms(), row=row(ids(9)[8], "late-lark")))
        for one in (calm, lively):
            await one.page.locator(".log", has_text="late-lark").wait_for(timeout=SOON_MS)
            assert await one.text("[data-live=live]") == str(here + 1)
            assert await one.page.evaluate("window.stayed")


async def test_a_page_says_since_when_it_is_stale_and_recovers_by_itself(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RETRY_MS", 300)  # a reader has more patience than a test
    feed = fed()
    async with serving(feed) as server:
        port = server.port
        async with tab(browser, server.address) as one:
            await one.open()
            closed_s = now_ms() // 1000
            await server.close()
            await one.page.get_by_text("Connection lost: stale since").wait_for(timeout=SOON_MS)
            said = re.fullmatch(
                r"Connection lost: stale since (\d\d):(\d\d):(\d\d) UTC\. Trying again by itself\.",
                await one.text("#stale"),
            )
            assert said is not None
            hours, minutes, seconds = map(int, said.groups())
            ago_s = (closed_s - 3600 * hours - 60 * minutes - seconds) % 86_400
            assert ago_s <= 60 or ago_s >= 86_395, "about when it was closed"
            assert (await one.page.evaluate(CONTRAST))[1] == []
            again = fed()
            again.publish(ev.Happened(at_ms=now_ms(), kind="sync", text="back again"))
            async with serving(again, port):
                await one.page.get_by_text("back again").wait_for(timeout=SOON_MS)
                assert not await one.page.locator("#stale").is_visible()
                await one.page.close()  # before its server: it would complain once more, some time
            one.faults[:] = [f for f in one.faults if "ERR_CON" not in f and "INCOMPLETE" not in f]


async def test_a_reader_who_was_too_slow_is_shown_the_whole_anew(browser: Any) -> None:
    feed = fed()

    async def late(route: Any) -> None:  # the stream opens when its place is overwritten
        if feed.state().events < RING_MAX:
            for n in range(RING_MAX + 50):
                feed.publish(ev.Happened(at_ms=now_ms(), kind="sync", text=f"news {n}"))
        await route.continue_()

    async with serving(feed) as server, tab(browser, server.address) as one:
        await one.page.route("**/api/v1/events?*", late)
        await one.open()
        await one.page.get_by_text(f"news {RING_MAX + 49}").wait_for(timeout=SOON_MS)
        assert feed.hub.resets == 1
