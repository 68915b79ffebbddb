"""What is kept over restarts: its bounds, and what earlier versions kept."""

import msgspec
import pytest

from dugnad.dashboard.history import (
    PARTS_MAX,
    SESSIONS_MAX,
    History,
    active_ms,
    decode_old,
)
from dugnad.dashboard.series import HOUR_MS

from .run_world import NOW_MS, folded, ids, story  # noqa: TID252  the world is no installed package


def of_earlier_versions(history: History, version: int = 1) -> bytes:
    """The bytes that a version before the tables kept."""
    return msgspec.msgpack.encode({**msgspec.structs.asdict(history), "version": version})


def test_what_an_earlier_version_kept_is_read() -> None:
    before = folded(*story()).history
    after = decode_old(of_earlier_versions(before), NOW_MS + HOUR_MS)
    assert (after.train, after.days, after.tokens) == (before.train, before.days, before.tokens)
    assert all(own[-1].until_ms for own in after.sessions.values())


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x90", b"\xc1" * 50])
def test_foreign_bytes_are_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a kept history"):
        decode_old(data, NOW_MS)


def test_a_history_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 99"):
        decode_old(of_earlier_versions(History(), 99), NOW_MS)


def test_sessions_are_bounded_and_do_not_overlap() -> None:
    history = History()
    for n in range(3 * SESSIONS_MAX):
        history = history.opened("p", 10 * n).opened("p", 10 * n + 1).closed("p", 10 * n + 5)
    assert len(history.sessions["p"]) == SESSIONS_MAX
    assert active_ms(history.sessions, 0) == {"p": 5 * SESSIONS_MAX}
    assert history.closed("nobody", 5) == history


def test_tokens_never_fall_and_bars_add_up() -> None:
    history = History().merged(HOUR_MS, 500, (("p", 100), ("q", 50)), (1, 4))
    history = history.merged(HOUR_MS + 5, 400, (("p", 100),), (1, 4))
    history = history.merged(3 * HOUR_MS, 900, (("q", 7),), (1, 4))
    assert history.tokens == 900
    assert [bar.parts for bar in history.hours] == [{"p": 200, "q": 50}, {"q": 7}]
    assert history.days[0].total == 257
    assert (history.sent_bytes, history.plain_bytes) == (3, 12)


def test_a_late_merge_counts_in_the_newest_bar() -> None:
    history = History().merged(3 * HOUR_MS, 1, (("p", 1),), (0, 0))
    history = history.merged(HOUR_MS, 1, (("p", 2),), (0, 0))
    assert [(bar.at_ms, bar.total) for bar in history.hours] == [(3 * HOUR_MS, 3)]


def test_contributors_beyond_the_bound_are_added_up() -> None:
    listed = tuple((f"p{n}", 1) for n in range(PARTS_MAX + 20))
    bar = History().merged(0, 1, listed, (0, 0)).hours[0]
    assert len(bar.parts) == PARTS_MAX + 1
    assert bar.parts[""] == 20
    assert ids(1)[0] not in bar.parts
