"""Pages without taking part: told from what lies on the disk and what the daemon here says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dugnad.averaging.board import board_json
from dugnad.averaging.owners import accept, offer
from dugnad.averaging.setboard import board_of
from dugnad.dashboard.boardpage import basis
from dugnad.dashboard.layout import View
from dugnad.dashboard.state import State
from dugnad.dht.identity import Identity
from dugnad.dht.ids import peer_text, run_text
from dugnad.dht.records import encode
from dugnad.peer.assembly import credit_rules, lineage_rules
from dugnad.peer.config import Endpoint
from dugnad.peer.dashboardcommand import DEFAULT, endpoint_of
from dugnad.peer.errors import UserError
from dugnad.peer.localpages import LocalPages, LocalRun
from dugnad.peer.pagehistory import PageHistory
from dugnad.peer.paths import Home
from dugnad.peer.statementsync import KEY
from dugnad.peer.store import Store

from .page_world import make_manifest  # noqa: TID252  the world is no installed package
from .processes import wait_for  # noqa: TID252
from .receipt_world import PEOPLE, Made, kept  # noqa: TID252

STATUS = {
    "peer": peer_text(PEOPLE[0].peer),
    "state": "training",
    "reason": "",
    "link": "dugnad:x",
    "swarm_tokens": 500,
    "swarm_tokens_per_s": 70.0,
    "train_loss": 2.5,
    "anchor_loss": 2.75,
}


def peer(who: Identity, state: str, **more: object) -> dict[str, object]:
    """A row of the control API."""
    row: dict[str, object] = {
        "peer": peer_text(who.peer),
        "name": "a\u202ename",
        "state": state,
        "tokens_per_s": 20.0,
        "link": "direct",
        "since_s": 9.0,
        "last_seen_s": 1.0,
        "listed_tokens": 7,
        "version": "0.1.0",
        "reason": "",
    }
    return row | more


async def opened(home: Home, made: Made) -> LocalRun:
    run = LocalRun(home, made.run, made.manifest)
    await run.open()
    return run


async def test_a_run_on_the_disk_is_shown_with_the_board_of_its_receipts(tmp_path: Path) -> None:
    made = Made().go(6)
    run = await opened(kept(made, tmp_path, made.commits), made)
    await run.look(None, ())
    state = run.page.feed.state()
    rules = [lineage_rules(made.manifest, made.run, p) for p in range(made.fragments)]
    expected = board_of(credit_rules(made.manifest, made.run), rules, dict(made.commits))
    assert state.board is not None
    assert board_json(state.board) == board_json(expected)
    assert state.merges == len(made.commits)
    assert state.tokens == max(tip.tokens_total for tip in made.tips)
    assert state.serving is not None
    assert state.serving.state == "stopped"
    said = basis(View(state, 1 << 41))
    assert f"Computed from {len(PEOPLE) * len(made.commits)} receipts, of 4 of 4 peers" in said
    receipts = await run.page.feed.receipts(peer_text(PEOPLE[0].peer), 100)
    assert {one.status for one in receipts} == {"provisional", "settled"}
    assert all(one.witness for one in receipts if one.status == "settled")
    await run.close()


async def test_what_the_daemon_here_says_is_told_as_it_changes(tmp_path: Path) -> None:
    made = Made().go(1)
    run = await opened(kept(made, tmp_path, made.commits), made)
    rows = [peer(PEOPLE[0], "this peer"), peer(PEOPLE[1], "live"), peer(PEOPLE[2], "known")]
    await run.look(STATUS, rows)
    state = run.page.feed.state()
    assert state.live == 2
    assert state.peers[rows[1]["peer"]].name == "aname"  # type: ignore[index]
    assert state.serving is not None
    assert (state.serving.state, state.run and state.run.link) == ("training", "dugnad:x")
    assert state.history.train.last is not None
    assert state.history.train.last.value == 2.5
    told = state.events
    await run.look(STATUS, rows)
    assert run.page.feed.state().events - told == 2  # a sign of life, and the speed
    lost = peer(PEOPLE[1], "left")
    await run.look(STATUS | {"train_loss": 2.0}, [rows[0], lost])
    state = run.page.feed.state()
    assert (state.live, state.history.train.last and state.history.train.last.value) == (1, 2.0)
    assert [one.kind for one in state.happenings[-1:]] == ["left"]
    await run.look(None, ())
    assert run.page.feed.state().live == 0
    await run.close()


async def test_private_reasons_of_the_daemon_are_not_published(tmp_path: Path) -> None:
    made = Made()
    run = await opened(kept(made, tmp_path, made.commits), made)
    await run.look(STATUS | {"state": "error", "reason": "/home/me/secret failed"}, ())
    await run.look(STATUS | {"state": "paused", "reason": "pause_while: game runs"}, ())
    state = run.page.feed.state()
    assert state.serving is not None
    assert state.serving.reason == "pause_while"
    await run.close()


async def test_machines_of_one_owner_stand_in_one_row(tmp_path: Path) -> None:
    made, owner = Made().go(3), Identity.ephemeral(b"w" * 32)
    home = kept(made, tmp_path, made.commits)
    bonds = [accept(offer(owner, one.peer, "Farm", 5), one) for one in PEOPLE[:2]]
    run = await opened(home, made)
    await run.look(None, ())
    store = Store.open(home.run(made.run).state, made.run)
    store.keep(KEY, encode(tuple(encode(one) for one in bonds)))
    store.close()
    await run.look(None, ())
    board = run.page.feed.state().board
    assert board is not None
    assert sorted((row.name, len(row.machines)) for row in board.rows)[0] == ("Farm", 2)
    assert len(board.rows) == 3
    await run.close()


async def test_a_page_begins_with_the_kept_history_and_counts_no_merge_twice(
    tmp_path: Path,
) -> None:
    made = Made().go(2)
    home = kept(made, tmp_path, made.commits)
    run = await opened(home, made)
    await run.look(STATUS, [peer(PEOPLE[0], "this peer")])
    before = run.page.feed.state()
    await PageHistory(run._store).save(before.history)
    await run.close()
    again = await opened(home, made)
    await again.look(None, ())
    after = again.page.feed.state()
    assert _kept(after) == _kept(before)
    assert after.merges == before.merges
    await again.close()


def _kept(state: State) -> tuple[int, int, int]:
    return state.tokens, state.history.sent_bytes, sum(bar.total for bar in state.history.days)


async def test_a_folder_without_a_run_has_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has anything to show") as caught:
        await LocalPages(Home(tmp_path), Endpoint("127.0.0.1", 0)).serve(asyncio.Event())
    assert caught.value.number == "E042"


def test_where_pages_are_served_is_this_machine_unless_said() -> None:
    assert endpoint_of(None) == DEFAULT == Endpoint("127.0.0.1", 8080)
    assert endpoint_of("9000") == Endpoint("127.0.0.1", 9000)
    assert endpoint_of("0.0.0.0:9000") == Endpoint("0.0.0.0", 9000)
    for bad in ("", "nowhere", "host:99999"):
        with pytest.raises(UserError, match="--listen") as caught:
            endpoint_of(bad)
        assert caught.value.number == "E001"


@pytest.mark.slow
async def test_several_runs_of_a_folder_have_a_page_that_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RESCAN_S", "LOOK_S"):
        monkeypatch.setattr(f"dugnad.peer.localpages.{name}", 0.01)
    made = [Made(make_manifest(created_ms=1_000 * n)).go(n) for n in (1, 2)]
    home = kept(made[0], tmp_path, made[0].commits)
    pages, stopping = LocalPages(home, Endpoint("127.0.0.1", 0)), asyncio.Event()
    serving = asyncio.create_task(pages.serve(stopping))
    await pages.serving.wait()
    alone = await asyncio.to_thread(read, pages.address)
    assert "Runs on this machine" not in alone
    kept(made[1], tmp_path, made[1].commits)  # another run is joined meanwhile
    start = await asyncio.to_thread(wait_for, lambda: listed(pages.address), 10.0, "the list")
    for one in made:
        key = run_text(one.run)[:12]
        assert f"/run/{key}/" in start
        told = await asyncio.to_thread(read, f"{pages.address}run/{key}/api/v1/snapshot")
        assert json.loads(told)["run"]["run"] == run_text(one.run)
        board = await asyncio.to_thread(read, f"{pages.address}run/{key}/leaderboard")
        assert "Computed from" in board
        news = f"{pages.address}run/{key}/api/v1/events"
        with await asyncio.to_thread(urllib.request.urlopen, news, timeout=10) as stream:
            assert stream.status == 200
    stopping.set()
    await serving


def listed(address: str) -> str:
    """The page that lists runs; '' while there is none, or while the server changes."""
    try:
        page = read(address)
    except OSError:
        return ""
    return page if "Runs on this machine" in page else ""


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        data: bytes = answer.read()
        return data.decode()


@pytest.mark.slow
def test_watching_never_loads_torch_and_verifying_not_even_hivemind() -> None:
    code = (
        "import sys, dugnad.peer.receiptverify, dugnad.peer.receiptexport;"
        "print('torch' in sys.modules, 'hivemind' in sys.modules);"
        "import dugnad.peer.observer, dugnad.peer.localpages;"
        "from dugnad.dht.book import load_hivemind; load_hivemind();"
        "print('torch' in sys.modules, 'hivemind.p2p' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]
