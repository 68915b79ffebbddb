"""`dugnad receipts export`: what this machine holds of a run's receipts, as one file.

The disk is read as it stands, whether or not a daemon runs: nothing is locked, and what is added
meanwhile is not seen. The file is written beside the wanted one, forced to the disk and renamed.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dugnad.averaging.board import Board, board_json
from dugnad.averaging.committree import CommitTree, row_of, start_of
from dugnad.averaging.formats import CommitRecord
from dugnad.averaging.setboard import PAGE, fold_from
from dugnad.dht.ids import RunId, run_text
from dugnad.dht.records import RecordError
from dugnad.peer.assembly import credit_rules, lineage_rules
from dugnad.peer.errors import UserError
from dugnad.peer.exportsources import find_run, newest_run, run_manifest
from dugnad.peer.failures import store_error
from dugnad.peer.leaderboard import basis_line
from dugnad.peer.manifest import Manifest, encode_manifest
from dugnad.peer.paths import Home, disk_error, fsync_folder
from dugnad.peer.receiptfile import Beginning, ReceiptWriter
from dugnad.peer.statementsync import stored_said, stored_statements
from dugnad.peer.store import Store, StoreError
from dugnad.peer.storeschema import disk_error as disk_fault


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and the reasons why commits were left out."""

    commits: int
    board: Board
    left_out: Counter[str]


def export(home: Home, text: str | None, path: Path, *, force: bool) -> int:
    """Write the receipts of a run of ``home`` (the newest if not named); the exit status.

    UserError: E042 no such run, E034 the file exists, E017 and E026 the disk.
    """
    run = find_run(home, text) if text else newest_run(home)
    if not force and os.path.lexists(path):
        raise UserError("E034", f"{path} exists", "choose another name, or add --force")
    state = home.run(run).state
    if not state.exists():
        raise UserError("E042", f"no receipts of run {run_text(run)} are in {home.root}", "join it")
    try:
        store = Store.open(state, run)
        try:
            with store.snapshot():
                done = _into_place(store, run_manifest(home, run), run, path)
        finally:
            store.close()
    except StoreError as error:
        raise store_error(error) from error
    for reason, count in done.left_out.most_common():
        print(f"{count} commits are left out: {reason}", file=sys.stderr)
    size = path.stat().st_size
    print(f"{done.commits} commits of run {run_text(run)[:12]} in {path} ({size / 1e6:,.1f} MB)")
    print(basis_line(done.board))
    return 0


def _into_place(store: Store, manifest: Manifest, run: RunId, path: Path) -> Exported:
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("xb") as file:
            done = write_receipts(store, manifest, run, ReceiptWriter(file))
        draft.replace(path)
        fsync_folder(path.absolute().parent)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        draft.unlink(missing_ok=True)
    return done


def write_receipts(store: Store, manifest: Manifest, run: RunId, writer: ReceiptWriter) -> Exported:
    """Write all of a store's commits that hang together. OSError and StoreError as usual."""
    rules = [lineage_rules(manifest, run, p) for p in range(len(manifest.table.fragments))]
    starts = [
        start_of(one, (row_of(*row) for row in store.commits(p))) for p, one in enumerate(rules)
    ]
    writer.open(encode_manifest(manifest), tuple(Beginning(s.version, s.digest) for s in starts))
    try:
        for statement in stored_statements(store):
            writer.state(statement)
        said = stored_said(store, run)
    except RecordError as error:
        raise disk_fault("corrupt", store.path, error) from error
    fold, left_out = fold_from(credit_rules(manifest, run), starts), Counter[str]()
    for p, one in enumerate(rules):
        tree = CommitTree(one, starts[p], kept=1)
        for digest, commit in store.commits(p):
            if reason := tree.add(digest, commit):
                left_out[reason] += 1
            else:
                writer.add(commit)
        chain = tree.chain()
        for at in range(0, len(chain), PAGE):
            names = chain[at : at + PAGE]
            fold.follow(p, [(name, _stored(store, name)) for name in names])
    board = fold.board(said)
    writer.end(board_json(board))
    return Exported(writer.commits, board, left_out)


def _stored(store: Store, digest: bytes) -> CommitRecord:
    commit = store.commit(digest)
    assert commit is not None, "nothing is deleted under a snapshot"
    return commit
