"""A page's history as rows of the store: written bit by bit, read back by the next process."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dugnad.dashboard import events as ev
from dugnad.dashboard.history import HAPPENINGS_MAX, SESSIONS_MAX, History, all_closed
from dugnad.dashboard.historyrows import (
    INTEGER_MAX,
    HistoryRows,
    RollupRow,
    SessionRow,
    changed,
    history_of,
)
from dugnad.dashboard.series import DAY_MS, HOUR_MS, MINUTE_MS, MINUTES_MAX, Point
from dugnad.dashboard.state import State, restored
from dugnad.dht.ids import RunId
from dugnad.peer.pagehistory import OLD_KEY, PageHistory
from dugnad.peer.pagetables import PageTables
from dugnad.peer.store import Store
from dugnad.peer.storethread import StoreThread

from ..dashboard.run_world import (  # noqa: TID252  the tests are no installed package
    HOSTILE,
    NOW_MS,
    folded,
    ids,
    row,
    story,
)

RUN = RunId(b"r" * 32)


@pytest.fixture
def disk() -> Iterator[Store]:
    """A store without a file."""
    with closing(Store.open(Path(":memory:"))) as store:
        yield store


@pytest.fixture
async def thread(tmp_path: Path) -> AsyncIterator[StoreThread]:
    """A store in a file."""
    opened = StoreThread()
    await opened.open(tmp_path / "state.sqlite", RUN)
    yield opened
    await opened.close()


def write(store: Store, before: History, after: History) -> History:
    """Keep what `after` has and `before` had not; `after`."""
    change = changed(before, after)
    if change is not None:
        PageTables(store).write(change)
    return after


def kept(store: Store, history: History, now_ms: int = NOW_MS + HOUR_MS) -> History:
    """`history` as the next process finds it."""
    write(store, History(), history)
    return history_of(PageTables(store).read(now_ms), now_ms)


def test_a_history_survives_a_restart_and_open_sessions_end_when_the_process_did(
    disk: Store,
) -> None:
    before = folded(*story()).history
    after = all_closed(kept(disk, before), NOW_MS + HOUR_MS)
    assert (after.train.minutes, after.train.hours) == (before.train.minutes, before.train.hours)
    assert (after.hours, after.days, after.tokens) == (before.hours, before.days, before.tokens)
    assert (after.happenings, after.happened) == (before.happenings, before.happened)
    ends = [own[-1].until_ms for own in after.sessions.values()]
    assert all(NOW_MS - HOUR_MS < end <= NOW_MS for end in ends)
    assert restored(State(), after).tokens == before.tokens


def test_series_go_on_after_a_restart_without_a_gap_or_a_step_back(disk: Store) -> None:
    first = folded(*story()).history
    read = kept(disk, first)
    assert read.train.last == first.train.minutes[-1]
    points = read.with_train(Point.of(NOW_MS + HOUR_MS, 700_000, 1.5)).train.points()
    assert [p.at_ms for p in points] == sorted({p.at_ms for p in points})
    assert points[0] == first.train.minutes[0]
    assert (len(points), points[-1].value) == (len(first.train.minutes) + 1, 1.5)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3 * HOUR_MS), min_size=1, max_size=30), st.integers(1, 7))
def test_rows_written_bit_by_bit_are_those_of_the_whole(steps: list[int], every: int) -> None:
    state, written = State(), History()
    peers = ids(3)
    with (
        closing(Store.open(Path(":memory:"))) as bits,
        closing(Store.open(Path(":memory:"))) as one,
    ):
        for n, step in enumerate(steps):
            at_ms = NOW_MS + sum(steps[:n]) + step
            peer = peers[n % 3]
            merge = ev.HeadAdopted(
                at_ms=at_ms,
                fragment=0,
                version=n,
                digest="d",
                home=peer,
                tokens_total=n,
                listed=((peer, 5),),
            )
            loss = ev.TrainLoss(at_ms=at_ms, tokens=n, loss=float(n))
            state = folded(ev.PeerSeen(at_ms=at_ms, row=row(peer)), loss, merge, state=state)
            if n % 2:
                state = folded(ev.PeerGone(at_ms=at_ms, peer=peer, how="left"), state=state)
            if n % every == 0:
                written = write(bits, written, state.history)
        write(bits, written, state.history)
        write(one, History(), state.history)
        assert PageTables(bits).read(1 << 60) == PageTables(one).read(1 << 60)


def test_what_the_history_forgets_goes_from_the_tables_too(disk: Store) -> None:
    history = written = History()
    for n in range(MINUTES_MAX + 100):
        history = history.with_speed(Point.of(NOW_MS + n * MINUTE_MS, n, 1.0))
        if n % 300 == 0:
            written = write(disk, written, history)
    for n in range(2 * SESSIONS_MAX):
        history = history.opened("p", 10 * n).closed("p", 10 * n + 5)
        history = history.with_happening(n, "k", "t")
        if n % 30 == 0:
            written = write(disk, written, history)
    for n in range(HAPPENINGS_MAX):
        history = history.with_happening(n, "k", "t")
    write(disk, written, history)
    rows = PageTables(disk).read(NOW_MS + 9 * DAY_MS)
    assert len([one for one in rows.rollups if one.size == "minute"]) == MINUTES_MAX
    assert len(rows.sessions) == SESSIONS_MAX
    assert len(rows.happenings) == HAPPENINGS_MAX


def test_nothing_new_writes_nothing_and_one_value_a_few_rows() -> None:
    before = folded(*story()).history
    assert changed(before, before) is None
    change = changed(before, before.with_train(Point.of(NOW_MS + HOUR_MS, 1, 2.0)))
    assert change is not None
    assert {one.series for one in change.rows.rollups} == {"train"}
    assert len(change.rows.rollups) <= 6  # the newest of each size, and the one before it
    assert (change.rows.bars, change.rows.sessions, change.rows.happenings) == ((), (), ())


def test_rows_from_a_clock_that_was_wrong_are_dropped(disk: Store) -> None:
    history = History().with_speed(Point.of(NOW_MS, 1, 1.0))
    history = history.with_speed(Point.of(NOW_MS + 9 * DAY_MS, 1, 2.0))
    history = history.opened("p", NOW_MS + 9 * DAY_MS)
    read = kept(disk, history)
    assert [p.value for p in read.speed.points()] == [1.0]
    assert read.sessions == {}
    assert len(PageTables(disk).read(NOW_MS + 10 * DAY_MS).rollups) == 3


@pytest.mark.parametrize(
    "rows",
    [
        HistoryRows(rollups=(RollupRow("week", "train", 0, 0, 0, 0.0, 0.0, 0.0, 1),)),  # type: ignore[arg-type]
        HistoryRows(rollups=(RollupRow("day", "train", 0, 0, 0, "x", 0.0, 0.0, 1),)),  # type: ignore[arg-type]
        HistoryRows(sessions=(SessionRow(b"p", 0, 0),)),  # type: ignore[arg-type]
    ],
)
def test_rows_that_are_none_are_refused_with_a_reason(rows: HistoryRows) -> None:
    with pytest.raises(ValueError, match="not a kept history"):
        history_of(rows, NOW_MS)


def test_a_count_beyond_a_database_is_held_at_its_largest(disk: Store) -> None:
    read = kept(disk, History().merged(0, 1 << 70, (("p", 1 << 65),), (0, 0)))
    assert (read.tokens, read.days[0].total) == (INTEGER_MAX, INTEGER_MAX)


def test_hostile_words_come_back_as_they_went(disk: Store) -> None:
    before = folded(*story(HOSTILE)).history
    assert kept(disk, before).happenings == before.happenings


async def test_sessions_that_a_kill_left_open_are_closed_once(thread: StoreThread) -> None:
    history = History().opened("p", NOW_MS).with_speed(Point.of(NOW_MS + 5, 1, 1.0))
    first = PageHistory(thread)
    assert await first.load(NOW_MS) is None
    await first.save(history)  # and the process is killed
    second = PageHistory(thread)
    read = await second.load(NOW_MS + HOUR_MS)
    assert read is not None
    await second.save(read.with_speed(Point.of(NOW_MS + HOUR_MS, 1, 1.0)))
    again = await PageHistory(thread).load(NOW_MS + 2 * HOUR_MS)
    assert again is not None
    assert [one.until_ms for one in again.sessions["p"]] == [NOW_MS + 5]


async def test_the_history_of_an_earlier_version_moves_into_the_tables(thread: StoreThread) -> None:
    before = folded(*story()).history
    blob = msgspec.msgpack.encode({**msgspec.structs.asdict(before), "version": 1})
    await thread.call(lambda store: store.keep(OLD_KEY, blob))
    first = await PageHistory(thread).load(NOW_MS + HOUR_MS)
    second = await PageHistory(thread).load(NOW_MS + HOUR_MS)
    assert first is not None
    assert second is not None
    assert first.train.recent == before.train.recent
    assert (second.train.minutes, second.sessions) == (before.train.minutes, first.sessions)
    assert await thread.call(lambda store: store.kept(OLD_KEY)) == b""


async def test_damaged_rows_are_said_once_and_a_new_history_begins(thread: StoreThread) -> None:
    history = History().with_speed(Point.of(NOW_MS, 1, 1.0))
    await PageHistory(thread).save(history)
    await thread.call(lambda store: store._db.execute("UPDATE page_rollups SET value = 'x'"))
    page = PageHistory(thread)
    with pytest.raises(ValueError, match="not a kept history"):
        await page.load(NOW_MS)
    await page.save(history)
    again = await PageHistory(thread).load(NOW_MS)
    assert again is not None
    assert again.speed.minutes == history.speed.minutes


WRITER = """
import os, signal, sys
from pathlib import Path
from dugnad.dashboard.history import History
from dugnad.dashboard.historyrows import changed
from dugnad.dashboard.series import Point
from dugnad.peer.pagetables import PageTables
from dugnad.peer.store import Store
store, written, history = Store.open(Path(sys.argv[1])), History(), History()
for n in range(50):
    history = history.with_train(Point.of(60_000 * n, n, float(n)))
    PageTables(store).write(changed(written, history))
    written = history
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    killed = subprocess.run([sys.executable, "-c", WRITER, str(path)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    with closing(Store.open(path)) as store:
        history = history_of(PageTables(store).read(NOW_MS), NOW_MS)
    assert [p.value for p in history.train.minutes] == [float(n) for n in range(50)]
