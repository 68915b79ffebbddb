"""`dugnad receipts verify`: a file of receipts judged by whoever holds it, offline.

Nothing is believed: the manifest is the run's by its hash, every commit and every receipt carries
its maker's signature, each commit is linked to the one before and follows from it by the rules of
the run, and the board is computed anew. The first thing that is wrong is named with its place.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from dugnad.averaging.board import Board, board_json
from dugnad.averaging.committree import CommitTree, Start
from dugnad.averaging.formats import CommitRecord, header_digest
from dugnad.averaging.lineage import LineageRules
from dugnad.averaging.receiptcheck import ack_reason, commit_reason
from dugnad.averaging.setboard import PAGE, fold_from
from dugnad.averaging.statements import StatementSet
from dugnad.dht.ids import RunId, run_text
from dugnad.dht.records import verify_ed25519
from dugnad.peer.assembly import credit_rules, lineage_rules
from dugnad.peer.clock import wall_ms
from dugnad.peer.errors import UserError
from dugnad.peer.leaderboard import board_text, print_board
from dugnad.peer.manifest import Manifest, ManifestError, decode_manifest
from dugnad.peer.paths import disk_error
from dugnad.peer.receiptfile import (
    FileFault,
    Listed,
    Opening,
    Placed,
    ReceiptReader,
    Stated,
)
from dugnad.peer.views import printable

ASK_AGAIN: Final = "do not rely on this file; ask a peer of the run for another export"


@dataclass(slots=True)
class Verdict:
    """What a file that holds is about."""

    run: RunId
    manifest: Manifest
    rules: list[LineageRules]
    starts: list[Start]
    statements: StatementSet
    tree: CommitTree
    """Of the fragment whose commits are being read: they come fragment by fragment."""
    chains: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    commits: int = 0
    receipts: int = 0
    offsets: dict[bytes, int] = field(default_factory=dict)
    stated: bytes = b""
    """The name of the last statement: they ascend."""

    @property
    def partial(self) -> list[int]:
        """Fragments whose first versions are not in the file."""
        return [p for p, start in enumerate(self.starts) if start.version]


def judge_file(file: BinaryIO, now_ms: int) -> tuple[Verdict, Board]:
    """What an open file holds, and the board that follows. FileFault names the first bad thing."""
    reader = ReceiptReader(file)
    verdict: Verdict | None = None
    last: tuple[int, int, bytes] = (-1, 0, b"")
    board_sha256 = b""
    for placed in reader.records():
        record = placed.record
        if isinstance(record, Opening):
            verdict = _opened(record)
        elif isinstance(record, Listed):
            assert verdict is not None, "the reader gives the opening first"
            last = _judged(verdict, placed, record.commit, last, now_ms)
        elif isinstance(record, Stated):
            assert verdict is not None, "the reader gives the opening first"
            _take_statement(verdict, placed.number, record.record, now_ms)
        else:
            board_sha256 = record.board_sha256
    assert verdict is not None, "a file without an opening was refused"
    if last[0] >= 0:
        verdict.chains[last[0]] = verdict.tree.chain()
    board = _board(verdict, reader)
    if hashlib.sha256(board_json(board)).digest() != board_sha256:
        raise FileFault("its receipts hold, but another board was written than follows from them")
    return verdict, board


def _opened(opening: Opening) -> Verdict:
    run = RunId(hashlib.sha256(opening.manifest).digest())
    try:
        manifest = decode_manifest(opening.manifest, run)
    except ManifestError as error:
        raise FileFault(f"its manifest is refused: {error.reason}") from error
    fragments = len(manifest.table.fragments)
    if len(opening.starts) != fragments:
        raise FileFault(f"it has {len(opening.starts)} beginnings for {fragments} fragments")
    starts = [Start(one.version, one.digest) for one in opening.starts]
    rules = [lineage_rules(manifest, run, p) for p in range(fragments)]
    trees = [CommitTree(rules[p], start, kept=1) for p, start in enumerate(starts)]
    for p, tree in enumerate(trees):
        if tree.whole != (tree.start.version == 0):
            raise FileFault(f"the beginning of fragment {p} is not version 0 of this run")
    return Verdict(run, manifest, rules, starts, StatementSet(run, lambda peer: True), trees[0])


def _take_statement(verdict: Verdict, number: int, record: bytes, now_ms: int) -> None:
    name = hashlib.sha256(record).digest()
    reason = verdict.statements.take(record, now_ms)
    if not reason and name <= verdict.stated:
        reason = "it is out of order"
    if reason:
        raise FileFault(f"statement {number} of the file: {reason}")
    verdict.stated = name


def _judged(
    verdict: Verdict, placed: Placed, commit: CommitRecord, last: tuple[int, int, bytes], now: int
) -> tuple[int, int, bytes]:
    """Judge one commit and take it into its tree; its place in the order."""
    header, run = commit.header, verdict.run
    reason = commit_reason(commit, run, verdict.manifest.data.context, verify_ed25519, now) or next(
        (r for ack in commit.acks if (r := ack_reason(ack, commit, run, verify_ed25519))), ""
    )
    digest = header_digest(header, run)
    place = (header.fragment, header.version, digest)
    if not reason and header.fragment >= len(verdict.rules):
        reason = f"the run has {len(verdict.rules)} fragments"
    if not reason and place <= last:
        reason = "it is out of order, or there twice"
    if not reason:
        if header.fragment != last[0]:
            _go_on(verdict, last[0], header.fragment)
        reason = verdict.tree.add(digest, commit)
    if reason:
        raise FileFault(
            f"commit {verdict.commits + 1} of the file (fragment {header.fragment}, version "
            f"{header.version}, {digest.hex()[:12]}): {reason}"
        )
    verdict.commits += 1
    verdict.receipts += len(commit.inputs)
    verdict.offsets[digest] = placed.offset
    return place


def _go_on(verdict: Verdict, before: int, fragment: int) -> None:
    """The commits of a fragment have been read; those of another begin."""
    if before >= 0:
        verdict.chains[before] = verdict.tree.chain()
    verdict.tree = CommitTree(verdict.rules[fragment], verdict.starts[fragment], kept=1)


def _board(verdict: Verdict, reader: ReceiptReader) -> Board:
    fold = fold_from(credit_rules(verdict.manifest, verdict.run), verdict.starts)
    for p, chain in sorted(verdict.chains.items()):
        for at in range(0, len(chain), PAGE):
            names = chain[at : at + PAGE]
            fold.follow(p, [(name, reader.commit_at(verdict.offsets[name])) for name in names])
    return fold.board(verdict.statements.said())


def verify(path: Path, run: str, *, as_json: bool) -> int:
    """Judge the file and print what it proves; the exit status. UserError E050 for a bad one.

    With ``run``, an id or the beginning of one, it must be that run's.
    """
    try:
        with path.open("rb") as file:
            verdict, board = judge_file(file, wall_ms())
    except FileFault as fault:
        raise UserError("E050", f"{path}: {printable(fault.reason, 500)}", ASK_AGAIN) from fault
    except OSError as error:
        raise disk_error(error, path) from error
    text = run_text(verdict.run)
    if not text.startswith(run.lower()):
        raise UserError("E050", f"{path}: it is of run {text}, not of {run}", ASK_AGAIN)
    if as_json:
        print(board_text(board))
        return 0
    for line in _lines(verdict, board):
        print(line)
    print_board(board, sys.stdout, now_ms=wall_ms())
    return 0


def _lines(verdict: Verdict, board: Board) -> list[str]:
    listed = sum(board.versions) - sum(start.version for start in verdict.starts)
    lines = [
        f"run {verdict.manifest.name!r}, {run_text(verdict.run)}",
        f"{verdict.commits} commits with {verdict.receipts} receipts hold: each is signed by its"
        " maker and its home, linked, and follows by the rules of the run",
    ]
    if listed < verdict.commits:
        lines.append(f"{verdict.commits - listed} of the commits lost to a better lineage")
    if verdict.partial:
        first = max(verdict.starts[p].version for p in verdict.partial)
        lines.append(
            f"the file begins after version {first} of {len(verdict.partial)} fragments: what was "
            "merged before is neither shown nor credited here"
        )
    return lines
