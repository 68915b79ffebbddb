"""Receipts as a file: equal sets make equal files, and the first bad thing in one is named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from dugnad.averaging.board import Board, board_json
from dugnad.averaging.formats import (
    NO_DIGEST,
    Ack,
    CommitRecord,
    header_digest,
    inputs_root,
    sign_record,
)
from dugnad.averaging.setboard import board_of
from dugnad.dht.identity import Identity
from dugnad.dht.ids import run_text
from dugnad.peer.assembly import credit_rules, lineage_rules
from dugnad.peer.errors import UserError
from dugnad.peer.manifest import encode_manifest
from dugnad.peer.receiptexport import export
from dugnad.peer.receiptfile import (
    MAGIC,
    RECORD_BYTES_MAX,
    Beginning,
    FileFault,
    Listed,
    ReceiptWriter,
)
from dugnad.peer.receiptverify import Verdict, judge_file, verify

from .receipt_world import PEOPLE, Made, kept  # noqa: TID252  the world is no installed package

Row = tuple[bytes, CommitRecord]


@pytest.fixture(scope="module")
def made() -> Made:
    """A run with a few merges of every fragment."""
    return Made().go(6)


class Draft:
    """A file in memory, begun as an exporter begins it."""

    def __init__(self, made: Made, starts: tuple[Beginning, ...] | None = None) -> None:
        self.file = io.BytesIO()
        self.file.fileno = lambda: 0  # type: ignore[method-assign]  # there is no disk
        self.writer = ReceiptWriter(self.file)
        whole = tuple(Beginning(0, one.genesis.digest) for one in made.lineages)
        self.writer.open(encode_manifest(made.manifest), whole if starts is None else starts)

    def ended(self, board: bytes) -> bytes:
        self.writer.end(board)
        return self.file.getvalue()


def order(row: Row) -> tuple[int, int, bytes]:
    return row[1].header.fragment, row[1].header.version, row[0]


def written(made: Made, rows: Sequence[Row], *, ordered: bool = True) -> bytes:
    """A file of these commits, as an exporter would write it."""
    draft = Draft(made)
    for _, record in sorted(rows, key=order) if ordered else rows:
        draft.writer.add(record)
    return draft.ended(board_json(board(made, dict(rows))))


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dugnad.peer.receiptfile.os.fsync", lambda _: None)


def board(made: Made, commits: dict[bytes, CommitRecord]) -> Board:
    rules = [lineage_rules(made.manifest, made.run, p) for p in range(made.fragments)]
    return board_of(credit_rules(made.manifest, made.run), rules, commits)


def judged(data: bytes, now_ms: int = 1 << 50) -> tuple[Verdict, Board]:
    return judge_file(io.BytesIO(data), now_ms)


def fault(data: bytes) -> str:
    with pytest.raises(FileFault) as caught:
        judged(data)
    return caught.value.reason


def test_two_stores_with_the_same_set_export_the_same_bytes(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homes = [
        kept(made, tmp_path / "a", made.commits),
        kept(made, tmp_path / "b", made.commits[::-1]),
    ]
    files = [tmp_path / "one", tmp_path / "two"]
    for home, file in zip(homes, files, strict=True):
        assert export(home, None, file, force=False) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    said = capsys.readouterr().out
    assert f"{len(made.commits)} commits of run {run_text(made.run)[:12]}" in said
    assert verify(files[0], run_text(made.run)[:8], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(board_json(board(made, dict(made.commits))))
    assert told["tokens"] > 0
    assert verify(files[1], "", as_json=False) == 0
    said = capsys.readouterr().out
    assert "receipts hold" in said
    assert "Computed from" in said


def test_a_file_is_not_replaced_unless_asked_and_a_strange_run_is_refused(
    made: Made, tmp_path: Path
) -> None:
    home = kept(made, tmp_path / "a", made.commits)
    file = tmp_path / "file"
    export(home, run_text(made.run)[:6], file, force=False)
    with pytest.raises(UserError, match="exists") as there:
        export(home, None, file, force=False)
    assert there.value.number == "E034"
    export(home, None, file, force=True)
    with pytest.raises(UserError, match="is of run") as other:
        verify(file, "zzzz", as_json=False)
    assert other.value.exit_code == 50
    with pytest.raises(UserError) as nowhere:
        export(home, None, tmp_path / "no" / "such", force=False)
    assert nowhere.value.number == "E026"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "file"]


def test_a_file_whose_first_versions_were_forgotten_says_so(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [row for row in made.commits if row[1].header.version > 2]
    home = kept(made, tmp_path / "a", late)
    export(home, None, tmp_path / "file", force=False)
    verify(tmp_path / "file", "", as_json=False)
    assert "the file begins after version 2" in capsys.readouterr().out


def test_a_commit_that_hangs_in_the_air_is_left_out_of_an_export(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gap = [row for row in made.commits if (row[1].header.fragment, row[1].header.version) != (0, 2)]
    home = kept(made, tmp_path / "a", gap)
    export(home, None, tmp_path / "file", force=False)
    said = capsys.readouterr()
    assert "1 commits are left out: it is not linked" in said.err
    judged((tmp_path / "file").read_bytes())


def resigned(made: Made, record: CommitRecord, **changes: object) -> CommitRecord:
    """The commit with another header, signed by its home all the same."""
    home = next(who for who in PEOPLE if who.peer == record.header.home)
    header = msgspec.structs.replace(record.header, **changes)
    return CommitRecord(sign_record(header, made.run, home), record.inputs)


def with_inputs(made: Made, record: CommitRecord, inputs: tuple[object, ...]) -> CommitRecord:
    """The commit with other inputs, and the root and signature that a bad home gives them."""
    other = CommitRecord(record.header, inputs)  # type: ignore[arg-type]
    root = inputs_root(made.run, other.inputs)
    return resigned(made, other, inputs_root=root, inputs_count=len(inputs))


def forged_receipt(made: Made, record: CommitRecord) -> CommitRecord:
    one = record.inputs[0]
    stranger = Identity.ephemeral(b"x" * 32)
    lie = msgspec.structs.replace(one.contribution, steps=99)
    lie = msgspec.structs.replace(
        sign_record(msgspec.structs.replace(lie, peer=stranger.peer), made.run, stranger),
        peer=one.contribution.peer,
    )
    return with_inputs(
        made, record, (msgspec.structs.replace(one, contribution=lie), *record.inputs[1:])
    )


def replayed(made: Made, record: CommitRecord) -> CommitRecord:
    """A later commit lists, beside its own, what an earlier one had listed."""
    earlier = next(
        c
        for _, c in made.commits
        if c.header.fragment == record.header.fragment
        and c.header.version == record.header.version - 1
    )
    return with_inputs(made, record, (earlier.inputs[0], *record.inputs[1:]))


Change = Callable[[Made, CommitRecord], CommitRecord]
CHANGES: dict[str, tuple[Change, str]] = {
    "unsigned": (
        lambda m, c: CommitRecord(msgspec.structs.replace(c.header, signature=b""), c.inputs),
        "unsigned",
    ),
    "forged": (
        lambda m, c: CommitRecord(msgspec.structs.replace(c.header, boot=7), c.inputs),
        "not signed by its home",
    ),
    "forged receipt": (forged_receipt, "not signed by its maker"),
    "replayed": (replayed, "a replay"),
    "wrong members": (
        lambda m, c: resigned(m, c, members_root=NO_DIGEST),
        "member table does not follow",
    ),
    "wrong inputs": (
        lambda m, c: resigned(m, c, inputs_root=NO_DIGEST),
        "do not match the root",
    ),
    "wrong total": (lambda m, c: resigned(m, c, tokens_total=1), "token total"),
    "not linked": (lambda m, c: resigned(m, c, parent=b"p" * 32), "not linked"),
    "another run": (lambda m, c: resigned(m, c, run=b"r" * 32), "another run"),
    "no fragment": (lambda m, c: resigned(m, c, fragment=40), "of another fragment"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_the_first_bad_commit_of_a_file_is_named(made: Made, change: Change, reason: str) -> None:
    rows = sorted(made.commits, key=order)
    n = next(i for i, row in enumerate(rows) if order(row)[:2] == (0, 4))
    bad = change(made, rows[n][1])
    rows[n] = (header_digest(bad.header, made.run), bad)
    said = fault(written(made, rows, ordered=False))
    assert reason in said
    assert said.startswith(f"commit {n + 1} of the file (fragment ")


def test_a_home_that_acknowledges_its_own_commit_is_self_witnessed(made: Made) -> None:
    digest, record = made.commits[0]
    home = next(who for who in PEOPLE if who.peer == record.header.home)
    other = next(who for who in PEOPLE if who.peer != record.header.home)
    true = sign_record(Ack(other.peer, 0, 1, digest), made.run, other)
    own = sign_record(Ack(home.peer, 0, 1, digest), made.run, home)
    forged = msgspec.structs.replace(true, signature=own.signature)
    strange = sign_record(Ack(other.peer, 0, 1, b"d" * 32), made.run, other)
    for acks, reason in (
        ((true,), ""),
        ((true, own), "self-witnessed"),
        ((forged,), "not signed by it"),
        ((strange,), "another commit"),
    ):
        listed = CommitRecord(record.header, record.inputs, acks)
        data = _with_acks(made, listed)
        if reason:
            assert reason in fault(data)
        else:
            judged(data)


def _with_acks(made: Made, record: CommitRecord) -> bytes:
    """A file of one commit, written by somebody who keeps the acks."""
    draft = Draft(made)
    draft.writer._frame(Listed(record))
    draft.writer.commits += 1
    return draft.ended(board_json(board(made, {header_digest(record.header, made.run): record})))


def test_a_file_that_was_cut_or_goes_on_is_refused(made: Made) -> None:
    data = written(made, made.commits)
    judged(data)
    assert "begins with other bytes" in fault(b"")
    assert "truncated" in fault(data[:-1])
    assert "truncated" in fault(data[: len(data) // 2])
    assert "truncated" in fault(MAGIC)
    assert "behind its end" in fault(data + b"x")
    long = data[: len(MAGIC)] + (RECORD_BYTES_MAX + 1).to_bytes(4, "big") + data[len(MAGIC) + 4 :]
    assert "record 0 is too long" in fault(long)


def test_any_one_changed_byte_is_noticed(made: Made) -> None:
    data = written(made, made.commits[:4])
    for at in range(0, len(data), 211):
        bad = bytearray(data)
        bad[at] ^= 0x10
        assert fault(bytes(bad))


def test_commits_out_of_order_or_twice_or_of_tomorrow_are_refused(made: Made) -> None:
    rows = sorted((row for row in made.commits if row[1].header.version == 1), key=order)
    assert "out of order" in fault(written(made, rows[::-1], ordered=False))
    assert "there twice" in fault(written(made, [rows[0], rows[0]], ordered=False))
    with pytest.raises(FileFault, match="dated more than a minute ahead"):
        judged(written(made, rows), now_ms=0)


def test_another_board_or_beginning_than_follows_is_refused(made: Made) -> None:
    assert "another board" in fault(Draft(made).ended(b"{}"))
    assert "beginnings" in fault(Draft(made, ()).ended(b""))
    strange = tuple(Beginning(0, b"s" * 32) for _ in made.lineages)
    assert "not version 0 of this run" in fault(Draft(made, strange).ended(b""))
