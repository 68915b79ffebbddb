"""Where an export comes from: this machine's data folder, or peers of the run over the network.

From the folder nothing is asked of a running daemon and nothing is locked: anchor files are
replaced whole, and SQLite lets readers in. Over the network an observer pulls: the manifest by its
hash, the heads, each head's header (whose signature is checked) and the anchors by its roots, in
pieces from several peers.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from dugnad.averaging.board import Board
from dugnad.averaging.credit import CreditError, CreditFold
from dugnad.averaging.formats import CommitRecord, HeadRow, signature_holds
from dugnad.averaging.tree import Vector
from dugnad.dht.addresses import parse_address
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId, run_text
from dugnad.dht.link import Link
from dugnad.dht.p2pd import SubstrateError
from dugnad.dht.records import verify_ed25519
from dugnad.dht.substrate import SeedReport, Substrate, SubstrateConfig
from dugnad.peer.anchors import AnchorFiles
from dugnad.peer.assembly import credit_rules, restore
from dugnad.peer.errors import UserError
from dugnad.peer.exportcard import Snapshot
from dugnad.peer.failures import no_seed_error, store_error, substrate_error
from dugnad.peer.init import initial_parameters
from dugnad.peer.manifest import MANIFEST_BYTES_MAX, Manifest, ManifestError, decode_manifest
from dugnad.peer.paths import Home, read_bounded
from dugnad.peer.pull import Puller, PullError
from dugnad.peer.store import Store, StoreError

TRIES: Final = 5
"""Peers hold a head and its parent: a fetch that takes longer than a merge asks for newer heads."""
RETRY_S: Final = 1.0
PAGE: Final = 64
HISTORY_MAX: Final = 20_000
"""Commits of one fragment read for the contributors of a card: a day of one every four seconds."""

Chains = dict[int, list[tuple[bytes, CommitRecord]]]


def find_run(home: Home, text: str) -> RunId:
    """The run of ``home`` that ``text`` names: an id, the beginning of one, or the run's name.

    UserError E042 when there is none, or more than one.
    """
    known = home.known_runs()
    found = [run for run in known if text and run_text(run).startswith(text.lower())]
    if not found:
        found = [run for run in known if _name(home, run) == text]
    if len(found) == 1:
        return found[0]
    rows = ", ".join(f"{run_text(run)} ({_name(home, run) or 'no manifest'})" for run in known)
    raise UserError(
        "E042",
        f"{text!r} names {len(found) or 'none'} of the runs in {home.root}",
        f"give the id of one of them: {rows}" if rows else "give a link, or another --home",
    )


def newest_run(home: Home) -> RunId:
    """The run of ``home`` that was written to last. UserError E042 when it holds none."""
    runs = home.known_runs()
    if not runs:
        raise UserError(
            "E042", f"there is no run in {home.root}", "join one, or give another --home"
        )
    return max(runs, key=lambda run: written(home.run(run).state))


def written(path: Path) -> float:
    """When a store was written to last, seconds; 0 when it is not there."""
    files = [path, path.with_name(path.name + "-wal")]
    return max((one.stat().st_mtime for one in files if one.exists()), default=0.0)


def _name(home: Home, run: RunId) -> str:
    try:
        return run_manifest(home, run).name
    except UserError:
        return ""


def run_manifest(home: Home, run: RunId) -> Manifest:
    """The manifest of a run that ``home`` keeps. UserError E025 when it cannot be used."""
    path = home.run(run).manifest
    try:
        return decode_manifest(read_bounded(path, MANIFEST_BYTES_MAX), run)
    except (OSError, ValueError, ManifestError) as error:
        raise UserError(
            "E025", f"{path} cannot be used: {error}", "join the run again, or give its link"
        ) from error


# -- from the folder -------------------------------------------------------------------------------


def from_folder(home: Home, run: RunId) -> Snapshot:
    """The newest anchors on the disk of a peer that runs or not. UserError when it cannot be read.

    A fragment of which nothing good is on the disk is at version 0.
    """
    place, manifest = home.run(run), run_manifest(home, run)
    theta = initial_parameters(manifest.table, manifest.model, manifest.seed)
    versions, tokens = [0] * len(manifest.table.fragments), 0
    board: Board | None = None
    if place.state.exists():
        try:
            store = Store.open(place.state, run)
            try:
                for p, (start, size) in enumerate(_parts(manifest)):
                    found, _ = restore(store, AnchorFiles(place.anchors), run, p)
                    if found is not None:
                        header = found.point.commit.header
                        theta[start : start + size] = found.anchor.theta
                        versions[p] = header.version
                        tokens = max(tokens, header.tokens_total)
                board = _stored_board(store, manifest, run)
            finally:
                store.close()
        except StoreError as error:
            raise store_error(error) from error
    return Snapshot(run, manifest, tuple(versions), tokens, theta, board)


def _parts(manifest: Manifest) -> list[tuple[int, int]]:
    return list(zip(manifest.table.offsets, manifest.table.sizes, strict=True))


def _stored_board(store: Store, manifest: Manifest, run: RunId) -> Board | None:
    rules = credit_rules(manifest, run)
    fold = CreditFold(rules)
    state = store.load_fold()
    if state is not None:
        try:
            fold = CreditFold.restore(rules, state)
        except CreditError:
            fold = CreditFold(rules)  # of another formula: all is folded anew
    chains = {
        row.fragment: store.lineage(row.fragment, row.digest, fold.tip(row.fragment)[0])
        for row in store.heads()
    }
    return _folded(fold, chains)


def _folded(fold: CreditFold, chains: Chains) -> Board | None:
    try:
        for fragment, chain in sorted(chains.items()):
            if chain:
                fold.follow(fragment, chain)
    except CreditError:
        return None  # the history has a gap here
    return fold.board()


# -- over the network ------------------------------------------------------------------------------


async def from_network(link: Link) -> Snapshot:
    """What the peers of a link hold, as an observer who leaves no trace. UserError."""
    with tempfile.TemporaryDirectory(prefix="dugnad-") as folder:
        key = Path(folder) / "identity.key"
        config = SubstrateConfig(
            identity=key,
            runtime=Path(folder) / "run",
            hosts=("127.0.0.1",),
            seeds=link.peers,
            outbound_only=True,
            quic=False,
            address_book=False,
        )
        substrate = Substrate(config, Identity.create(key))
        try:
            reports = await substrate.start()
            peers = _reached(link, reports)
            return await observe(Puller(substrate, link.run), peers, link.run)
        except SubstrateError as error:
            raise substrate_error(error) from error
        finally:
            await substrate.close()


def _reached(link: Link, reports: Sequence[SeedReport]) -> list[PeerId]:
    """Peers of the seeds that answered; UserError E016 when none did."""
    found = [parse_address(one.address).peer for one in reports if one.ok]
    peers = list(dict.fromkeys(peer for peer in found if peer is not None))
    if not peers:
        raise no_seed_error([(one.address, one.reason) for one in reports])
    return peers


async def observe(puller: Puller, peers: Sequence[PeerId], run: RunId) -> Snapshot:
    """Pull manifest, heads, anchors and history from ``peers``. UserError when nobody serves."""
    try:
        manifest = decode_manifest(await puller.manifest(peers, run), run)
    except ManifestError as error:
        raise UserError("E025", str(error), "ask whoever gave you the link") from error
    except PullError as error:
        raise UserError(
            "E014", f"no peer has the run of this link: {error.reason}", "ask for a new link"
        ) from error
    theta = initial_parameters(manifest.table, manifest.model, manifest.seed)
    versions, tokens, chains = [0] * len(manifest.table.fragments), 0, Chains()
    for p, (start, size) in enumerate(_parts(manifest)):
        found = await _fragment(puller, peers, run, p, size)
        if found is None:
            continue
        record, digest, part = found
        theta[start : start + size] = part
        versions[p], header = record.header.version, record.header
        tokens = max(tokens, header.tokens_total)
        chains[p] = await _history(puller, peers, p, digest)
    board = _folded(CreditFold(credit_rules(manifest, run)), chains)
    return Snapshot(run, manifest, tuple(versions), tokens, theta, board)


async def _fragment(
    puller: Puller, peers: Sequence[PeerId], run: RunId, p: int, size: int
) -> tuple[CommitRecord, bytes, Vector] | None:
    """The heaviest head of fragment ``p`` that somebody serves; None: it is at version 0."""
    last = PullError("no peer told its heads")
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(RETRY_S)
        try:
            heads = await _heads(puller, peers, p)
            if not heads:
                return None
            records = [await _record(puller, peers, run, head) for head in heads]
            record, digest = max(records, key=lambda one: (one[0].header.tokens_total, one[1]))
            theta, _ = await puller.anchors(peers, record.header, size)
        except PullError as error:
            last = error
            continue
        if not np.isfinite(theta).all():
            raise UserError("E014", f"fragment {p} holds numbers that are not finite", "try later")
        return record, digest, theta
    raise UserError(
        "E016", f"fragment {p} could not be fetched: {last.reason}", "try again, or other peers"
    )


async def _heads(puller: Puller, peers: Sequence[PeerId], p: int) -> list[HeadRow]:
    """The different heads of fragment ``p`` above version 0. PullError when nobody answers."""
    found: dict[bytes, HeadRow] = {}
    last: PullError | None = None
    answers = 0
    for peer in peers:
        try:
            rows = await puller.heads([peer])
        except PullError as error:
            last = error
            continue
        answers += 1
        found.update({row.digest: row for row in rows if row.fragment == p and row.version > 0})
    if not answers:
        raise last or PullError("there is nobody to ask")
    return list(found.values())


async def _record(
    puller: Puller, peers: Sequence[PeerId], run: RunId, head: HeadRow
) -> tuple[CommitRecord, bytes]:
    """A head's commit, signed by its home. PullError when nobody serves such a one."""
    (record,) = await puller.commits(peers, head.fragment, head.digest, 1)
    if not signature_holds(record.header, run, verify_ed25519):
        raise PullError(f"the header of version {head.version} is not signed by its home")
    return record, head.digest


async def _history(
    puller: Puller, peers: Sequence[PeerId], p: int, digest: bytes
) -> list[tuple[bytes, CommitRecord]]:
    """The commits down to version 1, oldest first; shorter where nobody has more."""
    found: list[tuple[bytes, CommitRecord]] = []
    while len(found) < HISTORY_MAX and not (found and found[-1][1].header.version == 1):
        try:
            page = await puller.commits(peers, p, digest, PAGE)
        except PullError:
            break  # the receipts above are there; the fold says whether they suffice
        for record in page:
            found.append((digest, record))
            digest = record.header.parent
    return found[::-1]
