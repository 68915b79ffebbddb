"""The ring of news: what a reader gets who comes, who comes back, and who was away too long."""

import msgspec

from dugnad.dashboard import events as ev
from dugnad.dashboard.feed import RunFeed
from dugnad.dashboard.live import BATCH_BYTES_MAX, FRAME_BYTES_MAX, RING_MAX, Hub

from .run_world import NOW_MS, board, ids, keys, row  # noqa: TID252  the world is no installed package


def spoken(n: int) -> ev.Happened:
    """Some news."""
    return ev.Happened(at_ms=n, kind="k", text=f"news {n}")


def data_of(frame: bytes) -> dict[str, object]:
    """The JSON in a frame."""
    (text,) = [one[6:] for one in frame.split(b"\n") if one.startswith(b"data: ")]
    decoded: dict[str, object] = msgspec.json.decode(text)
    return decoded


async def test_a_reader_gets_what_came_after_its_place() -> None:
    hub = Hub()
    for n in range(1, 6):
        hub.publish(n, spoken(n))
    frames = hub.since(3)
    assert frames is not None
    assert [data_of(frame)["text"] for _, frame in frames] == ["news 4", "news 5"]
    assert frames[0][1].startswith(b"id: %b-4\n" % hub.session.encode())
    assert hub.since(5) == []


async def test_a_place_that_was_overwritten_or_never_was_means_reset() -> None:
    hub = Hub()
    assert hub.since(0) == []
    for n in range(1, RING_MAX + 11):
        hub.publish(n, spoken(n))
    assert hub.since(9) is None
    first = hub.since(10)
    assert first is not None
    assert first[0][0] == 11
    assert hub.since(RING_MAX + 99) is None


async def test_a_reader_who_was_away_gets_batches_that_join_without_a_gap() -> None:
    hub = Hub()
    for n in range(1, RING_MAX + 1):
        hub.publish(n, ev.Happened(at_ms=n, kind="k", text="x" * 300))
    last, got, batches = 0, [], 0
    while batch := hub.since(last):
        assert sum(len(frame) for _, frame in batch) <= BATCH_BYTES_MAX
        got += [n for n, _ in batch]
        last, batches = batch[-1][0], batches + 1
    assert got == list(range(1, RING_MAX + 1))
    assert batches > 3


async def test_places_of_another_process_or_nonsense_are_none() -> None:
    hub = Hub()
    assert hub.place(f"{hub.session}-12") == 12
    for text in ("", "12", "other-12", f"{hub.session}--1", f"{hub.session}-x", "9" * 9999):
        assert hub.place(text) is None


async def test_long_news_is_announced_without_its_content() -> None:
    feed = RunFeed()
    feed.publish(ev.BoardComputed(at_ms=1, board=board(keys(50))))
    feed.publish(ev.PeerChanged(at_ms=2, rows=tuple(row(peer) for peer in ids(50))))
    feed.publish(ev.RunDescribed(at_ms=3, run="a", name="n", fragments=tuple(range(4000))))
    frames = feed.hub.since(0)
    assert frames is not None
    assert max(len(frame) for _, frame in frames) < FRAME_BYTES_MAX
    assert [data_of(frame)["type"] for _, frame in frames] == ["board", "peers", "changed"]


async def test_what_goes_out_is_clean_and_folded() -> None:
    feed = RunFeed()
    feed.publish(ev.Happened(at_ms=NOW_MS, kind="k", text="a\u202eb\n\nid: 7\ndata: x"))
    frames = feed.hub.since(0)
    assert frames is not None
    assert frames[0][1].count(b"\n") == 3
    assert data_of(frames[0][1])["text"] == feed.state().happenings[0].text == "ab id: 7 data: x"
