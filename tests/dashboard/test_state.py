"""The fold: events in, one immutable state out."""

import math

import msgspec
import pytest

from dugnad.dashboard import events as ev
from dugnad.dashboard.history import HAPPENINGS_MAX
from dugnad.dashboard.state import (
    GONE_KEPT_MS,
    PEERS_MAX,
    State,
    apply,
    name_in,
    sessions_of,
)

from .run_world import (  # noqa: TID252  the world is no installed package
    HOSTILE,
    NOW_MS,
    board,
    folded,
    ids,
    keys,
    row,
    story,
)

A, B, C = ids(3)


def test_the_same_events_give_the_same_state_and_change_no_earlier_one() -> None:
    events = story()
    half = folded(*events[:40])
    seen = (half.events, half.live, half.history, half.happenings, dict(half.peers))
    assert folded(*events[40:], state=half) == folded(*events)
    assert (half.events, half.live, half.history, half.happenings, dict(half.peers)) == seen


def test_a_peer_that_comes_goes_and_comes_back_is_told_in_words() -> None:
    state = folded(
        ev.PeerSeen(at_ms=1000, row=row(A)),
        ev.PeerSeen(at_ms=2000, row=row(A)),
        ev.PeerGone(at_ms=3000, peer=A, how="lost", reason="silent"),
        ev.PeerGone(at_ms=3500, peer=A, how="lost", reason="silent"),
        ev.PeerSeen(at_ms=4000, row=row(A)),
        ev.PeerGone(at_ms=5000, peer=B, how="left"),
    )
    key = A[-6:]
    assert [h.text for h in state.happenings] == [
        f"kind-otter ({key}) came",
        f"kind-otter ({key}) was lost: silent",
        f"kind-otter ({key}) is back",
    ]
    assert [p.value for p in state.history.peers.recent] == [1, 0, 1]
    assert [(s.since_ms, s.until_ms) for s in sessions_of(state, A)] == [(1000, 3000), (4000, 0)]


def test_who_is_gone_is_shown_for_a_day() -> None:
    state = folded(
        ev.PeerSeen(at_ms=0, row=row(A)),
        ev.PeerGone(at_ms=10, peer=A, how="left"),
        ev.PeerChanged(at_ms=GONE_KEPT_MS, rows=(row(B),)),
    )
    assert state.peers[A].state == "left"
    assert state.live == 1
    later = apply(state, ev.PeerChanged(at_ms=GONE_KEPT_MS + 11, rows=(row(B),)))
    assert set(later.peers) == {B}


def test_the_table_of_peers_is_bounded_and_drops_those_seen_longest_ago() -> None:
    rows = tuple(row(f"peer{n}", last_seen_ms=n) for n in range(PEERS_MAX + 50))
    state = folded(ev.PeerChanged(at_ms=NOW_MS, rows=rows))
    assert len(state.peers) == PEERS_MAX
    assert "peer0" not in state.peers
    assert f"peer{PEERS_MAX + 49}" in state.peers


def test_happenings_are_bounded_and_numbered() -> None:
    many = [ev.Happened(at_ms=n, kind="k", text=f"{n}") for n in range(HAPPENINGS_MAX + 7)]
    state = folded(*many)
    assert len(state.happenings) == HAPPENINGS_MAX
    assert state.happenings[-1].n == state.happened == HAPPENINGS_MAX + 7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_not_kept(value: float) -> None:
    state = folded(
        ev.TrainLoss(at_ms=1, tokens=1, loss=value), ev.Throughput(at_ms=1, tokens_per_s=value)
    )
    assert state.history.train.last is None
    assert state.history.speed.last is None
    assert state.events == 2


def test_the_next_merge_is_the_earliest_that_is_still_expected() -> None:
    state = folded(
        ev.MergeDue(at_ms=0, fragment=0, due_ms=1000),
        ev.MergeDue(at_ms=0, fragment=1, due_ms=400_000),
    )
    assert state.next_due(0) == (1000, 0)
    assert state.next_due(200_000) == (400_000, 1)
    assert state.next_due(900_000) is None
    merged = apply(state, story()[8])
    assert merged.events == 3


@pytest.mark.parametrize("fragment", [-1, 10**6])
def test_fragments_out_of_range_are_ignored(fragment: int) -> None:
    head = ev.HeadAdopted(at_ms=1, fragment=fragment, version=1, digest="d", home=A, tokens_total=5)
    state = folded(head, ev.MergeDue(at_ms=1, fragment=fragment, due_ms=5))
    assert state.heads == {}
    assert state.tokens == 0


@pytest.mark.parametrize("words", HOSTILE)
def test_no_text_of_a_state_is_long_or_unprintable(words: str) -> None:
    peer = words
    state = folded(
        ev.PeerSeen(at_ms=1, row=row(peer, words, reason=words, state=words, roles=(words,) * 99)),
        ev.PeerGone(at_ms=2, peer=peer, how="lost", reason=words),
        ev.Happened(at_ms=3, kind=words, text=words),
        ev.UnitsMoved(at_ms=3, units=1, source=words, target=words),
        ev.UnitCounts(at_ms=3, counts=((words, 1),) * 99),
        ev.Status(at_ms=4, peer=peer, name=words, state=words, reason=words),
        ev.RunEnded(at_ms=4, reason=words),
    )
    texts: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            for key, one in value.items():
                collect(key)
                collect(one)
        elif isinstance(value, list | tuple):
            for one in value:
                collect(one)

    for part in (state.peers, state.happenings, state.units, state.serving, state.ended):
        collect(msgspec.to_builtins(part))
    assert texts
    assert max(map(len, texts)) <= 300
    assert all(one.isprintable() for one in texts)


def test_a_name_is_the_peers_own_or_the_boards_or_the_end_of_the_key() -> None:
    state = folded(
        ev.PeerSeen(at_ms=1, row=row(A, "own-name")),
        ev.BoardComputed(at_ms=1, board=board(keys(2))),
    )
    assert name_in(state, A) == "own-name"
    assert name_in(state, B).count("-") == 2
    assert name_in(state, C) == f"peer {C[-6:]}"
    assert name_in(State(), "") == ""


def test_any_event_comes_through_json() -> None:
    for event in story():
        assert msgspec.json.decode(msgspec.json.encode(event), type=ev.AnyEvent) == event
