"""The store: promises that survive kill -9, lineages, bounds, and errors that say what to do."""

import hashlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dugnad.averaging.credit import CreditFold, CreditRules
from dugnad.averaging.formats import (
    NO_DIGEST,
    Ack,
    CommitRecord,
    Contribution,
    Header,
    HeadRow,
    Input,
    UnitPiece,
)
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import encode
from dugnad.peer import store as store_module
from dugnad.peer.store import HISTORY_MIN, IN_FLIGHT_MAX, InFlight, Promise, Store, StoreError

RUN = RunId(bytes(range(32)))
PEER = PeerId(b"\x07" * 32)
DAY_MS = 86_400_000


def digest_of(*parts: object) -> bytes:
    return hashlib.sha256(encode(parts)).digest()


def commit(version: int, parent: bytes, *, fragment: int = 0, seq: int = 0) -> CommitRecord:
    contribution = Contribution(
        peer=PEER,
        fragment=fragment,
        seq=seq or version,
        base=version - 1,
        base_digest=parent,
        tokens=40,
        steps=1,
        speed_class=4,
        eligible=True,
        codec="int8",
        payload_root=NO_DIGEST,
        payload_bytes=0,
        pieces_root=NO_DIGEST,
    )
    header = Header(
        format=1,
        run=RUN,
        kind="merge",
        fragment=fragment,
        version=version,
        parent=parent,
        home=PEER,
        boot=1,
        time_ms=version * 1000,
        members_root=NO_DIGEST,
        inputs_root=NO_DIGEST,
        inputs_count=1,
        tokens_total=40 * version,
        eta_bits=0,
        mu_bits=0,
        codec="int8",
        payload_root=NO_DIGEST,
        payload_bytes=0,
        theta_root=NO_DIGEST,
        momentum_root=NO_DIGEST,
        seqs_root=NO_DIGEST,
    )
    pieces = (UnitPiece(0, version % 5, 0, 4),)
    return CommitRecord(header, (Input(contribution, pieces, 1.0, (1.0,)),))


def lineage(
    versions: int, *, fragment: int = 0, tag: str = "a"
) -> list[tuple[bytes, CommitRecord]]:
    made: list[tuple[bytes, CommitRecord]] = []
    parent = NO_DIGEST
    for version in range(1, versions + 1):
        made.append((digest_of(tag, fragment, version), commit(version, parent, fragment=fragment)))
        parent = made[-1][0]
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with closing(Store.open(path, RUN)) as opened:
        yield opened


def test_commits_come_back_as_they_were_along_their_lineage(store: Store, path: Path) -> None:
    main, other = lineage(6), lineage(3, tag="b")
    assert store.add_commits([*main, *other]) == 9
    assert store.add_commits(main) == 0
    with closing(Store.open(path)) as again:
        assert again.lineage(0, main[-1][0]) == main
        assert again.lineage(0, main[-1][0], down_to=4) == main[4:]
        assert again.lineage(0, other[-1][0]) == other
        assert again.lineage(1, main[-1][0]) == []
        assert again.commit(NO_DIGEST) is None


def test_a_lineage_with_a_gap_ends_above_it(store: Store) -> None:
    main = lineage(5)
    store.add_commits([*main[:1], *main[2:]])
    assert store.lineage(0, main[-1][0]) == main[2:]


def test_acks_are_merged_and_kept_once(store: Store) -> None:
    (digest, record), *_ = lineage(1)
    store.add_commits([(digest, record)])
    acks = [Ack(bytes([n]) * 32, 0, 1, digest, bytes(64)) for n in (3, 1)]
    assert [store.add_ack(ack) for ack in (*acks, acks[0])] == [True, True, False]
    assert not store.add_ack(Ack(PEER, 0, 1, NO_DIGEST))
    found = store.commit(digest)
    assert found is not None
    assert [ack.peer[0] for ack in found.acks] == [1, 3]


def test_receipts_of_a_peer_are_found_and_go_with_their_commits(store: Store) -> None:
    main = lineage(3)
    store.add_commits(main)
    assert [one.version for one in store.receipts(PEER)] == [3, 2, 1]
    assert (store.receipts(PEER, limit=1)[0].digest, store.receipts(PEER)[0].tokens) == (
        main[2][0],
        40,
    )
    assert store.receipts(PeerId(bytes(32))) == []


def test_sequence_numbers_rise_across_restarts_and_above_what_is_listed(path: Path) -> None:
    with closing(Store.open(path)) as store:
        assert [store.issue_seq(2) for _ in range(3)] == [1, 2, 3]
        assert store.issue_seq(0) == 1
    with closing(Store.open(path)) as store:
        assert store.issue_seq(2) == 4
        store.raise_seq(2, 40)
        store.raise_seq(2, 9)
        assert store.issue_seq(2) == 41


WRITER = """
import sys
from pathlib import Path
from dugnad.peer.store import Promise, Store
store = Store.open(Path(sys.argv[1]))
while True:
    print(store.issue_seq(0), flush=True)
"""


@pytest.mark.slow
def test_no_number_is_issued_twice_when_the_process_is_killed(path: Path) -> None:
    issued: list[int] = []
    for kills in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            issued += [int(child.stdout.readline()) for _ in range(20 + 13 * kills)]
            child.send_signal(signal.SIGKILL)
            issued += [int(line) for line in child.stdout if line.endswith("\n")]
    assert issued == sorted(set(issued))
    with closing(Store.open(path)) as store:
        assert store.issue_seq(0) > issued[-1]


def promise(fragment: int, parent: object, digest: bytes, payload: bytes = b"") -> Promise:
    """A promise of ``digest`` on top of ``parent``."""
    return Promise(fragment, digest_of(parent), 7, digest, b"record", payload)


def test_a_home_signs_one_header_on_a_parent_and_remembers_it(path: Path) -> None:
    first, second = digest_of(1), digest_of(2)
    with closing(Store.open(path)) as store:
        assert store.fresh
        assert store.promise_header(promise(0, "a", first, b"payload"))
        assert not store.promise_header(promise(0, "a", second))
        assert store.promise_header(promise(1, "a", second))
    with closing(Store.open(path)) as store:
        assert not store.fresh
        assert not store.promise_header(promise(0, "a", second))
        assert store.promise_header(promise(0, "a", first)), "the same header may leave again"
        assert store.promises(0) == [promise(0, "a", first, b"payload")]


def test_a_home_may_sign_the_same_version_of_another_lineage(store: Store) -> None:
    assert store.promise_header(promise(0, "a", digest_of(1), b"old"))
    assert store.promise_header(promise(0, "b", digest_of(2), b"new"))
    assert [one.payload for one in store.promises(0)] == [b"", b"new"]


def test_promises_are_synced_to_the_disk_and_other_writes_need_not_be(store: Store) -> None:
    levels: list[int] = []

    def note(statement: str) -> None:
        if statement.startswith("COMMIT"):
            levels.append(store._db.execute("PRAGMA synchronous").fetchone()[0])

    store._db.set_trace_callback(note)
    store.issue_seq(0)
    store.raise_seq(0, 5)
    store.promise_header(promise(0, 1, digest_of(1)))
    store.set_heads([])
    store._db.set_trace_callback(None)
    full, normal = 2, 1
    assert levels == [full, full, full, normal]


def test_promises_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PROMISES_KEPT", 3)
    for number in range(1, 8):
        assert store.promise_header(promise(0, number, digest_of(number)))
    assert [one.digest for one in store.promises(0)] == [digest_of(n) for n in (5, 6, 7)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 2)), max_size=25))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_two_promises_on_one_parent_ever_differ(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[int, int, int]]
) -> None:
    given_out: dict[tuple[int, int], bytes] = {}
    with closing(Store.open(tmp_path_factory.mktemp("s") / "state.sqlite")) as store:
        for fragment, version, which in asked:
            digest = digest_of(which)
            allowed = store.promise_header(promise(fragment, version, digest))
            assert allowed == (given_out.setdefault((fragment, version), digest) == digest)


def test_heads_and_contributions_in_flight_survive(store: Store, path: Path) -> None:
    heads = (HeadRow(0, 3, digest_of(0)), HeadRow(1, 4, digest_of(1)))
    store.set_heads([HeadRow(0, 2, NO_DIGEST), heads[1]])
    store.set_heads(heads[:1])
    one, other = InFlight(0, 5, 2, b"record", b"payload"), InFlight(1, 1, 0, b"r", b"")
    store.keep_in_flight(other)
    store.keep_in_flight(one)
    store.set_fraction(0, 5, 0.25)
    store.drop_in_flight(1, 1)
    with closing(Store.open(path)) as again:
        assert again.heads() == heads
        assert again.in_flight() == [InFlight(0, 5, 2, b"record", b"payload", 0.25)]


def test_more_in_flight_than_the_bound_is_refused_and_nothing_is_lost(store: Store) -> None:
    for seq in range(IN_FLIGHT_MAX):
        store.keep_in_flight(InFlight(0, seq, 0, b"", b""))
    with pytest.raises(StoreError) as caught:
        store.keep_in_flight(InFlight(0, IN_FLIGHT_MAX, 0, b"", b""))
    assert caught.value.kind == "bound"
    assert len(store.in_flight()) == IN_FLIGHT_MAX


def test_the_base_of_the_fold_is_kept(store: Store) -> None:
    rules = CreditRules(RUN, fragments=2, sequence_tokens=10, unit_sequences=4, epoch_sequences=20)
    fold = CreditFold(rules)
    fold.follow(0, lineage(40))
    assert store.load_fold() is None
    store.save_fold(fold.snapshot())
    kept = store.load_fold()
    assert kept == fold.snapshot()
    assert CreditFold.restore(rules, kept).tip(0)[0] == 40 - 32


def test_events_are_a_ring_of_plain_lines(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "EVENTS_MAX", 3)
    numbers = [store.add_event(n, "roster", f"peer {n}\n\x1b[31mgone") for n in range(6)]
    assert numbers == [1, 2, 3, 4, 5, 6]
    kept = store.events()
    assert [event.number for event in kept] == [4, 5, 6]
    assert kept[-1].text == "peer 5  [31mgone"
    assert [event.number for event in store.events(since=5)] == [6]


def test_counters_add_up(store: Store) -> None:
    store.count({"tokens": 5, "steps": 1})
    store.count({"tokens": 7})
    assert store.counters() == {"steps": 1, "tokens": 12}
    with pytest.raises(StoreError):
        store.count({f"name {n}": 1 for n in range(300)})
    assert len(store.counters()) == 2


def test_peers_and_adverts_are_remembered_within_bounds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PEERS_MAX", 2)
    for n in (2, 3, 1):
        store.remember_peer(PeerId(bytes([n]) * 32), (f"/ip4/127.0.0.1/tcp/{n}",), n)
        store.keep_advert(PeerId(bytes([n]) * 32), b"advert", n)
    assert [one.seen_ms for one in store.remembered_peers()] == [3, 2]
    assert store.remembered_peers(1)[0].addresses == ("/ip4/127.0.0.1/tcp/3",)
    assert [seen for _, _, seen in store.adverts()] == [3, 2]


def test_pruning_keeps_the_newest_versions_whatever_their_age(store: Store) -> None:
    main = lineage(HISTORY_MIN + 10)
    store.add_commits(main)
    store.add_commits(lineage(5, fragment=1))
    assert store.prune(now_ms=100_000) == 0, "nothing is a week old"
    assert store.prune(now_ms=30 * DAY_MS) == 10
    assert store.lineage(0, main[-1][0]) == main[10:]
    assert len(store.receipts(PEER, limit=10_000)) == HISTORY_MIN + 5
    assert store.prune(now_ms=30 * DAY_MS) == 0


def test_a_number_beyond_the_file_format_is_refused(store: Store) -> None:
    with pytest.raises(StoreError) as caught:
        store.add_commits([(digest_of(1), commit(1, NO_DIGEST, seq=2**63))])
    assert caught.value.kind == "bound"
    assert store.commit(digest_of(1)) is None


def test_a_full_disk_is_told_apart_and_the_store_goes_on_afterwards(store: Store) -> None:
    store.add_commits(lineage(2))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(StoreError) as caught:
        store.add_commits(lineage(200, fragment=1))
    assert caught.value.disk_full
    assert "free some room" in caught.value.fix
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.commit(lineage(1, fragment=1)[0][0]) is None, "all or nothing"
    assert store.add_commits(lineage(200, fragment=1)) == 200
    assert store.issue_seq(0) == 1


@pytest.mark.parametrize("damage", ["not sqlite", "torn", "foreign"])
def test_a_damaged_file_is_named_and_left_as_it_is(path: Path, damage: str) -> None:
    if damage == "foreign":
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE meta (a)")
    else:
        with closing(Store.open(path)) as store:
            store.add_commits(lineage(200))
        data = path.read_bytes()
        torn = data[:4096] + b"\xff" * 8192 + data[12288:]
        path.write_bytes(b"something else entirely" * 300 if damage == "not sqlite" else torn)
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        Store.open(path)
    assert caught.value.kind == "corrupt"
    assert str(path) in caught.value.reason
    assert path.read_bytes() == before


def test_a_newer_or_another_runs_file_is_refused(path: Path) -> None:
    Store.open(path, RUN).close()
    with pytest.raises(StoreError) as other:
        Store.open(path, RunId(bytes(32)))
    assert other.value.kind == "other_run"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError) as newer:
        Store.open(path, RUN)
    assert newer.value.kind == "newer"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path / "none" / "state.sqlite")
    assert caught.value.kind == "no_access"
