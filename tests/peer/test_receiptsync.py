"""Receipts between peers: each ends with the other's, and what is forged is not kept."""

import json
from pathlib import Path

import msgspec
import pytest

from dugnad.averaging.board import board_json
from dugnad.averaging.credit import CreditFold
from dugnad.averaging.formats import CommitRecord, Input, inputs_root, sign_record
from dugnad.averaging.receiptcheck import commit_reason
from dugnad.dht.identity import Identity
from dugnad.dht.records import verify_ed25519
from dugnad.peer import receiptsync
from dugnad.peer.assembly import credit_rules
from dugnad.peer.pull import Puller
from dugnad.peer.receiptsync import connected, sync_fragment, window_start
from dugnad.peer.store import Store
from dugnad.peer.storethread import StoreThread

from .receipt_world import PEOPLE, Made  # noqa: TID252  the world is no installed package
from .transfer_world import Shelf, Swarm, swarm  # noqa: TID252


@pytest.fixture(scope="module")
def made() -> Made:
    """A run with a few merges of every fragment, dated now."""
    return Made().go(6)


@pytest.fixture(autouse=True)
def the_whole_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made run lies longer ago than the days that are compared."""
    monkeypatch.setattr(receiptsync, "window_start", lambda wall_ms: 0)


async def served(made: Made, commits: list[tuple[bytes, CommitRecord]]) -> Swarm:
    shelf = Shelf()
    by_name = dict(commits)
    shelf.digests = lambda fragment, since_ms: sorted(  # type: ignore[method-assign]
        name
        for name, one in commits
        if one.header.fragment == fragment and one.header.time_ms >= since_ms
    )

    def chain(fragment: int, digest: bytes, count: int) -> tuple[CommitRecord, ...]:
        found: list[CommitRecord] = []
        while digest in by_name and len(found) < count:
            found.append(by_name[digest])
            digest = found[-1].header.parent
        return tuple(found)

    shelf.commits = chain  # type: ignore[method-assign]
    return await swarm(shelf)


async def opened(made: Made, path: Path, commits: list[tuple[bytes, CommitRecord]]) -> StoreThread:
    store = StoreThread()
    await store.open(path, made.run)
    await store.call(lambda one: one.add_commits(commits))
    return store


def board(store: Store, made: Made) -> bytes:
    """The board that follows from what a store holds, up to the tips of the run."""
    fold = CreditFold(credit_rules(made.manifest, made.run))
    for p, tip in enumerate(made.tips):
        fold.follow(p, store.lineage(p, tip.digest))
    return board_json(fold.board())


def held(store: Store, fragments: int) -> set[bytes]:
    return {name for p in range(fragments) for name in store.digests(p, 0)}


async def test_a_peer_ends_with_the_receipts_that_another_has(made: Made, tmp_path: Path) -> None:
    store = await opened(made, tmp_path / "state", made.commits[: made.fragments])
    network = await served(made, made.commits)
    rules = credit_rules(made.manifest, made.run)
    for p in range(made.fragments):
        got = await sync_fragment(_puller(network, made), store, rules, network.peers[0], p)
        assert (got.fault, got.found, got.kept, got.complete) == ("", 5, 5, True)
        again = await sync_fragment(_puller(network, made), store, rules, network.peers[0], p)
        assert (again.found, again.rounds) == (0, 1)
    assert await store.call(lambda one: held(one, made.fragments)) == {n for n, _ in made.commits}
    other = await opened(made, tmp_path / "other", made.commits[::-1])
    boards = [await one.call(lambda held_by: board(held_by, made)) for one in (store, other)]
    assert boards[0] == boards[1]
    assert json.loads(boards[0])["tokens"] > 0
    await store.close()
    await other.close()


async def test_a_forged_receipt_is_refused_with_its_maker_named(made: Made, tmp_path: Path) -> None:
    store = await opened(made, tmp_path / "state", [])
    name, record = made.commits[0]
    bad = msgspec.structs.replace(record.header, signature=b"x" * 64)
    commits = [(name, CommitRecord(bad, record.inputs)), *made.commits[1:]]
    network = await served(made, commits)
    rules = credit_rules(made.manifest, made.run)
    got = await sync_fragment(_puller(network, made), store, rules, network.peers[0], 0)
    assert "not signed by its home" in got.fault
    assert got.kept < 6
    assert name not in await store.call(lambda one: one.digests(0, 0))
    await store.close()


def test_what_hangs_together_with_nothing_here_is_not_kept(made: Made) -> None:
    own = [row for row in made.commits if row[1].header.fragment == 0]
    names = [name for name, _ in own]
    assert list(connected([names[0]], dict(own[1:4]))) == names[1:4]
    assert connected([names[0]], dict(own[2:4])) == {}
    assert list(connected([], dict(own[2:4]))) == names[2:4]


@pytest.mark.parametrize("field", ["tokens", "pieces_root", "signature", "seq"])
def test_a_receipt_that_was_changed_is_named(made: Made, field: str) -> None:
    _, record = made.commits[-1]
    wrong: dict[str, object] = {
        "tokens": 1,
        "pieces_root": b"p" * 32,
        "signature": b"s" * 64,
        "seq": 99,
    }
    one = record.inputs[1]
    forged = msgspec.structs.replace(one.contribution, **{field: wrong[field]})
    inputs = (
        record.inputs[0],
        msgspec.structs.replace(one, contribution=forged),
        *record.inputs[2:],
    )
    home = next(who for who in PEOPLE if who.peer == record.header.home)
    reason = _judged(made, _resigned(made, record, inputs, home))
    assert reason.startswith("receipt ")
    assert "sign" in reason or "units" in reason


def test_a_true_commit_is_true_and_a_replayed_receipt_is_refused(made: Made) -> None:
    _, record = made.commits[-1]
    home = next(who for who in PEOPLE if who.peer == record.header.home)
    assert _judged(made, record) == ""
    doubled = (record.inputs[0], record.inputs[0], *record.inputs[1:])
    assert "each once" in _judged(made, _resigned(made, record, doubled, home))
    header = msgspec.structs.replace(record.header, run=b"o" * 32)
    assert "another run" in _judged(made, CommitRecord(header, record.inputs))
    assert "as many as" in _judged(made, CommitRecord(record.header, record.inputs[:-1]))


def test_two_clocks_of_one_day_compare_the_same_commits() -> None:
    day = 86_400_000
    assert window_start(20 * day + 5) == window_start(21 * day - 1) == 14 * day
    assert window_start(0) == 0


def _resigned(
    made: Made, record: CommitRecord, inputs: tuple[Input, ...], home: Identity
) -> CommitRecord:
    header = msgspec.structs.replace(
        record.header, inputs_root=inputs_root(made.run, inputs), inputs_count=len(inputs)
    )
    return CommitRecord(sign_record(header, made.run, home), inputs)


def _judged(made: Made, record: CommitRecord) -> str:
    context, now = made.manifest.data.context, record.header.time_ms
    return commit_reason(record, made.run, context, verify_ed25519, now)


def _puller(network: Swarm, made: Made) -> Puller:
    return Puller(network.mine, made.run)
