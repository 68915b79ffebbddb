"""What the daemon's page tells: every kind of news, nothing foreign raw, nothing private."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from dugnad.dashboard.boardpage import board_query, leaderboard_page
from dugnad.dashboard.figures import Choice
from dugnad.dashboard.frontpage import front_page
from dugnad.dashboard.layout import View
from dugnad.dashboard.peerspage import peers_page, peers_query
from dugnad.dht.advert import Device
from dugnad.dht.ids import name_of, peer_text, short
from dugnad.dht.roster_table import PeerState
from dugnad.dht.roster_table import State as Standing
from dugnad.peer import clock
from dugnad.peer.config import Endpoint
from dugnad.peer.daemon import Daemon
from dugnad.peer.errors import UserError
from dugnad.peer.evaluation import Reached
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.manifest import Manifest
from dugnad.peer.pagehistory import OLD_KEY
from dugnad.peer.pageviews import why_gone, without_addresses
from dugnad.peer.preparedunits import BATCH_UNITS, Prepared
from dugnad.peer.publicpage import (
    NUMBERS_S,
    PEERS_S,
    SAMPLE_BYTES,
    SAMPLE_S,
    PublicPage,
)
from dugnad.peer.scores import Score

from .page_world import (  # noqa: TID252  the world is no installed package
    HOSTILE,
    ME,
    A,
    B,
    Peer,
    later,
    make_manifest,
    opened,
    page_of,
    rows,
    turn,
)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """A small run's manifest."""
    return make_manifest()


@pytest.fixture
async def peer(manifest: Manifest) -> AsyncIterator[Peer]:
    """A daemon that is just starting, alone."""
    made = Peer(manifest)
    yield made
    made.store.close()


async def test_a_page_begins_with_the_run_and_with_whoever_is_here(peer: Peer) -> None:
    peer.comes(A, roles=("train",), tokens_per_s=50.0, devices=(Device("cpu", "Ryzen", 8),))
    page = await opened(peer)
    page.linked("dugnad:somewhere")
    state = page.feed.state()
    assert state.run is not None
    assert state.run.name == "State of the Union"
    assert state.run.parameters == peer.manifest.model.parameter_count()
    assert sum(state.run.fragments) == state.run.parameters
    assert state.run.link == "dugnad:somewhere"
    assert state.live == 2
    assert state.serving is not None
    assert (state.serving.name, state.serving.state) == (name_of(ME), "training")
    row = rows(state)[peer_text(A)]
    assert (row.device, row.state, row.link) == ("8 × cpu Ryzen", "training", "direct")
    assert state.board is not None
    assert dict(state.units)["open"] == 7


async def test_peers_come_and_go_at_once_and_their_units_move(peer: Peer) -> None:
    page = await opened(peer)
    peer.comes(A)
    page.peer_up(A)
    await turn()
    assert page.feed.state().live == 2
    peer.goes(A)
    page.peer_gone(A, "lost", "no word from /ip4/192.0.2.7/tcp/4001", 12)
    await turn()
    state = page.feed.state()
    assert state.live == 1
    row = rows(state)[peer_text(A)]
    assert (row.state, row.reason) == ("lost", "no word from (address)")
    said = [one.text for one in state.happenings]
    assert f"{name_of(A)} ({short(A)}) came" in said
    assert any(text.startswith("12 work units of") and short(ME) in text for text in said)


async def test_changes_of_peers_are_told_every_few_seconds_and_only_changes(peer: Peer) -> None:
    peer.comes(A)
    page = await opened(peer)
    page.tick(later(PEERS_S + 0.1))
    before = page.feed.state().events
    page.tick(later(2 * PEERS_S + 0.2))
    told = page.feed.state().events - before
    peer.roster.adverts[A] = msgspec.structs.replace(peer.roster.adverts[A], tokens_per_s=75.0)
    page.tick(later(3 * PEERS_S + 0.3))
    assert rows(page.feed.state())[peer_text(A)].tokens_per_s == 75.0
    assert told <= 3, "status and numbers only"


async def test_a_peer_that_cannot_be_reached_is_shown_with_the_reason(peer: Peer) -> None:
    long_ago = clock.now() - 60.0
    peer.roster.states[B] = PeerState(
        Standing.KNOWN, "not reached: 203.0.113.9:4001: refused", long_ago, None
    )
    page = await opened(peer)
    state = page.feed.state()
    row = rows(state)[peer_text(B)]
    assert (row.state, row.reason) == ("unreachable", "not reached: (address): refused")
    assert state.live == 1


async def test_merges_are_told_with_tokens_bytes_and_the_next_one(peer: Peer) -> None:
    page = await opened(peer)
    fragments = len(peer.manifest.table.fragments)
    for p in range(fragments):
        action, _ = peer.merge(p, 1, A, {ME: 101, A: 50})
        peer.shells[p].core.view.due_at = clock.now() + 5.0
        page.adopted(p, action)
    await turn()
    state = page.feed.state()
    assert state.merges == fragments
    assert state.tokens == 1000
    assert state.heads[0].home == peer_text(A)
    assert state.heads[0].listed == 2
    (bar,) = state.history.hours
    assert bar.parts == {peer_text(ME): 101, peer_text(A): 50}, "once, not once a fragment"
    assert state.history.sent_bytes == 400 * fragments
    assert state.history.plain_bytes == 4 * 3 * sum(peer.manifest.table.sizes)
    due = state.next_due(clock.wall_ms())
    assert due is not None
    assert 4_000 < due[0] - clock.wall_ms() < 6_000


async def test_a_merge_counts_once_when_another_lineage_is_chosen(peer: Peer) -> None:
    page = await opened(peer)
    page.adopted(0, peer.merge(0, 1, A, {A: 80})[0])
    page.adopted(0, peer.merge(0, 1, B, {A: 80})[0])
    await turn()
    total = sum(bar.total for bar in page.feed.state().history.hours)
    assert total == 80 // len(peer.manifest.table.fragments)
    assert page.feed.state().heads[0].home == peer_text(B)


async def test_measurements_are_told_when_they_are_new(peer: Peer) -> None:
    page = await opened(peer)
    peer.training.loss, peer.training.steps = 2.5, 9
    peer.vitals.swarm_tokens = 4096
    peer.vitals.anchor_losses.append((4000, 2.25))
    page.tick(later(NUMBERS_S + 0.1))
    page.tick(later(2 * NUMBERS_S + 0.2))
    history = page.feed.state().history
    assert [(point.tokens, point.value) for point in history.train.points()] == [(4096, 2.5)]
    assert [(point.tokens, point.value) for point in history.held_out.points()] == [(4000, 2.25)]
    assert history.speed.last is not None
    assert history.speed.last.value == 100.0


async def test_rounds_of_evaluators_are_the_curve_once_there_are_any(peer: Peer) -> None:
    page = await opened(peer)
    tokens = peer.evaluation.held.tokens
    for version in (8, 16):
        peer.evaluation.handle(Reached(0, version, b"", 0))
        for who in (A, B):
            score = Score(who, version, bytes(32), 0, 2.0 * tokens, tokens, 500 * version)
            assert peer.evaluation.hear(score) == ""
    peer.vitals.anchor_losses.append((9000, 2.25))
    page.tick(later(NUMBERS_S + 0.1))
    state = page.feed.state()
    points = [(point.tokens, point.value) for point in state.history.held_out.points()]
    assert points == [(4000, 2.0)], "the newest round is still being scored"
    assert {row.confirmed for row in state.evaluated} == {2 * tokens}
    assert state.board is None or not state.board.rows


async def test_what_preparers_earn_is_shown(peer: Peer) -> None:
    page = await opened(peer)
    for who in (A, B):
        assert peer.preparation.hear(Prepared(who, 0, (bytes(32),) * BATCH_UNITS)) == ""
    page.tick(later(NUMBERS_S + 0.1))
    assert {row.confirmed for row in page.feed.state().prepared} == {BATCH_UNITS * 4 * 100}


async def test_a_speed_that_nobody_measured_is_not_told_as_zero(peer: Peer) -> None:
    peer.speed = 0.0
    page = await opened(peer)
    assert page.feed.state().history.speed.last is None


async def test_the_journal_is_told_without_addresses_and_without_what_is_private(
    peer: Peer,
) -> None:
    peer.journal.add("sync", "level with the swarm after 2.0 s; training")
    page = await opened(peer)
    peer.journal.add("disk", "the disk is full: /home/someone/dugnad")
    peer.journal.add("refused", "somebody makes a thousand of these")
    peer.journal.add("identity", f"{HOSTILE}: from 198.51.100.4:4001")
    page.tick(later(1.0))
    texts = [one.text for one in page.feed.state().happenings]
    assert "level with the swarm after 2.0 s; training" in texts
    assert not any("someone" in text or "thousand" in text for text in texts)
    assert any(text.endswith("from (address)") for text in texts)


async def test_a_fault_of_the_learner_is_told_without_its_words(peer: Peer) -> None:
    peer.state = ("error", "FileNotFoundError: /home/someone/secret")
    page = await opened(peer)
    state = page.feed.state()
    assert state.serving is not None
    assert state.serving.state == "error"
    assert "someone" not in repr(state)


async def test_hostile_peers_write_nothing_into_the_pages(peer: Peer) -> None:
    page = await opened(peer)
    peer.comes(
        A,
        name=HOSTILE[:32],
        software=HOSTILE[:32],
        region=HOSTILE[:32],
        roles=(HOSTILE[:16],),
        devices=(Device(HOSTILE[:16], HOSTILE[:48]),),
        tokens_per_s=1e300,
    )
    peer.speed = float("inf")
    page.peer_up(A)
    await turn()
    page.peer_gone(A, "lost", HOSTILE, 1)
    page.tick(later(NUMBERS_S + 0.1))
    await turn()
    view = View(page.feed.state(), clock.wall_ms())
    for text in (
        front_page(view, Choice("tokens")),
        peers_page(view, peers_query({})),
        leaderboard_page(view, board_query({}), ""),
    ):
        assert "<script>alert" not in text
        assert not {"\u202e", "\x1b"} & set(text)


async def test_the_model_writes_now_and_then_and_little(peer: Peer) -> None:
    page = await opened(peer)
    peer.training.ready, peer.vitals.synced = object(), True
    page.tick(later(1.0))
    await turn()
    assert peer.asked == [], "a model that was never merged has nothing to say"
    peer.merge(0, 1, A, {A: 80})
    page.tick(later(2.0))
    await turn()
    page.tick(later(3.0))
    await turn()
    assert peer.asked == [SAMPLE_BYTES]
    sample = page.feed.state().sample
    assert sample is not None
    assert (sample.text, sample.step) == ("Fellow citizens", 1)
    peer.writes = b"\xff\x1b[2J"
    page.tick(later(SAMPLE_S + 5.0))
    await turn()
    assert page.feed.state().sample is not sample
    await page.close()


async def test_a_learner_that_dies_while_it_writes_is_no_fault_of_the_page(peer: Peer) -> None:
    async def gone(*_: Any) -> bytes:  # Any: whatever it is asked
        raise LearnerGone("it died")

    page = await opened(peer)
    peer.training.ready, peer.vitals.synced = object(), True
    peer.training.trainer.sample = gone
    peer.merge(0, 1, A, {A: 80})
    page.tick(later(1.0))
    await turn()
    assert page.feed.state().sample is None
    assert peer.notes == []


async def test_history_is_kept_and_taken_up_again(peer: Peer) -> None:
    page = await opened(peer)
    page.adopted(0, peer.merge(0, 3, A, {A: 80})[0])
    await turn()
    await page.close()
    await page.close()
    again = await opened(peer)
    state = again.feed.state()
    assert state.tokens == 3000
    assert state.history.hours == page.feed.state().history.hours
    assert state.heads[0].version == 3


async def test_after_a_restart_measurements_stand_where_the_history_ends(peer: Peer) -> None:
    page = await opened(peer)
    page.adopted(0, peer.merge(0, 3, A, {A: 80})[0])
    await turn()
    await page.close()
    again = await opened(peer)
    peer.vitals.anchor_losses.append((0, 2.25))
    again.tick(later(NUMBERS_S + 0.1))
    last = again.feed.state().history.held_out.last
    assert last is not None
    assert last.tokens == 3000


async def test_a_history_that_cannot_be_read_is_said_and_a_new_one_begins(peer: Peer) -> None:
    peer.store.values[OLD_KEY] = b"\xc1"
    page = await opened(peer)
    assert "a new one begins" in peer.notes[0]
    assert page.feed.state().run is not None


async def test_what_goes_wrong_in_the_page_stays_there(peer: Peer) -> None:
    page = await opened(peer)
    page.adopted(10_000, peer.merge(0, 1, A, {A: 80})[0])  # tells the caller nothing
    faults: list[dict[str, Any]] = []  # Any: what asyncio puts into it
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    await turn()
    loop.set_exception_handler(None)
    assert isinstance(faults[0]["exception"], IndexError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "not reached: /ip4/192.0.2.7/tcp/4001/p2p/12D3: refused",
            "not reached: (address) refused",
        ),
        ("from [2001:db8::1]:4001 at", "from (address) at"),
        ("203.0.113.9:80", "(address)"),
        ("version 0.1.0 at 12:30 after 2.0 s; fragment 3: late", None),
    ],
)
def test_addresses_are_left_out(text: str, said: str | None) -> None:
    assert without_addresses(text) == (text if said is None else said)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("stream ended: qLxi5y ended the stream, 4 B short", "its connection ended"),
        ("silent for 3.1 s", "silent for 3.1 s"),
        ("not reached: /ip4/203.0.113.7/tcp/4001: refused", "not reached: (address) refused"),
    ],
)
def test_why_a_peer_is_gone_is_said_in_plain_words(reason: str, said: str) -> None:
    assert why_gone(reason) == said


@pytest.mark.slow
async def test_a_port_that_is_taken_is_said_with_the_fix(peer: Peer) -> None:
    first = page_of(peer)
    await first.start()
    try:
        port = int(first.address.rstrip("/").rpartition(":")[2])
        second = PublicPage(cast(Daemon, peer.daemon), Endpoint("127.0.0.1", port))
        with pytest.raises(UserError, match="in use") as caught:
            await second.start()
        await second.close()
        assert caught.value.number == "E018"
    finally:
        await first.close()
    assert first.address == ""


@pytest.mark.slow
def test_a_daemon_without_a_page_does_not_load_it() -> None:
    code = (
        "import sys, dugnad.peer.daemon; "
        "sys.exit(any(name.startswith('dugnad.dashboard') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
